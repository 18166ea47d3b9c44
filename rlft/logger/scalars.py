"""The base class of loggers that send numbers to a tracker; a subclass only says how its library is called.

Trouble with a tracker, whatever its library raises, is reported once and never stops training: the run's own files have
everything. `ScalarLogger._attempt` is the only place that calls a library.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlft.config.keys import flatten
from rlft.logger.interface import Logger, RunInfo
from rlft.runs.lines import StepRecord
from rlft.system import interrupt
from rlft.system.crash import described, escaped
from rlft.system.files import write_atomically
from rlft.system.process.running_time import within
from rlft.system.terminal import pip_install
from rlft.types import Evaluation, UserError

LIMIT_S = 120.0  # the longest wait for a call where no key says another


@dataclass(kw_only=True)
class ScalarLogger(Logger):
    """Sends the metrics of steps and evaluations, and the config, to a tracker.

    A subclass names its `package` (which is also its extra and its choice; UserError if it is not installed) and
    overrides `open`, `send` and `close`. A resumed run continues the tracker's run: `name_of` returns a name by which
    it is found again, and `logged` what it has already, which is not sent a second time. `remedy` says what a user can
    do about a tracker that fails, a field or property `seconds` how long to wait for one call at most (else LIMIT_S).
    It is neither frozen nor slotted, because it also holds the tracker's run.
    """

    package = ""
    remedy = "see what the library says of it"
    environment: ClassVar[Mapping[str, str]] = {}
    """{environment variable that the library reads: its value if the user has not set it}."""

    def __post_init__(self) -> None:
        self.run: Any = None  # the tracker's run; None before it is open, and after an error
        self.sent: Mapping[str, int] = {}  # {metric: the last step that the tracker had when this process began}
        spec = importlib.util.find_spec(self.package)
        # Some trackers leave a folder of their name, which Python takes for a package; it has no origin.
        if spec is None or spec.origin is None:
            remedy = f"{pip_install(f'rlft[{self.package}]')}, or leave {self.package} out of logger"
            raise UserError(f"logger.{self.package}", f"the package {self.package} is not installed", remedy=remedy)

    @property
    def library(self) -> Any:
        """The package, which is imported when the run begins."""
        return importlib.import_module(self.package)

    # -- what a tracker is ---------------------------------------------------------------------------------------------
    @abstractmethod
    def open(self, run: RunInfo) -> tuple[Any, str]:
        """(the tracker's run, new or continued, with the config; where to look at it)."""

    @abstractmethod
    def send(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs these metrics after `step` steps."""

    @abstractmethod
    def close(self, status: str) -> None:
        """Ends the tracker's run; `status` is as in `Logger.finish`."""

    def logged(self) -> Mapping[str, int]:
        """{metric: its last step} that the opened run has already; empty if the tracker itself drops repeated steps."""
        return {}

    def renamed(self, metric: str) -> str:
        """The metric's name as the tracker accepts it."""
        return metric

    def flush(self) -> None:
        """Waits until everything sent is on disk: after the next checkpoint it would not be sent again."""

    # -- a logger ------------------------------------------------------------------------------------------------------
    def start(self, run: RunInfo) -> None:
        self._attempt("could not start", "going on without it", self._begin, run)

    def stage(self, name: str) -> None:
        if name == "checkpoint" and self.run is not None:
            self._attempt("stopped logging", "training goes on", self.flush)

    def step(self, record: StepRecord) -> None:
        self._send(record.metrics, record.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        headline = {"eval/accuracy": evaluation.accuracy, "eval/accuracy_se": evaluation.accuracy_se}
        present = {name: value for name, value in headline.items() if value is not None}
        self._send({**evaluation.metrics, **present}, evaluation.step)

    def finish(self, status: str) -> None:
        if self.run is None:
            return
        self._attempt("could not close the run", "the run's own files are complete", self.close, status)
        self.run = None

    def tell(self, text: str) -> None:
        """Prints a line on stderr, if that can still be written; the live view shows it above its panel."""
        with suppress(OSError, ValueError):
            print(f"{self.package}: {escaped(text)}", file=sys.stderr, flush=True)

    def call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call into the library, which may take at most `seconds`."""
        return within(getattr(self, "seconds", LIMIT_S), call, *arguments)

    def _begin(self, run: RunInfo) -> None:
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        _ = self.library  # imported outside the time limit: an import may be slow, but waits for no server
        self.run, location = self.call(self.open, run)
        self.sent = self.call(self.logged)
        self.tell(location)

    def _send(self, metrics: Mapping[str, float], step: int) -> None:
        if self.run is not None:
            problem = f"stopped logging at step {step}"
            self._attempt(problem, "training goes on", self._send_new, metrics, step)

    def _send_new(self, metrics: Mapping[str, float], step: int) -> None:
        by_name = {self.renamed(name): value for name, value in metrics.items()}
        new = {name: value for name, value in by_name.items() if step > self.sent.get(name, -1)}
        if new:
            self.send(new, step)

    def _attempt(self, problem: str, consequence: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns; if it fails, reports that and does not call the tracker again in this process.

        Libraries also raise SystemExit, and KeyboardInterrupt of their own: only the user's is raised here.
        """
        signals_before = interrupt.signals_received()
        try:
            return call(*arguments) if call == self._begin else self.call(call, *arguments)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and interrupt.signals_received() > signals_before:
                raise
            self.run = None
            if isinstance(error, TimeoutError):
                interrupt.end_soon_at_the_end()  # the library's threads may wait for ever
            self.tell(f"{problem} ({described(error)}); {consequence}. What to do: {self.remedy}")
            return None


def kept(folder: Path, name: str, new: Callable[[], str]) -> str:
    """The text in this file of the run's folder; the first time, `new` makes it and it is written."""
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, new() + "\n")
    return path.read_text(encoding="utf-8").strip()


def name_of(run: RunInfo, package: str) -> str:
    """A name that no other run has: the run's own with eight digits, kept in <package>_name.txt in its folder.

    It may have any character of a run's name, such as quotes: escape it where a library reads it as part of a query.
    """
    return kept(run.folder, f"{package}_name.txt", lambda: f"{run.name}-{secrets.token_hex(4)}")


def parameters(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """{full key: value} of a config; a value that is no number, boolean or string becomes its JSON.

    >>> parameters({"trainer": {"lr": 0.5}, "lora": None, "stop": ["a"]})
    {'trainer.lr': 0.5, 'lora': 'null', 'stop': '["a"]'}
    """
    return {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)
        for key, value in flatten(config).items()
    }


def last_steps(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    """{metric: its last step} of pairs of a metric and a step, in any order."""
    return dict(sorted(rows, key=lambda row: row[1]))
