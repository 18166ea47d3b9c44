"""`rlft watch <run>`: the live view of a run that another process does, or the closing page of one that has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft import run_status, runfolder
from rlft.logger.console import LiveView, PlainView, Progress, open_terminal
from rlft.logger.jsonl import EVALUATIONS, METRICS, complete_lines
from rlft.logger.summary import print_summary
from rlft.logger.text import glyphs_for, visible
from rlft.run.naming import one_run
from rlft.run_status import Status
from rlft.types import Evaluation, RunInfo, StepRecord, UserError
from rlft.words import read_words
from rlft.work import say

USAGE = """\
usage: rlft watch <run>

The live view of a run, from another terminal: of one that is going on until it ends, of one that has ended its closing
page. Ctrl-C ends the view, not the run.

  rlft watch runs/grpo_arithmetic/<time>"""

SECONDS = 0.5
WATCHED = {"train": ("reward", "reward/mean")}
LOSS = ("loss", "loss/total")


class Tail:
    """The lines of a JSONL file that are new since they were last asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0

    def new(self) -> Iterator[Mapping[str, Any]]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.place)
            start = self.place
            for end, line in complete_lines(file):
                self.place = start + end
                yield line

    @property
    def was_cut(self) -> bool:
        """Whether the file is shorter than what was read of it: the run went on from an earlier checkpoint."""
        return self.path.exists() and self.path.stat().st_size < self.place


class Clock:
    """Seconds of the run's own steps, and since the last of them."""

    def __init__(self) -> None:
        self.total, self.last = 0.0, time.monotonic()

    def __call__(self) -> float:
        return self.total + time.monotonic() - self.last

    def add(self, seconds: float) -> None:
        self.total, self.last = self.total + seconds, time.monotonic()


def command(arguments: Sequence[str]) -> None:
    """Shows the run that the words of a command line name."""
    places = read_words("watch", arguments).places
    if len(places) != 1:
        remedy = "write rlft watch runs/<name>/<time>; rlft runs lists them"
        raise UserError("watch", "takes one run", got=" ".join(places) or "none", remedy=remedy)
    watch(one_run(*places, "watch", say))


def watch(folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Shows the run until it ends.

    Raises:
        UserError: no run in the folder, or one that leaves no metrics.
    """
    config = runfolder.read(folder, "watch")
    if config.get("verb") == "sample":
        raise UserError("watch", "a sampling has no steps to watch", got=folder, remedy="look into its samples.jsonl")
    if "jsonl" not in (config.get("logger") or {}):
        problem = f"the run writes no {METRICS}, from which it is watched"
        raise UserError("watch", problem, got=folder, remedy="leave jsonl among its loggers")
    terminal = open_terminal()
    status, reason = run_status.read(folder)
    if status is Status.running:
        status, reason = follow(folder, config, sleep)
    print_summary(folder, ())
    terminal.print(f"{folder} {status}{f': {visible(reason)}' if reason else ''}", soft_wrap=True)


def follow(folder: Path, config: Mapping[str, Any], sleep: Callable[[float], None]) -> tuple[Status, str]:
    """Draws until the run ends; returns how it did."""
    terminal = open_terminal()
    in_place = sys.stdout.isatty() and not terminal.is_dumb_terminal
    while True:
        clock, tails = Clock(), [Tail(folder / name) for name in (METRICS, EVALUATIONS)]
        progress = Progress(_info(folder, config), glyphs_for(terminal.encoding), clock)
        progress.stage("sample")
        progress.current = "going on in another process"
        view = LiveView(terminal, progress) if in_place else PlainView(terminal, progress, 10.0)
        while not any(tail.was_cut for tail in tails):
            for line in tails[1].new():
                progress.evaluation(_evaluation(line))
            for line in tails[0].new():
                clock.add(line.get("time/step") or 0.0)
                progress.step(_record(line))
                view.step()
            ended = run_status.read(folder)
            if ended[0] is not Status.running:
                view.close(str(ended[0]) if ended[0] is not Status.stopped else f"stopped: {visible(ended[1])}")
                return ended
            sleep(SECONDS)
        view.close("interrupted")  # it went on from an earlier step: what was drawn is no longer so


def _info(folder: Path, config: Mapping[str, Any]) -> RunInfo:
    watched = WATCHED.get(str(config.get("verb")), LOSS)
    name, steps = str(config.get("name", "")), run_status.num_steps(folder) or int(config.get("steps") or 0)
    return RunInfo(folder=folder, name=name, config=config, step=0, steps=steps, sizes=(), watched=watched)


def _record(line: Mapping[str, Any]) -> StepRecord:
    metrics = {name: value for name, value in line.items() if name != "step" and value is not None}
    return StepRecord(step=int(line["step"]), metrics=metrics, groups=(), rewards={}, total_rewards=(), advantages=())


def _evaluation(line: Mapping[str, Any]) -> Evaluation:
    metrics = {name: value for name, value in line.items() if name.startswith("eval/") and value is not None}
    return Evaluation(
        step=int(line["step"]),
        accuracy=line.get("accuracy"),
        accuracy_se=line.get("accuracy_se"),
        metrics=metrics,
        examples=(),
    )
