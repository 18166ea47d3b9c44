"""Which of several methods differ, measured with the same few seeds: paired t tests, corrected for their number.

Two methods that ran with the same seeds are compared by their differences, one per seed. The test assumes that these
are independent draws from a normal distribution. With five seeds that can hardly be checked, so a p value near the
limit says little. With so few seeds and so many pairs only large differences are found: "not significant" does not
mean "equal".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

LEVEL = 0.05
"""A difference is significant if its p value after Holm's correction is below this."""
ROUNDING = 1e-9
"""A spread below this share of the differences themselves is rounding."""


def two_sided_p(t: float, dof: int) -> float:
    """The probability that Student's t with `dof` degrees of freedom is at least as far from 0 as `t`, to rounding.

    P(|T| >= |t|) = I_x(dof / 2, 1 / 2) with x = dof / (dof + t^2): Abramowitz and Stegun, 26.7.1 with 26.5.2.
    """
    from mpmath import betainc

    if math.isinf(t):
        return 0.0
    return float(betainc(dof / 2, 0.5, 0, dof / (dof + t * t), regularized=True))


@cache
def t_quantile(share: float, dof: int) -> float:
    """The value that Student's t with `dof` degrees of freedom stays below with this probability, 0.5 to 1."""
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
    """The first method less the second, over the seeds that both have.

    half: half the width of the mean's 95 % interval, not corrected for the number of comparisons. p: of the paired t
    test, two-sided. corrected: the same after Holm's correction over all comparisons that were made together.
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

    def reversed(self) -> Difference:
        """The second method less the first."""
        return replace(self, first=self.second, second=self.first, mean=0.0 - self.mean)


def paired_p(differences: Sequence[float]) -> float:
    """The p value of the paired t test, two-sided: how often equal methods differ at least as clearly by chance.

    1 where the differences have no spread to be measured by: then nothing is known of how much they vary.

    Raises:
        ValueError: fewer than two differences.
    """
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    mean = statistics.fmean(differences)
    if error <= ROUNDING * max(map(abs, differences)):  # equal differences may differ in their last bits
        return 1.0
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


def against(reference: str, differences: Sequence[Difference]) -> list[Difference]:
    """Each other method less the reference, the largest difference first; corrected for these comparisons alone.

    They are what a comparison with a reference plans to look at; the pairs of the others do not count.
    """
    compared = [pair for pair in differences if pair.second == reference]
    compared += [pair.reversed() for pair in differences if pair.first == reference]
    corrected = holm([pair.p for pair in compared])
    rows = [replace(pair, corrected=p) for pair, p in zip(compared, corrected, strict=True)]
    return sorted(rows, key=lambda pair: -pair.mean)


def report(differences: Sequence[Difference], reference: str) -> str:
    """Markdown: each method against the reference, how many of all pairs differ, and how that was tested."""
    rows = against(reference, differences)
    columns = (f"against `{reference}`", "difference", "95 % interval", "p", "p after Holm", "")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"] if rows else []
    for pair in rows:
        interval = f"{pair.mean - pair.half:+.3f} to {pair.mean + pair.half:+.3f}"
        verdict = "significant" if pair.is_significant else "not significant"
        cells = (f"`{pair.first}`", f"{pair.mean:+.3f}", interval, p_text(pair.p), p_text(pair.corrected), verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *([""] if lines else []), method_text(differences, len(rows))])


def p_text(p: float) -> str:
    """A p value with the digits that count.

    >>> p_text(0.03456), p_text(0.00123), p_text(0.000012), p_text(1.0)
    ('0.035', '0.0012', '<0.0001', '1')
    """
    if p < 1e-4:
        return "<0.0001"
    return f"{p:.4f}" if p < 0.01 else f"{p:.3f}" if p < 0.9995 else "1"


def method_text(differences: Sequence[Difference], num_against: int) -> str:
    """How the differences were tested and how many pairs differ, in sentences."""
    seeds = " or ".join(map(str, sorted({pair.seeds for pair in differences})))
    significant = sum(pair.is_significant for pair in differences)
    correction = f"Holm's correction over the {num_against} comparisons of the table" if num_against else ""
    planned = f"Significant: p below {LEVEL} after {correction}. " if correction else ""
    return (
        f"Paired t tests over {seeds} seeds, which assume that the differences between seeds are normally distributed. "
        f"{planned}Of all {len(differences)} pairs {significant} differ significantly after Holm's correction over all "
        "of them. Intervals are of one difference alone. Methods whose difference is not significant may still "
        "differ by less than this number of seeds can show."
    )
