"""The tables of bench_step.py: stages, shares of time, ratios to rlft, utilisation, and what failed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench_work import Measured, table

from rlft.commands.doctor.work import Workload

STAGES = ("sample", "score", "credit", "update", "publish", "log", "seal", "train", "step")
SHARES = ("sample", "score", "train", "publish")
"""Stages that do not overlap: credit and update are `train`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was measured of one work.

    Args:
        size: of the model, by its name; empty for the embedded model.
        runs: by trainer, its processes in the order of the rounds.
        failed: by trainer, why a process of it ended without a measurement.
        micro_batch: TRL's, if it was among the trainers.
    """

    size: str
    work: Workload
    runs: Mapping[str, Sequence[Measured]]
    failed: Mapping[str, str]
    micro_batch: int | None = None

    @property
    def name(self) -> str:
        return f"{self.size} {self.work.name}" if self.size else f"tiny G{self.work.group}"

    def middle(self, trainer: str, stage: str) -> float:
        """The median of all steps, in seconds."""
        return statistics.median(step[stage] for run in self.runs[trainer] for step in run.seconds)


def report(results: Sequence[Result], rates: Mapping[str, float], foot: str) -> str:
    """rates: by work's name, seconds that a step's products would take at the device's rate; empty: not shown."""
    parts = [stage_table(results), share_table(results), ratio_table(results), utilisation_table(results, rates)]
    failed = [f"- {r.name}, {trainer}: {why}" for r in results for trainer, why in r.failed.items()]
    if failed:
        parts.append("Without a measurement:\n\n" + "\n".join(failed))
    return "\n\n".join([*filter(None, parts), foot])


def stage_table(results: Sequence[Result]) -> str:
    with_card = any(run.card is not None for r in results for runs in r.runs.values() for run in runs)
    head = ["work", "trainer", *STAGES, "completion tokens/s", "peak memory", *(["whole GPU"] if with_card else [])]
    rows = []
    for result in results:
        for trainer, runs in result.runs.items():
            seconds = [step for run in runs for step in run.seconds]
            cells = [spread([s[stage] for s in seconds]) if stage in seconds[0] else "" for stage in STAGES]
            tokens = result.work.completions * result.work.completion_tokens
            rate = f"{tokens / result.middle(trainer, 'step'):,.0f}" if result.size else ""
            card = [gigabytes(most_of_card(runs))] if with_card else []
            rows.append([result.name, trainer, *cells, rate, gigabytes(max(run.peak for run in runs)), *card])
    return table(head, rows)


def share_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for trainer, runs in result.runs.items():
            step = result.middle(trainer, "step")
            shares = [
                f"{result.middle(trainer, stage) / step:.0%}" if stage in runs[0].seconds[0] else "" for stage in SHARES
            ]
            rows.append([result.name, trainer, *shares])
    return table(["share of a step", "trainer", *SHARES], rows) if rows else ""


def ratio_table(results: Sequence[Result]) -> str:
    """Medians of the ratios of processes that ran one after the other."""
    rows = []
    for result in results:
        ours = result.runs.get("rlft", ())
        for trainer, runs in result.runs.items():
            if trainer == "rlft" or len(runs) != len(ours):
                continue
            cells = [
                spread([middle(t, stage) / middle(r, stage) for t, r in zip(runs, ours, strict=True)])
                for stage in ("step", "train")
            ]
            peaks = f"{max(r.peak for r in ours) / min(t.peak for t in runs):.2f}"
            cards = most_of_card(ours), most_of_card(runs)
            card = f"{cards[0] / cards[1]:.2f}" if cards[0] and cards[1] else ""
            micro_batch = result.micro_batch if trainer.startswith("trl") and result.micro_batch else ""
            rows.append([result.name, trainer, *cells, peaks, card, micro_batch])
    memory = ["peak memory rlft's / its", "whole GPU"]
    head = ["work", "trainer", "its step / rlft's", "train", *memory, "TRL's micro-batch"]
    return table(head, rows) if rows else ""


def utilisation_table(results: Sequence[Result], rates: Mapping[str, float]) -> str:
    """Model FLOPs utilisation of the training part: what rlft's packed row needs, over what the device could do.

    The same number of operations for every trainer, so that repeating a prompt for its siblings is no use of the GPU.
    """
    rows = [
        [result.name, trainer, f"{rates[result.name] / result.middle(trainer, 'train'):.0%}"]
        for result in results
        if result.name in rates
        for trainer in result.runs
    ]
    return table(["work", "trainer", "FLOPs utilisation of the training part"], rows) if rows else ""


def most_of_card(runs: Sequence[Measured]) -> int | None:
    return max((run.card for run in runs if run.card is not None), default=None)


def gigabytes(number: int | None) -> str:
    return "" if number is None else f"{number / 1e9:.2f} GB"


def middle(run: Measured, stage: str) -> float:
    return statistics.median(step[stage] for step in run.seconds)


def spread(values: list[float]) -> str:
    digits = 3 if statistics.median(values) < 0.1 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
