"""`rlft watch`: shows the live view of a run in another process, or the closing page of one that has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from rlft.commands.watch.runs import read_words
from rlft.config import command as commands
from rlft.config.command import LOSS
from rlft.logger.console import LiveView, PlainView, Progress, evaluation_of, open_terminal
from rlft.logger.interface import RunInfo
from rlft.logger.summary import print_summary
from rlft.runs import run_folder, run_status
from rlft.runs.find import LATEST, one_run
from rlft.runs.forecast import Price, newly_flat, read_price, seconds_of
from rlft.runs.lines import EVALUATIONS, METRICS, StepRecord, complete_lines, read_lines, silent
from rlft.runs.run_status import Status
from rlft.system.terminal import say
from rlft.system.text import glyphs_for, visible
from rlft.types import require

SECONDS = 0.5


class Tail:
    """Reads the lines that have been added to a JSONL file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0

    def new(self) -> Iterator[Mapping[str, Any]]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.position)
            start = self.position
            for end, line in complete_lines(file):
                self.position = start + end
                yield line

    @property
    def was_cut(self) -> bool:
        """Whether the file is shorter than what was read, because the run was resumed from an earlier checkpoint."""
        return self.path.exists() and self.path.stat().st_size < self.position


class RunClock:
    """Counts the seconds of the run's steps and of what it does between them, plus those since the last step."""

    def __init__(self) -> None:
        self.total, self.last = 0.0, time.monotonic()

    def __call__(self) -> float:
        return self.total + time.monotonic() - self.last

    def add(self, seconds: float) -> None:
        self.total, self.last = self.total + seconds, time.monotonic()


def command(arguments: Sequence[str]) -> None:
    folders, values, _ = read_words("watch", arguments)
    price = read_price(values.get("price"))
    remedy = "write rlft watch runs/<name>/<time>; rlft runs lists them"
    require(len(folders) <= 1, "watch", "takes one run", got=" ".join(folders), remedy=remedy)
    watch(one_run(folders[0] if folders else LATEST, "watch", say), price)


def watch(folder: Path, price: Price | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
    """Shows the run until it ends. Raises UserError: the folder holds no run, or the run writes no metrics."""
    config = run_folder.read(folder, "watch")
    problem = f"a run of rlft {config['command']} writes no {METRICS}, which the view needs"
    headline = commands.named(config["command"]).headline
    require(headline, "watch", problem, got=folder, remedy="look into the files of its folder")
    terminal = open_terminal()
    status, reason = run_status.read(folder)
    if status is Status.running:
        status, reason = follow(folder, config, price, sleep)
    print_summary(folder, ())
    if price is not None:
        cost = price.so_far(sum(map(seconds_of, read_lines(folder / METRICS, silent))), None)
        terminal.print(f"cost of its steps, evaluations and checkpoints: {cost}")
    terminal.print(f"{folder} {status}{f': {visible(reason)}' if reason else ''}")


def follow(
    folder: Path, config: Mapping[str, Any], price: Price | None, sleep: Callable[[float], None]
) -> tuple[Status, str]:
    """Draws the view until the run ends; returns its status and the reason."""
    terminal = open_terminal()
    in_place = sys.stdout.isatty() and not terminal.is_dumb_terminal
    while True:
        clock, tails = RunClock(), [Tail(folder / name) for name in (METRICS, EVALUATIONS)]
        progress = Progress(_info(folder, config), glyphs_for(terminal.encoding), clock, price)
        evaluations: list[Mapping[str, Any]] = []
        progress.current = "running in another process"
        view = LiveView(terminal, progress) if in_place else PlainView(terminal, progress, 10.0)
        while not any(tail.was_cut for tail in tails):
            for line in tails[1].new():
                progress.evaluations.append(evaluation_of(line))
                evaluations.append(line)
                if (trend := newly_flat(evaluations)) is not None:
                    view.print(Text(f"note: step {trend.last}: {trend}", style="yellow"))
            for line in tails[0].new():
                clock.add(seconds_of(line))
                metrics = {name: value for name, value in line.items() if name != "step" and value is not None}
                progress.step(StepRecord(step=int(line["step"]), metrics=metrics))
                view.step()
            state = run_status.read(folder)
            if state[0] is not Status.running:
                view.close(str(state[0]) if state[0] is not Status.stopped else f"stopped: {visible(state[1])}")
                return state
            sleep(SECONDS)
        view.close("interrupted")  # the run was resumed from an earlier step, so the view is out of date


def _info(folder: Path, config: Mapping[str, Any]) -> RunInfo:
    headline = commands.named(config["command"]).headline or LOSS
    watched = headline.label, headline.metric
    name, steps = str(config.get("name", "")), run_status.num_steps(folder) or int(config.get("steps") or 0)
    return RunInfo(folder=folder, name=name, config=config, step=0, steps=steps, sizes=(), watched=watched)
