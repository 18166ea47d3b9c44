"""Creates the loggers of a config, and combines several loggers into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from rlft.config.instantiate import instantiate, locate
from rlft.logger.interface import Logger, RunInfo
from rlft.runs.lines import StepRecord
from rlft.types import Evaluation, UserError


def declares(logger: Any, attribute: str) -> bool:
    """Whether a logger, or its class, declares this by an attribute that is True (`rlft.logger.interface.Logger`)."""
    return getattr(logger, attribute, False) is True


def loggers_of(sections: Mapping[str, Any]) -> tuple[Logger, ...]:
    """The loggers of a config's section `logger`. Equal sections are one logger, whatever their names are."""
    distinct: dict[str, Any] = {}
    for name, section in sections.items():
        if section not in distinct.values():
            distinct[name] = section
    loggers = {name: instantiate(section, f"logger.{name}") for name, section in distinct.items()}
    for attribute, effect in (("writes_metrics", "writes metrics.jsonl"), ("has_page", "draws on the terminal")):
        names = [name for name, logger in loggers.items() if declares(logger, attribute)]
        if len(names) > 1:
            problem = f"{effect}, as logger.{names[0]} does"
            raise UserError(f"logger.{names[1]}", problem, remedy="choose one of the two")
    return tuple(loggers.values())


def is_declared(sections: Mapping[str, Any], attribute: str) -> bool:
    """Whether a class that these sections name declares this. UserError: none does, and one cannot be imported."""
    import_error: UserError | None = None
    for name, section in sections.items():
        try:
            if declares(locate(section.get("_target_"), f"logger.{name}._target_"), attribute):
                return True
        except UserError as error:
            import_error = error
    if import_error is not None:
        raise import_error
    return False


class Loggers:
    """Passes every call on, in order. `finish` reaches every logger that was started, even if another one fails.

    `say` takes the notes that come before the start. `current` is the run's stage, `run` the run once it has started,
    `last` the record of the last step.
    """

    def __init__(self, loggers: Iterable[Logger], say: Callable[[str], None]) -> None:
        self._loggers, self._say = tuple(loggers), say
        self._started: list[Logger] = []
        self.current = "starting"
        self.run: RunInfo | None = None
        self.last: StepRecord | None = None

    @property
    def finished(self) -> int:
        newest = self.last or self.run
        return 0 if newest is None else newest.step

    def start(self, run: RunInfo) -> None:
        self.run = run
        for logger in self._loggers:
            self._started.append(logger)  # before its start: a half-started one has things to close too
            logger.start(run)

    def stage(self, name: str) -> None:
        self.current = name
        for logger in self._loggers:
            logger.stage(name)

    def step(self, record: StepRecord) -> None:
        self.last = record
        for logger in self._loggers:
            logger.step(record)

    def evaluation(self, evaluation: Evaluation) -> None:
        for logger in self._loggers:
            logger.evaluation(evaluation)

    def note(self, text: str) -> None:
        if self.run is None:
            self._say(text)
            return
        for logger in self._loggers:
            logger.note(text)

    def finish(self, status: str) -> None:
        with ExitStack() as stack:  # runs every callback, last in first out, and raises afterwards
            for logger in reversed(self._started):
                stack.callback(logger.finish, status)
            self._started.clear()
