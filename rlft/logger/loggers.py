"""The loggers of a config, and several loggers as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from rlft.keys.instantiate import instantiate, locate
from rlft.types import Evaluation, Logger, RunInfo, StepRecord, UserError

ONLY_ONE = {"writes_metrics": "writes metrics.jsonl", "has_page": "draws on the terminal"}
"""What a logger may declare by a class attribute, and what two different loggers of a run cannot both do."""


def declares(logger: Any, attribute: str) -> bool:
    """Whether a logger, or its class, says this of itself by an attribute that is True (`rlft.types.Logger`)."""
    return getattr(logger, attribute, False) is True


def loggers_of(sections: Mapping[str, Any]) -> tuple[Logger, ...]:
    """The loggers of a config's section `logger`. Names decide nothing: sections that are equal are one logger.

    Raises:
        UserError: a section is wrong, or two different ones do what only one can.
    """
    different: dict[str, Any] = {}
    for name, section in sections.items():
        if section not in different.values():
            different[name] = section
    made = {name: instantiate(section, f"logger.{name}") for name, section in different.items()}
    for attribute, what in ONLY_ONE.items():
        names = [name for name, logger in made.items() if declares(logger, attribute)]
        if len(names) > 1:
            problem = f"{what}, as logger.{names[0]} does"
            raise UserError(f"logger.{names[1]}", problem, remedy="choose one of the two")
    return tuple(made.values())


def is_declared(sections: Mapping[str, Any], attribute: str) -> bool:
    """Whether a class that these sections name says this of itself.

    Raises:
        UserError: none that can be imported does, and one cannot be imported.
    """
    failed: UserError | None = None
    for name, section in sections.items():
        try:
            if declares(locate(section.get("_target_"), f"logger.{name}._target_"), attribute):
                return True
        except UserError as error:
            failed = error
    if failed is not None:
        raise failed
    return False


class Loggers:
    """Passes every call on, in order. `finish` reaches every logger that was started, even if another one fails.

    current: the stage that the run is in. run, last: what was told when it began, and the last step; None before.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = tuple(loggers)
        self._started: list[Logger] = []
        self.current = "starting"
        self.run: RunInfo | None = None
        self.last: StepRecord | None = None

    @property
    def finished(self) -> int:
        """Steps that are done."""
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
        for logger in self._loggers:
            logger.note(text)

    def finish(self, status: str) -> None:
        with ExitStack() as stack:  # runs every callback, last in first out, and raises afterwards
            for logger in reversed(self._started):
                stack.callback(logger.finish, status)
            self._started.clear()
