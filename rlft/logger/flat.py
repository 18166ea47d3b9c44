"""Whether a held-out curve has gone flat: what as many steps again as its newest half took would bring at most.

The slope is that of the least-squares line through the newest half of the evaluations, at least six; its standard error
is that of their scatter about the line. Absence of an effect is shown as in an equivalence test (Schuirmann 1987,
doi:10.1007/BF01068419): the one-sided 95 % bound of the gain, by Student's t, is below the least gain that matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any

from rlft.types import counted

FEWEST = 6  # evaluations that a judgement needs
OF_THE_LOSS = 0.01  # share of a held-out loss whose fall matters; of an accuracy, one standard error of an evaluation
T_95 = (2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729)
"""95 % points of Student's t with 4, 5, .. degrees of freedom; of more, the last is a little too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The line through the newest evaluations of a run."""

    what: str  # accuracy or loss
    slope: float  # change per step
    error: float  # standard error of the slope
    first: int  # step of the first of these evaluations
    last: int  # step of the last of these evaluations
    most: float  # the 95 % bound of the improvement in last - first more steps
    matters: float  # the least improvement that matters

    @property
    def is_flat(self) -> bool:
        return self.most <= self.matters

    def __str__(self) -> str:
        """The sentence for the person watching."""
        again = counted(self.last - self.first, "more step")
        per_100 = f"{100 * self.slope:+.4f} +- {100 * self.error:.4f} in 100 steps"
        return (
            f"held-out {self.what} has been flat since step {self.first}: {per_100}; {again} would improve "
            f"it by at most {max(0.0, self.most):.4f}, and less than {self.matters:.4f} does not matter"
        )


def newly_flat(evaluations: Sequence[Mapping[str, Any]]) -> Trend | None:
    """The trend if the curve is flat by the last of these evaluations, and was not before; else None."""
    trend, before = trend_of(evaluations), trend_of(evaluations[:-1])
    return trend if trend is not None and trend.is_flat and not (before and before.is_flat) else None


def trend_of(evaluations: Sequence[Mapping[str, Any]]) -> Trend | None:
    """The trend of held-out accuracy, else of the loss, in lines of eval.jsonl; None of too few."""
    for what, key, sign in (("accuracy", "accuracy", 1.0), ("loss", "eval/loss", -1.0)):
        lines = [line for line in evaluations if line.get(key) is not None]
        newest = lines[-max(FEWEST, -(-len(lines) // 2)) :]
        if len(newest) < FEWEST:
            continue
        steps, values = [float(line["step"]) for line in newest], [float(line[key]) for line in newest]
        slope, error = line_through(steps, values)
        matters = (newest[-1].get("accuracy_se") or 0.0) if what == "accuracy" else OF_THE_LOSS * abs(values[-1])
        quantile = T_95[min(len(newest) - FEWEST, len(T_95) - 1)]
        return Trend(
            what=what,
            slope=slope,
            error=error,
            first=int(steps[0]),
            last=int(steps[-1]),
            most=(sign * slope + quantile * error) * (steps[-1] - steps[0]),
            matters=matters,
        )
    return None


def line_through(steps: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """(slope, its standard error) of the least-squares line."""
    slope, intercept = linear_regression(steps, values)
    middle = sum(steps) / len(steps)
    scatter = sum((value - intercept - slope * step) ** 2 for step, value in zip(steps, values, strict=True))
    return slope, math.sqrt(scatter / (len(steps) - 2) / sum((step - middle) ** 2 for step in steps))
