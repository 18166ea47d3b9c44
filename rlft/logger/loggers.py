"""What watches a run: its own files, the console, the trackers of its config; and several loggers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from rlft.config.instantiate import instantiate
from rlft.config.older import NOT_TRACKERS
from rlft.logger.interface import Logger, RunInfo
from rlft.logger.jsonl import Jsonl, Rollouts
from rlft.runs.lines import StepRecord
from rlft.system.crash import described
from rlft.system.terminal import say
from rlft.types import Evaluation, require


def own_loggers(config: Any) -> tuple[Logger, ...]:
    """The loggers of every run that trains, before its trackers: its files, and the console unless there is none."""
    from rlft.logger.console import Console  # with rich, which the check of a config does without

    rollouts, console = getattr(config, "rollouts", None), getattr(config, "console", None)
    files = (Jsonl(),) if rollouts is None else (Rollouts(rollouts), Jsonl())
    return files if console is None else (*files, Console(console))


def loggers_of(sections: Mapping[str, Any]) -> tuple[Any, ...]:
    """The trackers of a config's section `logger`. Equal sections are one tracker, whatever their names are."""
    distinct: dict[str, Any] = {}
    for name, section in sections.items():
        if section not in distinct.values():
            distinct[name] = section
    for name, target in ((name, keys.get("_target_")) for name, keys in distinct.items() if isinstance(keys, Mapping)):
        problem, remedy = "every run has it already, and it is no tracker", f"leave out logger.{name}"
        require(target not in NOT_TRACKERS.values(), f"logger.{name}._target_", problem, got=target, remedy=remedy)
    return tuple(Tracker(f"logger.{name}", instantiate(keys, f"logger.{name}")) for name, keys in distinct.items())


class Tracker:
    """A tracker of the config. After an error, which is printed once, only `finish` reaches it; the run continues."""

    def __init__(self, key: str, logger: Logger) -> None:
        self.logger, self._key, self._failed = logger, key, False

    def __getattr__(self, method: str) -> Callable[[Any], None]:
        return partial(self._call, method)

    def _call(self, method: str, argument: Any) -> None:
        if self._failed and method != "finish":
            return
        try:
            getattr(self.logger, method)(argument)
        except Exception as error:
            if not self._failed:
                say(f"{self._key}: {method} failed ({described(error)}); the run continues without it")
            self._failed = True


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
        self._tell("stage", name)

    def step(self, record: StepRecord) -> None:
        self.last = record
        self._tell("step", record)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._tell("evaluation", evaluation)

    def note(self, text: str) -> None:
        if self.run is None:
            self._say(text)
            return
        self._tell("note", text)

    def finish(self, status: str) -> None:
        with ExitStack() as stack:  # runs every callback, last in first out, and raises afterwards
            for logger in reversed(self._started):
                stack.callback(logger.finish, status)
            self._started.clear()

    def _tell(self, method: str, argument: Any) -> None:
        for logger in self._loggers:
            getattr(logger, method)(argument)
