"""Trains the recipes of conversations with several seeds: a table of start, middle and end, and a picture of curves.

    python scripts/compare_conversations.py                      # all cases, seeds 0 1 2: an hour on two cores
    python scripts/compare_conversations.py --only grpo_calculator --seeds 0 --override steps=2
    python scripts/compare_conversations.py --redraw             # table and picture again, from the runs that are there

A run is an ordinary `rlft train` in a process of its own, in <out>/<case>/seed_<k>; the same command goes on where it
was stopped. Leaves conversations.md and conversations.png in <out>.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_work import table, where_and_when

from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE, PICTURE = "conversations.md", "conversations.png"
MALFORMED, FAILED, CALLS, TURNS = (
    "eval/calls/malformed_fraction",
    "eval/turns/failed_calls_fraction",
    "eval/turns/calls",
    "eval/turns/mean",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recipe with overrides. label: in table and picture. accuracy: the metric that says how often it is right."""

    label: str
    words: tuple[str, ...]
    accuracy: str = "eval/exact_match"


CASES = {
    "grpo_calculator": Case(label="GRPO, calculator", words=("+recipe=grpo_calculator",)),
    "grpo_without": Case(label="GRPO, no calculator", words=("+recipe=grpo_calculator", "environment=null")),
    "ppo_calculator": Case(label="PPO, calculator, turn rewards", words=("+recipe=ppo_calculator",)),
    "ppo_calculator_turn": Case(
        label="PPO, the same, credit_span=turn", words=("+recipe=ppo_calculator", "algorithm.credit_span=turn")
    ),
    "grpo_whom_to_ask": Case(label="GRPO, whom to ask", words=("+recipe=grpo_whom_to_ask",), accuracy="eval/turns"),
}
CURVES = {
    "held-out accuracy": None,
    "calls a conversation": CALLS,
    "share of malformed calls": MALFORMED,
    "turns a conversation": TURNS,
}
COLOURS = ("#0072B2", "#666666", "#D55E00", "#E69F00", "#009E73")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run measured: its evaluations in order, and the seconds of its steps."""

    evaluations: Sequence[Mapping[str, Any]]
    seconds: float


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="K")
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--redraw", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/conversations"))
    options = parser.parse_args(words)
    out = options.out.resolve()
    for name in [] if options.redraw else options.only:
        for seed in options.seeds:
            train(CASES[name], seed, folder_of(out, name, seed), options.override)
    runs = {name: [read(folder_of(out, name, seed)) for seed in options.seeds] for name in options.only}
    text = report(runs, options.seeds)
    (out / TABLE).write_text(text + "\n")
    figure(runs).savefig(out / PICTURE, dpi=150)
    print(text)


def folder_of(out: Path, name: str, seed: int) -> Path:
    return out / name / f"seed_{seed}"


def train(case: Case, seed: int, folder: Path, overrides: Sequence[str]) -> None:
    """Trains a run, goes on with one that was stopped, or leaves alone one that is finished."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    common = ["resume=auto", f"hydra.run.dir={folder}", f"seed={seed}", "rollouts.every=0", "checkpoint.keep=1"]
    command = [sys.executable, "-m", "rlft.cli", "train", *case.words, *common, "logger=[jsonl]", *overrides]
    print(f"{case.label}, seed {seed}", flush=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"rlft {' '.join(command[3:])} ended with {done.returncode}")


def read(folder: Path) -> Run:
    seconds = sum(line["time/step"] for line in read_lines(folder / METRICS))
    return Run(evaluations=read_lines(folder / EVALUATIONS), seconds=seconds)


# -- the table ---------------------------------------------------------------------------------------------------------
def report(runs: Mapping[str, Sequence[Run]], seeds: Sequence[int]) -> str:
    """Markdown: three lines a case (start, middle, end), each number as mean and range over the seeds."""
    rows = []
    for name, own in runs.items():
        case, evaluations = CASES[name], [run.evaluations for run in own]
        last = len(evaluations[0]) - 1
        for place in sorted({0, last // 2, last}):
            at = [lines[place] for lines in evaluations]
            numbers = [
                spread([line.get(key) for line in at]) for key in (case.accuracy, CALLS, MALFORMED, FAILED, TURNS)
            ]
            rows.append([case.label if place == 0 else "", str(at[0]["step"]), *numbers])
        rows[-1].append(", ".join(f"{run.seconds:.0f}" for run in own))
    width = max(map(len, rows))
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    head = ["case", "step", "held-out accuracy", "calls", "malformed", "failed", "turns", "seconds of steps"]
    return (
        f"{table(head, rows)}\n\nSeeds {', '.join(map(str, seeds))}: mean (smallest to largest). Accuracy is mean@k of"
        " the held-out problems at temperature 1; calls and turns are a conversation's, malformed and failed shares"
        f" of all calls. {where_and_when()}."
    )


def spread(values: Sequence[float | None]) -> str:
    """Mean and range; "" where nothing was measured.

    >>> spread([0.25, 0.75]), spread([None, None])
    ('0.500 (0.250 to 0.750)', '')
    """
    measured = [value for value in values if value is not None]
    if not measured:
        return ""
    return f"{statistics.fmean(measured):.3f} ({min(measured):.3f} to {max(measured):.3f})"


# -- the picture -------------------------------------------------------------------------------------------------------
def figure(runs: Mapping[str, Sequence[Run]]) -> Figure:
    """A panel for each of CURVES: each case's mean over its seeds, and their range as a band."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10.0, 6.6), layout="constrained")
    panels = drawn.subplots(2, 2, sharex=True)
    for panel, (title, key) in zip(panels.flat, CURVES.items(), strict=True):
        for colour, (name, own) in zip(COLOURS, runs.items(), strict=False):
            case = CASES[name]
            points = list(zip(*(run.evaluations for run in own), strict=True))
            values = [[line.get(key or case.accuracy) for line in at] for at in points]
            flat = [value for at in values for value in at]
            if None in flat or (key is not None and not any(flat)):
                continue  # without turns there are no calls, and a game has none
            steps = [at[0]["step"] for at in points]
            panel.fill_between(
                steps, [min(at) for at in values], [max(at) for at in values], color=colour, alpha=0.25, linewidth=0
            )
            panel.plot(steps, [statistics.fmean(at) for at in values], color=colour, label=case.label, linewidth=1.6)
        panel.set_title(title, fontsize=11, loc="left")
        panel.grid(color="#EEEEEE", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylim(-0.03, 1.03)
    drawn.supxlabel("steps", fontsize=11)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=10, frameon=False)
    return drawn


if __name__ == "__main__":
    main()
