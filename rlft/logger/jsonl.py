"""Writes a run's metrics.jsonl, eval.jsonl, alarms.jsonl and rollouts/.

Apart from times, a resumed run leaves byte for byte the files of an uninterrupted one: lines beyond the checkpoint, and
a line torn by a kill, are cut off before anything is appended, and rollout files of later steps are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlft.logger.interface import Logger, RunInfo
from rlft.runs import lines as run_lines
from rlft.system.disk import writing
from rlft.system.files import append, flush, write_atomically
from rlft.system.terminal import say
from rlft.types import Evaluation

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
