"""The learning rate of each update."""

import doctest
import math

import pytest

from rlft.config.trainer import Schedule, TrainerConfig
from rlft.trainer import schedule
from rlft.trainer.schedule import learning_rate


def rates(kind: Schedule, warmup: int, num_updates: int) -> list[float]:
    rest = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0, "reset_every": 0}
    config = TrainerConfig(lr=2.0, schedule=kind, warmup=warmup, **rest)
    return [learning_rate(config, update, num_updates) for update in range(num_updates)]


def test_the_example_in_the_docstring_holds():
    result = doctest.testmod(schedule)
    assert result.attempted == 3
    assert result.failed == 0


def test_the_constant_rate_does_not_depend_on_the_number_of_updates():
    assert rates(Schedule.constant, 0, 3) == [2.0, 2.0, 2.0]
    assert rates(Schedule.constant, 2, 9)[:3] == rates(Schedule.constant, 2, 3) == [1.0, 2.0, 2.0]


def test_the_linear_rate_falls_from_the_whole_rate_to_one_update_before_zero():
    # Update u of 4 has done u/4 of the way: 2 * (1 - u/4).
    assert rates(Schedule.linear, 0, 4) == [2.0, 1.5, 1.0, 0.5]


def test_the_cosine_rate_is_half_way_down_in_the_middle():
    # 2 * (1 + cos(pi u/4)) / 2 for u = 0..3: 2, 1 + sqrt(1/2), 1, 1 - sqrt(1/2).
    assert rates(Schedule.cosine, 0, 4) == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)], rel=1e-15)


@pytest.mark.parametrize("kind", list(Schedule))
def test_warm_up_rises_in_equal_steps_and_the_schedule_begins_at_the_whole_rate(kind):
    assert rates(kind, 4, 12)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("kind", list(Schedule))
def test_a_warm_up_longer_than_the_run_only_rises(kind):
    assert rates(kind, 8, 4) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("kind", list(Schedule))
def test_no_rate_is_negative(kind):
    assert min(rates(kind, 3, 50)) > 0
