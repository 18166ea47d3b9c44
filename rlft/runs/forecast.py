"""What a run's steps so far say of its rest: how long it takes, what it costs, and whether its held-out curve is flat.

A curve is flat if as many steps again as its newest half took would bring less than matters. The slope is that of the
least-squares line through the newest half of the evaluations, at least six; its standard error is that of their scatter
about the line. Absence of an effect is shown as in an equivalence test (Schuirmann 1987, doi:10.1007/BF01068419): the
one-sided 95 % bound of the gain, by Student's t, is below the least gain that matters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, linear_regression, median, variance
from typing import Any

from rlft.system.text import duration
from rlft.types import UserError, counted, require

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


FIRST = 5  # a run is forecast once it has done so many steps
WINDOW = 10  # the pace is that of so many newest steps
OUTLIER = 4.0  # a step counts as at most so many medians of those around it: a machine that slept says nothing of pace
DRIFT, PRIOR_WEIGHT = 0.25, 2
"""Standard deviation of log(pace of the rest / pace so far) before a run has shown its own, and the number of the run's
own earlier forecasts that weigh as much. From the runs in recipes/chains.json (docs/benchmarks/performance.md)."""

COVERAGE = 0.8
Z = NormalDist().inv_cdf((1 + COVERAGE) / 2)
PAUSES = {"time/evaluate": "eval", "time/checkpoint": "checkpoint"}
"""{metric: the section whose `every` says after which steps it happens}."""
SEALED = "time/seal"
"""A metric of every step whose `time/step` counts what was done since the step before; older runs have none."""


def seconds_of(line: Mapping[str, Any]) -> float:
    """The seconds of a step and of what was done between it and the one before, from its line of metrics."""
    between = () if SEALED in line else (*PAUSES, "time/log")
    return sum(line.get(name) or 0.0 for name in (*between, "time/step"))


def seconds_without_pauses(line: Mapping[str, Any]) -> float:
    """The same without an evaluation and a checkpoint."""
    return seconds_of(line) - sum(line.get(name) or 0.0 for name in PAUSES)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds that are left, and the ends of their 80 % interval."""

    seconds: float
    low: float
    high: float

    def after(self, seconds: float) -> Forecast:
        """What is left once so many seconds have passed without news."""
        return Forecast(*(max(0.0, value - seconds) for value in (self.seconds, self.low, self.high)))

    def __str__(self) -> str:
        """Such as `2:56 (2:30 to 3:40)`."""
        ends = [duration(value) for value in (self.low, self.high)]
        return duration(self.seconds) if ends[0] == ends[1] else f"{duration(self.seconds)} ({' to '.join(ends)})"


class Pace:
    """Collects the seconds of a run's steps, evaluations and checkpoints from its metrics, and forecasts the rest.

    The sections of its plain config say when it evaluates and saves.
    """

    def __init__(self, config: Mapping[str, Any], num_steps: int) -> None:
        self._config, self._num_steps, self._done = config, num_steps, 0
        self._steps: list[float] = []
        self._pauses: dict[str, list[float]] = {name: [] for name in PAUSES}
        self._forecast: Forecast | None = None
        self._is_new = True

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a finished step, with the seconds of what was done since the one before."""
        self._done, self._is_new = step, True
        if metrics.get("time/step"):
            self._steps.append(seconds_without_pauses(metrics))
        for name, seconds in self._pauses.items():
            if metrics.get(name):
                seconds.append(metrics[name])

    def forecast(self) -> Forecast | None:
        """From the end of the last step to the end of the run; None before FIRST steps."""
        if self._is_new:
            pauses = sum(pace(seconds) * self._pauses_left(PAUSES[name]) for name, seconds in self._pauses.items())
            self._forecast, self._is_new = forecast(self._steps, self._num_steps - self._done, pauses), False
        return self._forecast

    def _pauses_left(self, section: str) -> int:
        """The number of evaluations or checkpoints from the one after the last step to the one after the run's last."""
        every = int((self._config.get(section) or {}).get("every") or 0)
        return number_due(every, self._num_steps, self._done) if every or section == "checkpoint" else 0


def number_due(every: int, num_steps: int, first: int = 1) -> int:
    """The number of steps from `first` on after which something is due: every `every` (0: none of these), and the last.

    >>> number_due(4, 10), number_due(4, 10, first=8), number_due(0, 10)
    (3, 2, 1)
    """
    return 1 + ((num_steps - 1) // every - max(0, first - 1) // every if every else 0)


def forecast(steps: Sequence[float], left: int, pauses: float = 0.0) -> Forecast | None:
    """The seconds of `left` more steps after those in `steps`, oldest first, besides `pauses`; None before FIRST steps.

    The pace is the mean of the newest steps. The interval is log-normal. Its variance is that of the mean of such
    steps, and that of a drift of the pace, as other work on the machine or longer texts bring it: DRIFT, and how wrong
    this run's forecasts were that were made after half, a quarter, .. of its steps. A drift has less room where fewer
    steps are left than were done.
    """
    if left <= 0:
        return Forecast(pauses, pauses, pauses)
    if len(steps) < FIRST:
        return None
    newest = clipped(steps[-WINDOW:])
    mean = fmean(newest)
    noise = variance(newest) / mean**2 * (1 / len(newest) + 1 / left)
    drift = drift_variance(steps) * min(1.0, left / len(steps))
    factor = math.exp(Z * math.sqrt(noise + drift))
    seconds = mean * left + pauses
    return Forecast(seconds, seconds / factor, seconds * factor)


def drift_variance(steps: Sequence[float]) -> float:
    """The variance of the logarithm of a forecast's error: of DRIFT, and of the run's own forecasts so far."""
    errors, half = [], len(steps) // 2
    while half >= FIRST:
        errors.append(math.log(fmean(clipped(steps[half:])) / pace(steps[:half])))
        half //= 2
    return (PRIOR_WEIGHT * DRIFT**2 + sum(error**2 for error in errors)) / (PRIOR_WEIGHT + len(errors))


def pace(seconds: Sequence[float]) -> float:
    """The mean of the newest; 0 if there are none yet."""
    return fmean(clipped(seconds[-WINDOW:])) if seconds else 0.0


def clipped(seconds: Sequence[float]) -> list[float]:
    """The seconds, of which none counts for more than OUTLIER times their median.

    >>> clipped([1.0, 2.0, 3600.0])
    [1.0, 2.0, 8.0]
    """
    most = OUTLIER * median(seconds)
    return [min(value, most) for value in seconds]


# -- what an hour of a machine costs, as in price=2.5/h ----------------------------------------------------------------
CURRENCY = r"[$€£¥]|[A-Za-z]{3}"
PRICE = re.compile(rf"(?P<before>{CURRENCY})? ?(?P<amount>[0-9]{{1,9}}(\.[0-9]{{1,9}})?) ?(?P<after>{CURRENCY})? ?/ ?h")


@dataclass(frozen=True, slots=True)
class Price:
    """An amount per hour; `currency` may be empty."""

    per_hour: float
    currency: str = ""

    def amount(self, seconds: float) -> str:
        """Such as `1,234.50`."""
        return f"{self.per_hour * seconds / 3600:,.2f}"

    def so_far(self, seconds: float, left: Forecast | None) -> str:
        """What has been paid, and if known what the whole will cost: `1.20, in all 3.40 (3.00 to 3.90) EUR`."""
        text = self.amount(seconds)
        if left is not None and left.seconds > 0:
            text += f", in all {self.whole(left, seconds)}"
        return f"{text} {self.currency}".rstrip()

    def whole(self, left: Forecast, seconds: float = 0.0) -> str:
        """What these seconds and those that are left cost: `3.40 (3.00 to 3.90)`."""
        whole, low, high = (self.amount(seconds + more) for more in (left.seconds, left.low, left.high))
        return f"{whole} ({low} to {high})"

    def __str__(self) -> str:
        return f"{self.per_hour:,.2f} {self.currency}".rstrip() + "/h"


def read_price(text: str | None) -> Price | None:
    """The price in `2.5/h`, with or without a currency; None of None.

    >>> read_price("2.5/h"), read_price("$2/h"), read_price("1.80 EUR/h")
    (Price(per_hour=2.5, currency=''), Price(per_hour=2.0, currency='$'), Price(per_hour=1.8, currency='EUR'))
    """
    if text is None:
        return None
    match = PRICE.fullmatch(text.strip())
    remedy = "write it as 2.5/h or 2.5EUR/h"
    if match is None or (match["before"] and match["after"]):
        raise UserError("price", "must be an amount per hour", got=text or "nothing", remedy=remedy)
    require(float(match["amount"]) > 0, "price", "must be above 0", got=text, remedy=remedy)
    return Price(float(match["amount"]), match["before"] or match["after"] or "")
