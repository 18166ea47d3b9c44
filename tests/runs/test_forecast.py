"""How long a run still takes, what it costs, and whether its held-out curve has gone flat."""

import json
import math
from pathlib import Path
from random import Random

import pytest
from in_one_test import each

from rlft.runs.forecast import DRIFT, FIRST, Forecast, Pace, Price, Z, forecast, newly_flat, read_price, trend_of
from rlft.types import UserError

CHAINS = Path(__file__).parents[2] / "recipes" / "chains.json"


def share_within(runs, share_done):
    """The share of runs whose rest took as long as the interval says that was made at this share of its steps."""
    inside = 0
    for seconds in runs:
        done = max(FIRST, round(share_done * len(seconds)))
        told = forecast(seconds[:done], len(seconds) - done)
        inside += told.low <= sum(seconds[done:]) <= told.high
    return inside / len(runs)


@each("share_done", [0.1, 0.25, 0.5, 0.75, 0.9])
def test_intervals_hold_seven_to_nine_tenths_of_the_recorded_runs(share_done):
    # Runs of rlft on two machines beside other work, 28 or 40 steps each; a tenth of them is less than FIRST steps.
    runs = [run["seconds"] for run in json.loads(CHAINS.read_text())["runs"] if run["name"] != "trl_grpo"]
    assert len(runs) == 95
    assert 0.7 <= share_within(runs, share_done) <= 0.9


def growing(random, steps):
    """Completions become longer or shorter during the run, by a factor of e**0.4 as often as not."""
    factor = math.exp(random.gauss(0, 0.45))
    return [2 * factor ** (step / steps) * math.exp(random.gauss(0, 0.1)) for step in range(steps)]


def beside_other_work(random, steps):
    """Other programs come and go, and make a step 1.6 times as long."""
    busy, seconds = random.random() < 0.4, []
    for _ in range(steps):
        busy ^= random.random() < 0.03
        seconds.append((1.6 if busy else 1.0) * math.exp(random.gauss(0, 0.08)))
    return seconds


def heavy_tailed(random, steps):
    """Some steps have a much longer completion: the variance of their seconds is infinite."""
    return [1 + 0.3 * random.paretovariate(1.8) for _ in range(steps)]


def with_pauses(random, steps):
    """In one step of 200 the machine does nothing for as long as 20 steps take."""
    return [math.exp(random.gauss(0, 0.1)) + 20 * (random.random() < 0.005) for _ in range(steps)]


@each(
    ("make", "least", "most"),
    [(growing, 0.7, 0.9), (beside_other_work, 0.7, 0.9), (heavy_tailed, 0.9, 0.99), (with_pauses, 0.7, 0.99)],
)
def test_intervals_hold_for_trends_other_work_heavy_tails_and_pauses(make, least, most):
    random = Random(make.__name__)
    runs = [make(random, steps) for steps in (50, 100) for _ in range(400)]
    assert least <= share_within(runs, 0.1) <= most


def test_of_steady_steps_the_interval_is_that_of_the_drift():
    told = forecast([2.0] * 5, 45)
    # No noise, and no forecast of its own yet: the drift alone, sd DRIFT of the logarithm.
    ends = [90 * math.exp(side * Z * DRIFT) for side in (-1, 1)]
    assert [told.seconds, told.low, told.high] == pytest.approx([90.0, *ends], rel=1e-12)
    # After 40 steps three forecasts (after 20, 10, 5) were exact, and weigh as three beside the two of before;
    # 10 of 40 are left: a quarter of the room.
    told = forecast([2.0] * 40, 10)
    assert told.high == pytest.approx(20 * math.exp(Z * DRIFT * math.sqrt(2 / 5 / 4)), rel=1e-12)
    told = forecast([1.0] * 9 + [30_000.0], 10)  # a slept night is no pace
    assert told.seconds == pytest.approx(10 * (9 + 4) / 10)  # it counts as four steps


CONFIG = {"eval": {"every": 4}, "checkpoint": {"every": 5}}


def told_after(steps, num_steps, config, *, is_older=False):
    """Seconds left of a run with steps of 1 s, log of 0.5 s, evaluations of 10 s and checkpoints of 100 s.

    is_older: as by an rlft whose `time/step` did not count the others.
    """
    pace = Pace(config, num_steps)
    for step in range(1, steps + 1):
        metrics = {"time/step": 1.0, "time/log": 0.5}
        metrics |= {"time/evaluate": 10.0} if (step - 1) % 4 == 0 else {}
        metrics |= {"time/checkpoint": 100.0} if step > 1 and (step - 1) % 5 == 0 else {}
        metrics |= {} if is_older else {"time/seal": 0.0, "time/step": sum(metrics.values())}
        pace.add(step, metrics)
    told = pace.forecast()
    return None if told is None else told.seconds


@each(("steps", "num_steps", "config", "expected"), [
    (4, 20, CONFIG, None),
    (6, 20, CONFIG, 14 * 1.5 + 4 * 10 + 3 * 100),  # evaluations after 8, 12, 16, 20, checkpoints after 10, 15, 20
    (8, 20, CONFIG, 12 * 1.5 + 4 * 10 + 3 * 100),  # that after step 8 is still to come when the step is logged
    (9, 21, CONFIG, 12 * 1.5 + 4 * 10 + 4 * 100),  # the last step is not one of every 4 or 5: one of each more
    (5, 20, CONFIG, 15 * 1.5 + 4 * 10),  # no checkpoint yet: how long one takes is not known
    (20, 20, CONFIG, 10 + 100),  # the last step is evaluated and saved
    (6, 20, {"eval": {"every": 0}, "checkpoint": {"every": 0}}, 14 * 1.5 + 100),  # the last one is saved
    (2, 2, {}, 0.0),
])  # fmt: skip
def test_evaluations_and_checkpoints_count_by_their_own_seconds(steps, num_steps, config, expected):
    for is_older in (False, True):
        told = told_after(steps, num_steps, config, is_older=is_older)
        assert told == (None if expected is None else pytest.approx(expected))


# -- price= of rlft plan and rlft watch --------------------------------------------------------------------------------
PRICES = {
    "2.5/h": Price(2.5), "2.5EUR/h": Price(2.5, "EUR"), "$2/h": Price(2.0, "$"), " 0.75 usd / h ": Price(0.75, "usd"),
    "€1/h": Price(1.0, "€"), None: None,
}  # fmt: skip
NO_AMOUNTS = ("", "2.5", "/h", "-2/h", "1e3/h", "nan/h", "2,5/h", "2.5/d", "$2EUR/h", "2.5 euros/h", "2.5/h2",
              "9" * 400 + "/h", "٢/h")  # fmt: skip


def test_a_price_is_an_amount_per_hour_in_any_currency():
    assert {text: read_price(text) for text in PRICES} == PRICES
    for text in (*NO_AMOUNTS, "0/h", "0.0EUR/h"):
        problem = "must be an amount per hour" if text in NO_AMOUNTS else "must be above 0"
        with pytest.raises(UserError) as caught:
            read_price(text)
        told = f"price: {problem}, got {text or 'nothing'}; write it as 2.5/h or 2.5EUR/h"
        assert str(caught.value) == told


def test_what_is_left_what_was_paid_and_what_the_whole_costs():
    price = Price(3600.0, "EUR")  # a second is one
    assert str(price) == "3,600.00 EUR/h"
    assert price.so_far(10.5, None) == "10.50 EUR"
    assert price.so_far(10.5, Forecast(100.0, 50.0, 2000.0)) == "10.50, in all 110.50 (60.50 to 2,010.50) EUR"
    assert price.so_far(10.5, Forecast(0.0, 0.0, 0.0)) == "10.50 EUR", "nothing is left"
    told = Forecast(176.0, 150.0, 220.0)
    assert str(told) == "2:56 (2:30 to 3:40)"
    assert str(told.after(160.0)) == "0:16 (0:00 to 1:00)", "time without news is taken off"
    assert str(told.after(300.0)) == "0:00"


NOISE = (0.5, 0.51, 0.49, 0.5, 0.51, 0.49)


def curve(values, error=0.05, every=20):
    return [{"step": every * i, "accuracy": value, "accuracy_se": error} for i, value in enumerate(values)]


def losses(values):
    return [{"step": 20 * i, "accuracy": None, "eval/loss": value} for i, value in enumerate(values)]


def test_the_slope_its_error_and_the_bound_are_those_of_the_line():
    # Steps 0, 10, .. 50, values 0 1 1 2 2 3 (tenths): the sum of (x - 25)(y - 1.5) is 95 tenths, that of (x - 25)**2 is
    # 1750, so the slope is 95/1750 tenths. About that line the squares sum up to 5.5 - 95**2/1750 (tenths**2).
    trend = trend_of(curve([0.0, 0.1, 0.1, 0.2, 0.2, 0.3], every=10))
    assert trend.slope == pytest.approx(0.1 * 95 / 1750, rel=1e-12)
    assert trend.error == pytest.approx(0.1 * math.sqrt((5.5 - 95**2 / 1750) / 4 / 1750), rel=1e-9)
    assert trend.most == pytest.approx(50 * (trend.slope + 2.132 * trend.error), rel=1e-12)  # t of 6 - 2, at 95 %
    assert (trend.first, trend.last, trend.matters, trend.is_flat) == (0, 50, 0.05, False)


@each(("lines", "expected"), [
    (curve(NOISE), True),
    (curve(NOISE, error=0.01), False),  # so small a gain would matter, and cannot be excluded
    (curve(NOISE[:5]), None),
    (curve((1.0,) * 6, error=0.0), True),  # solved
    (curve([0.5 + 0.02 * i for i in range(6)]), False),
    (curve([0.5 - 0.02 * i for i in range(6)]), True),  # it falls: more steps bring nothing
    (curve([0.1, 0.2, 0.3, 0.4, 0.45, 0.5, *NOISE]), True),  # the newest half counts
    (curve([0.1, 0.2, 0.3, 0.4, 0.45, 0.5, *NOISE[:4]]), False),
    (losses((1.0,) * 6), True),
    (losses((1.0, 0.99, 0.98, 0.97, 0.96, 0.95)), False),
    (losses((1.0, 1.01, 1.02, 1.03, 1.04, 1.05)), True),
    ([{"step": step} for step in range(9)], None),
])  # fmt: skip
def test_flat_is_what_brings_less_than_matters(lines, expected):
    trend = trend_of(lines)
    assert (None if trend is None else trend.is_flat) is expected


def test_it_is_said_once():
    lines = curve((*NOISE, 0.5, 0.51))
    assert [number for number in range(len(lines) + 1) if newly_flat(lines[:number])] == [6]
    # By hand: the sum of (x - 50)(y - 0.5) is -0.4, that of (x - 50)**2 is 7000, that of (y - 0.5)**2 is 0.0004.
    told = "held-out accuracy has been flat since step 0: -0.0057 +- 0.0116 in 100 steps; 100 more steps would improve "
    assert str(newly_flat(lines[:6])) == f"{told}it by at most 0.0190, and less than 0.0500 does not matter"


def test_of_the_recorded_curves_only_those_that_never_rise_again_are_flat():
    flat = []
    for run in json.loads(CHAINS.read_text())["runs"]:
        errors = [math.sqrt(value * (1 - value) / 256) for value in run["accuracy"]]
        lines = [
            {"step": step, "accuracy": value, "accuracy_se": error}
            for step, value, error in zip(run["evaluated_at"], run["accuracy"], errors, strict=True)
        ]
        numbers = [n for n in range(len(lines)) if (trend := trend_of(lines[:n])) and trend.is_flat]
        for number in numbers[:1]:
            flat.append(run["name"])
            assert max(run["accuracy"][number:]) < run["accuracy"][number - 1] + 0.03
    assert set(flat) == {"a2c", "ppo_ptx"}, "their policies collapsed"
    assert len(flat) == 8


def test_a_slow_rise_is_seldom_taken_for_flat_and_a_plateau_is_found():
    random = Random(0)

    def share(rise):
        """Of 1,000 curves of 20 evaluations: noise of 0.012, standard errors of 0.03, so much more at each."""
        curves = ([0.3 + rise * i + random.gauss(0, 0.012) for i in range(20)] for _ in range(1000))
        return sum(bool((trend := trend_of(curve(values, 0.03))) and trend.is_flat) for values in curves) / 1000

    assert share(0.005) <= 0.05  # nine evaluations more bring 0.045, more than matters
    assert share(0.0) >= 0.6
