"""Several loggers as one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from rlft.types import Evaluation, Logger, RunInfo, StepRecord


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
