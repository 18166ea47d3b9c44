"""Which of several methods differ, measured with the same few seeds: paired t tests, corrected for their number.

Two methods with the same seeds are compared by their differences, one a seed. The test takes these for independent
draws of a normal distribution: with five seeds that can hardly be checked, so a p value near the limit says little.
With so few seeds and so many pairs only large differences are found: not significant does not mean equal.

Numbers of Student's t are exact to rounding (the regularised incomplete beta function of mpmath, which torch brings).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

LEVEL = 0.05
"""A difference is significant where its p value after Holm's correction is below this."""


def two_sided_p(t: float, dof: int) -> float:
    """The probability that Student's t with `dof` degrees of freedom is at least as far from 0 as `t`.

    P(|T| >= |t|) = I_x(dof / 2, 1 / 2) with x = dof / (dof + t^2): Abramowitz and Stegun, 26.7.1 with 26.5.2.
    """
    from mpmath import betainc

    if math.isinf(t):
        return 0.0
    return float(betainc(dof / 2, 0.5, 0, dof / (dof + t * t), regularized=True))


@cache
def t_quantile(share: float, dof: int) -> float:
    """The value that Student's t with `dof` degrees of freedom stays below with probability `share`, 0.5 < share < 1.

    Raises:
        ValueError: a share out of that range, or no degree of freedom.
    """
    if not 0.5 < share < 1 or dof < 1:
        raise ValueError(f"no quantile of share {share} with {dof} degrees of freedom")
    low, high = 0.0, 1.0
    while two_sided_p(high, dof) > 2 * (1 - share):
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if two_sided_p(middle, dof) > 2 * (1 - share) else (low, middle)
    return high


def half_interval(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half the width of the interval around the mean of the values that holds the true mean with this probability.

    Student's t with n - 1 degrees of freedom; None of a single value, which says nothing of how values vary.
    """
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return t_quantile((1 + confidence) / 2, len(values) - 1) * error


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A method less another, over the seeds that both have.

    Attributes:
        first: name of the method.
        second: name of the one that is subtracted.
        seeds: how many.
        mean: of the differences.
        half: half the width of its 95 % interval, not corrected for the number of pairs.
        p: of the paired t test, two-sided.
        corrected: the same after Holm's correction over all pairs.
    """

    first: str
    second: str
    seeds: int
    mean: float
    half: float
    p: float
    corrected: float

    @property
    def is_significant(self) -> bool:
        return self.corrected < LEVEL


def paired_p(differences: Sequence[float]) -> float:
    """The p value of the paired t test, two-sided: how often equal methods differ at least as clearly by chance.

    Where all differences are the same there is no spread to measure them by: 1 if they are 0, else 0.

    Raises:
        ValueError: fewer than two differences.
    """
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    mean = statistics.fmean(differences)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return two_sided_p(mean / error, len(differences) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction (1979): p values that may be compared with the level of all tests together.

    The smallest is multiplied by their number, the next by one less, ..; none is below one before it, none above 1. The
    probability that any difference is found where there is none is then at most the level, however the tests depend on
    each other.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, least, num = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, index in enumerate(sorted(range(num), key=lambda index: p_values[index])):
        least = max(least, min(1.0, p_values[index] * (num - rank)))
        corrected[index] = least
    return corrected


def all_differences(values: Mapping[str, Mapping[int, float]]) -> list[Difference]:
    """Every pair of methods that have two seeds or more in common, by {method: {seed: value}}; each pair once."""
    names, pairs = list(values), []
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            both = sorted(values[first].keys() & values[second].keys())
            if len(both) > 1:
                pairs.append((first, second, [values[first][seed] - values[second][seed] for seed in both]))
    p_values = [paired_p(differences) for _, _, differences in pairs]
    return [
        Difference(
            first=first,
            second=second,
            seeds=len(differences),
            mean=statistics.fmean(differences),
            half=half_interval(differences) or 0.0,
            p=p,
            corrected=corrected,
        )
        for (first, second, differences), p, corrected in zip(pairs, p_values, holm(p_values), strict=True)
    ]


def against(name: str, differences: Sequence[Difference]) -> list[Difference]:
    """Of all differences those with this method, turned so that it is the one that is subtracted."""
    turned = []
    for pair in differences:
        if pair.second == name:
            turned.append(pair)
        elif pair.first == name:
            turned.append(
                Difference(
                    first=pair.second,
                    second=name,
                    seeds=pair.seeds,
                    mean=0.0 - pair.mean,
                    half=pair.half,
                    p=pair.p,
                    corrected=pair.corrected,
                )
            )
    return turned


def report(differences: Sequence[Difference], reference: str) -> str:
    """Markdown: each method against the reference, then which of all pairs differ and which do not, in sentences."""
    turned = sorted(against(reference, differences), key=lambda pair: -pair.mean)
    columns = (f"against `{reference}`", "difference", "95 % interval", "p", "p after Holm", "")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"] if turned else []
    for pair in turned:
        interval = f"{pair.mean - pair.half:+.3f} to {pair.mean + pair.half:+.3f}"
        verdict = "significant" if pair.is_significant else "not"
        cells = (f"`{pair.first}`", f"{pair.mean:+.3f}", interval, told_p(pair.p), told_p(pair.corrected), verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *([""] if lines else []), verdict_of_all(differences), "", how(differences)])


def told_p(p: float) -> str:
    """A p value in the digits that count.

    >>> told_p(0.03456), told_p(0.00123), told_p(0.000012), told_p(1.0)
    ('0.035', '0.0012', '<0.0001', '1')
    """
    if p < 1e-4:
        return "<0.0001"
    return f"{p:.4f}" if p < 0.01 else f"{p:.3f}" if p < 0.9995 else "1"


def verdict_of_all(differences: Sequence[Difference]) -> str:
    """Which pairs differ, by the better one, and of how many the test does not tell; in a sentence."""
    worse: dict[str, list[str]] = {}
    for pair in differences:
        if pair.is_significant:
            better, other = (pair.first, pair.second) if pair.mean > 0 else (pair.second, pair.first)
            worse.setdefault(better, []).append(other)
    found, num = sum(map(len, worse.values())), len(differences)
    if not found:
        return f"Pairs that differ significantly: none of {num}."
    named = "; ".join(
        f"`{better}` is above {', '.join(f'`{name}`' for name in names)}" for better, names in worse.items()
    )
    return f"Pairs that differ significantly: {found} of {num}: {named}."


def how(differences: Sequence[Difference]) -> str:
    """How the differences were tested, in sentences."""
    seeds = sorted({pair.seeds for pair in differences})
    return (
        f"Paired t tests over {' or '.join(map(str, seeds))} seeds, which take the differences of the seeds for "
        f"normally distributed. Significant: p below {LEVEL} after Holm's correction over {len(differences)} pairs; "
        "intervals are of one difference alone. What is not significant may differ by less than so few seeds can show."
    )
