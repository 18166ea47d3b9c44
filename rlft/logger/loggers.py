"""What watches a run: its own files, the console, the trackers of its config; and several loggers as one.

Apart from times, a resumed run leaves byte for byte the files of an uninterrupted one: lines beyond the checkpoint, and
a line torn by a kill, are cut off before anything is appended, and rollout files of later steps are removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlft.config.instantiate import instantiate, locate
from rlft.logger.interface import Logger, RunInfo
from rlft.runs import lines as run_lines
from rlft.runs.lines import StepRecord
from rlft.runs.run_folder import NOT_TRACKERS
from rlft.system.crash import described
from rlft.system.disk import writing
from rlft.system.files import append, flush, write_atomically
from rlft.system.terminal import say
from rlft.types import Evaluation, require

if TYPE_CHECKING:
    from rlft.config.schema import RolloutsConfig


class Jsonl(Logger):
    """Writes a line for each step and each evaluation, immediately."""

    def __init__(self) -> None:
        self.folder = Path()
        self.files: dict[str, BinaryIO] = {}
        self.evaluated = 0  # the step of the last line in eval.jsonl, or an upper bound of it

    def start(self, run: RunInfo) -> None:
        self.folder, self.evaluated = run.folder, run.step
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (run_lines.METRICS, run_lines.EVALUATIONS, run_lines.ALARMS):
            self.files[name] = run_lines.open_after(self.folder / name, run.step)
        if missing := run_lines.missing_at_the_end(self.folder / run_lines.METRICS, run.step):
            say(missing)

    def stage(self, name: str) -> None:
        """Flushes the files to disk before a checkpoint, so that a power cut leaves no gap in a resumed run's files."""
        if name == "checkpoint":
            for file in self.files.values():
                path = Path(file.name)
                with writing(path):
                    flush(path)

    def step(self, record: run_lines.StepRecord) -> None:
        self._append(run_lines.ALARMS, *run_lines.alarm_lines(record.step, record.alarms))
        self._append(run_lines.METRICS, {"step": record.step, **run_lines.numbers(record.metrics)})

    def evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.step <= self.evaluated:
            # A run that starts again from this step evaluates again: the new line replaces the old one.
            self.files[run_lines.EVALUATIONS].close()
            self.files[run_lines.EVALUATIONS] = run_lines.open_after(
                self.folder / run_lines.EVALUATIONS, evaluation.step - 1, run_lines.silent
            )
        self.evaluated = evaluation.step
        self._append(run_lines.ALARMS, *run_lines.alarm_lines(evaluation.step, evaluation.alarms))
        self._append(run_lines.EVALUATIONS, run_lines.evaluation_line(evaluation))

    def finish(self, status: str) -> None:
        for file in self.files.values():
            file.close()
        self.files.clear()

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        for line in lines:
            append(self.files[name], run_lines.encode(line))


class Rollouts(Logger):
    """Writes rollouts/step_<n>.jsonl, completely or not at all, of the steps that the `rollouts` section chooses.

    A run writes them before its other files: a line in metrics.jsonl promises that the step's completions exist.
    """

    def __init__(self, config: RolloutsConfig) -> None:
        self.config = config
        self.folder = Path()

    def start(self, run: RunInfo) -> None:
        self.folder = run.folder
        for path, step in run_lines.rollout_files(self.folder):
            if step > run.step or path.suffix == ".tmp":
                path.unlink()

    def step(self, record: run_lines.StepRecord) -> None:
        if not record.groups or not self.config.writes(record.step):
            return
        path = run_lines.rollout_file(self.folder, record.step)
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        content = map(run_lines.encode, run_lines.rollout_lines(record))
        write_atomically(path, content, temporary=path.with_name(path.name + ".tmp"), durable=False)
        if self.config.keep is not None:
            for old, _ in run_lines.rollout_files(self.folder)[: -self.config.keep]:
                old.unlink()


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
        key, problem = f"logger.{name}._target_", "every run has it already, and it is no tracker"
        is_own = target in NOT_TRACKERS.values() or (target is not None and _is_own(locate(target, key)))
        require(not is_own, key, problem, got=target, remedy=f"leave out logger.{name}")
    return tuple(Tracker(f"logger.{name}", instantiate(keys, f"logger.{name}")) for name, keys in distinct.items())


def _is_own(cls: Any) -> bool:
    """Whether it is the class of one of a run's own loggers, by whatever name it was imported."""
    is_console = getattr(cls, "__module__", "") == NOT_TRACKERS["console"].rpartition(".")[0]  # imported by nobody else
    return is_console or cls in (Jsonl, Rollouts)


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
