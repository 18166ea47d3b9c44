"""Teaches `tiny-student` in several ways with several seeds: accuracy against completions sampled: table and picture.

    python scripts/compare_teachers.py                      # all ways, seeds 0 1 2
    python scripts/compare_teachers.py --only opd --seeds 0 --override steps=2
    python scripts/compare_teachers.py --redraw             # table and picture again, from the runs that are there

The teacher of a seed is `tiny-arithmetic` after GRPO (`grpo_arithmetic`), merged into one model. Its traces are samples
that the student learns by supervised fine-tuning, each once; elsewhere the student samples itself. Every run is an
ordinary `rlft` command in <out>/seed_<k>; the same command goes on where it was stopped. Leaves teachers.md and
teachers.png in <out>.

Exit codes: 0 done, 1 a run failed, 2 a mistake the user can fix, 130 stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from bench_work import table, where_and_when
from compare_conversations import spread
from fresh_export import fresh_export

from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines
from rlft.system.terminal import pip_install
from rlft.types import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE, PICTURE = "teachers.md", "teachers.png"
TEACHER, MODEL, TRACES = "teacher", "teacher_model", "lessons"
STUDENT = "model.path=embedded:tiny-student"
ON_POLICY = ("train", "+recipe=opd_arithmetic", f"snapshot.teacher={{seed}}/{MODEL}", "eval.every=5")
COLOURS = ("#666666", "#0072B2", "#E69F00", "#D55E00", "#009E73")


class RunError(Exception):
    """A run ended with an exit code other than 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the student is taught: the words after `rlft`; {seed} stands for the folder of the seed."""

    label: str
    words: tuple[str, ...]


WAYS = {
    "traces": Way(
        label="traces (SFT)",
        words=(
            "sft", "+recipe=sft_arithmetic", STUDENT, f"demonstrations.path={{seed}}/{TRACES}/samples.jsonl",
            "epochs=1", "eval.every=40",
        ),
    ),
    "opd": Way(label="on-policy distillation", words=ON_POLICY),
    "opd_top_k": Way(label="the same, top 16 in the loss", words=(*ON_POLICY, "algorithm.teacher_in=loss")),
    "grpo": Way(label="GRPO", words=("train", "+recipe=grpo_arithmetic", STUDENT, "eval.every=5")),
    "both": Way(label="teacher and rewards", words=(*ON_POLICY, "algorithm.reward_coef=1")),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """accuracies of held-out problems, and how many completions had been sampled for the student before each."""

    completions: Sequence[int]
    accuracies: Sequence[float]


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    options = parse(words)
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError("matplotlib", "is not installed, and draws the picture", remedy=pip_install("rlft[dev]"))
        compare(options)
    except UserError as error:
        print(f"compare_teachers: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"compare_teachers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="K")
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="KEY=VALUE", help="for every run that trains (as steps, eval.*)"
    )
    parser.add_argument("--redraw", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/teachers"))
    return parser.parse_args(words)


def compare(options: argparse.Namespace) -> None:
    """Trains what is missing, unless it only draws again; writes the table and the picture, and prints the table.

    Raises:
        UserError: a run has not been evaluated, or one seed's not as another's: none but those that are only drawn.
        RunError: a run failed.
    """
    out = options.out.resolve()
    for seed in [] if options.redraw else options.seeds:
        folder = out / f"seed_{seed}"
        teach(folder, seed, [name for name in WAYS if name in options.only], options.override)
    curves = {name: [read(out / f"seed_{seed}" / name) for seed in options.seeds] for name in options.only}
    for name, own in curves.items():
        if len({tuple(curve.completions) for curve in own}) > 1:
            problem = f"runs of {name} with different seeds have been evaluated at different steps"
            remedy = "train them to their ends by the same command without --redraw"
            raise UserError("--seeds", problem, got=options.seeds, remedy=remedy)
    teachers = [read(out / f"seed_{seed}" / TEACHER) for seed in options.seeds]
    text = report(curves, teachers, options.seeds)
    (out / TABLE).write_text(text + "\n")
    figure(curves, teachers).savefig(out / PICTURE, dpi=150)
    print(text)


def teach(folder: Path, seed: int, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Makes the teacher of a seed, its traces where they are asked for, and the students."""
    folder.mkdir(parents=True, exist_ok=True)
    rlft("train", "+recipe=grpo_arithmetic", "checkpoint.keep=1", *in_folder(folder / TEACHER, seed), *overrides)
    fresh_export(folder / TEACHER, folder / MODEL, rlft)
    if "traces" in names:
        traces = [f"run={folder / TEACHER}", "n=4", "num_prompts=2844", "dedupe=false", f"seed={seed}", "resume=auto"]
        rlft("sample", *traces, f"hydra.run.dir={folder / TRACES}")
    for name in names:
        words = (word.replace("{seed}", str(folder)) for word in WAYS[name].words)
        rlft(*words, "checkpoint.keep=1", *in_folder(folder / name, seed), *overrides)


def in_folder(folder: Path, seed: int) -> list[str]:
    return ["resume=auto", f"hydra.run.dir={folder}", f"seed={seed}", "logger=[jsonl]"]


def rlft(*words: str) -> None:
    print("rlft", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "rlft.cli", *words], stdout=subprocess.DEVNULL, check=False)
    if done.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode:
        raise RunError(f"rlft {' '.join(words)} ended with {done.returncode}")


def read(folder: Path) -> Curve:
    """The curve of a run: of one that trains by its own count, of a supervised one by the examples it has used."""
    evaluations = read_lines(folder / EVALUATIONS)
    if not evaluations:
        remedy = "train it by the same command without --redraw, or choose others with --only and --seeds"
        raise UserError("--out", "no run in that folder has been evaluated", got=folder, remedy=remedy)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    examples = config.get("examples_per_step")
    sampled = [examples or line["sampled/completions"] for line in read_lines(folder / METRICS)]
    so_far = [0, *accumulate(map(int, sampled))]
    return Curve(
        completions=[so_far[line["step"]] for line in evaluations],
        accuracies=[line["accuracy"] for line in evaluations],
    )


# -- the table and the picture -----------------------------------------------------------------------------------------
def report(curves: Mapping[str, Sequence[Curve]], teachers: Sequence[Curve], seeds: Sequence[int]) -> str:
    """Markdown: a line a way, with accuracies as mean and range over the seeds, and completions to half and to 0.9."""
    rows = []
    for name, own in curves.items():
        ends = [f"{max(curve.completions):,}" for curve in own]
        accuracies = [spread([curve.accuracies[place] for curve in own]) for place in (0, -1)]
        rows.append(
            [
                WAYS[name].label,
                *accuracies,
                ends[0],
                *(reached([first_at(c, level) for c in own]) for level in (0.5, 0.9)),
            ]
        )
    head = ["taught by", "accuracy before", "after", "completions sampled", "completions to 0.5", "to 0.9"]
    taught = spread([curve.accuracies[-1] for curve in teachers])
    return (
        f"{table(head, rows)}\n\nSeeds {', '.join(map(str, seeds))}: mean (smallest to largest) of held-out accuracy"
        " (mean@k at temperature 1); completions are those sampled, by the student, or for the traces by the teacher."
        f" The teachers' accuracy: {taught}. {where_and_when()}."
    )


def first_at(curve: Curve, level: float) -> int | None:
    """The completions before the first evaluation at this level or above; None: there is none."""
    pairs = zip(curve.completions, curve.accuracies, strict=True)
    return next((completions for completions, accuracy in pairs if accuracy >= level), None)


def reached(completions: Sequence[int | None]) -> str:
    """The numbers of each seed, - where it never got there.

    >>> reached([1280, None, 2560])
    '1,280; -; 2,560'
    """
    return "; ".join("-" if number is None else f"{number:,}" for number in completions)


def figure(curves: Mapping[str, Sequence[Curve]], teachers: Sequence[Curve]) -> Figure:
    """Each way's mean accuracy over its seeds against completions, and their range as a band; the teacher as a line."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = drawn.subplots()
    for colour, (name, own) in zip(COLOURS, curves.items(), strict=False):
        values = list(zip(*(curve.accuracies for curve in own), strict=True))
        at = own[0].completions
        axes.fill_between(at, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.25, linewidth=0)
        axes.plot(at, [*map(statistics.fmean, values)], color=colour, label=WAYS[name].label, linewidth=1.6)
    taught = statistics.fmean(curve.accuracies[-1] for curve in teachers)
    axes.axhline(taught, color="#999999", linewidth=1.0, linestyle="--", label="the teacher")
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("completions sampled", fontsize=11)
    axes.set_title("held-out accuracy", fontsize=11, loc="left")
    axes.grid(color="#EEEEEE", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=10, frameon=False, loc="lower right")
    return drawn


if __name__ == "__main__":
    main()
