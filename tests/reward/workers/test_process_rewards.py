"""Rewards that score steps: what workers check of them, and what the scorer makes of several rewards together."""

import numpy as np
import pytest
import torch

from rlft.reward.workers.scorer import RewardError, Scorer, specs
from rlft.reward.workers.worker import Failure, checked_steps
from rlft.types import StepScores

NONE = StepScores(values=(), ends=())


@pytest.fixture(scope="module")
def scorer():
    """Makes a Scorer of rewards of naughty.py: `scorer(name={target: .., weight: .., key: ..})`, kept warm."""
    made = {}

    def make(workers=0, on_error="stop", **rewards):
        arguments = repr((rewards, workers, on_error))
        if arguments not in made:
            config = {
                name: {"weight": 1.0, "_target_": f"naughty.{keys.get('target', name)}"}
                | {key: value for key, value in keys.items() if key != "target"}
                for name, keys in rewards.items()
            }
            made[arguments] = Scorer(specs(config), workers, 0.4, on_error)
        made[arguments].num_failures = 0
        return made[arguments]

    yield make
    for each in made.values():
        each.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_are_weighted_and_their_sum_is_the_score(scorer, group, workers):
    score = scorer(workers, stepwise={"weight": 0.5})
    scores = score([group(["ab c", ""], id="p0"), group(["abc", "a b"], id="p1")])
    # A word is a step of its length: 2 + 1, none, 3, 1 + 1.
    assert scores.by_reward["stepwise"].tolist() == [[3.0, 0.0], [3.0, 2.0]]
    assert scores.total.tolist() == [[1.5, 0.0], [1.5, 1.0]]
    assert scores.outcome is not None
    assert scores.outcome.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert scores.steps == [
        [StepScores(values=(1.0, 0.5), ends=(2, 4)), NONE],
        [StepScores(values=(1.5,), ends=(3,)), StepScores(values=(0.5, 0.5), ends=(1, 3))],
    ]


def test_rewards_of_whole_completions_are_the_outcome(scorer, group):
    score = scorer(length={"weight": 2.0}, stepwise={"weight": -1.0}, Bonus={"weight": 1.0, "bonus": 0.25})
    scores = score([group(["ab c", ""])])
    assert scores.outcome.tolist() == [[8.25, 0.25]]  # 2 x 4 characters + 0.25
    assert scores.total.tolist() == [[5.25, 0.25]]  # and the steps, -2 - 1
    assert list(scores.by_reward) == ["length", "stepwise", "Bonus"]
    assert scores.steps == [[StepScores(values=(-2.0, -1.0), ends=(2, 4)), NONE]]
    assert {t.dtype for t in (scores.total, scores.outcome, *scores.by_reward.values())} == {torch.float64}


def test_steps_of_several_rewards_are_merged_in_the_order_of_their_ends(scorer, group):
    score = scorer(stepwise={"weight": 1.0}, SameSteps={"weight": 10.0, "values": [1, 2, 3], "ends": [1, 2, 3]})
    scores = score([group(["ab c", "xyz"])])
    # 10, 20, 30 at 1, 2, 3, and the words' 2 at 2 and 1 at 4; then 3 at 3.
    assert scores.steps == [
        [
            StepScores(values=(10.0, 22.0, 30.0, 1.0), ends=(1, 2, 3, 4)),
            StepScores(values=(10.0, 20.0, 33.0), ends=(1, 2, 3)),
        ]
    ]
    assert scores.total.tolist() == [[63.0, 63.0]]


def test_a_process_reward_of_weight_0_is_looked_at_only(scorer, group):
    scores = scorer(length={}, stepwise={"weight": 0.0})([group(["ab c"])])
    assert scores.by_reward["stepwise"].tolist() == [[3.0]]
    assert scores.total.tolist() == scores.outcome.tolist() == [[4.0]]
    assert scores.steps == [[NONE]]


def test_steps_are_summed_in_float64(scorer, group):
    # In float32 1e8 + 1 = 1e8, and the sum would be 0.
    keys = {"values": [1e8, 1.0, -1e8], "ends": [1, 2, 3]}
    score = scorer(one={"target": "SameSteps", **keys}, two={"target": "SameSteps", **keys, "weight": 2.0})
    scores = score([group(["abc"])])
    assert scores.by_reward["one"].tolist() == [[1.0]]
    assert scores.total.tolist() == [[3.0]]


def test_rewards_are_summed_in_float64(scorer, group):
    bonuses = {name: {"target": "Bonus", "bonus": bonus} for name, bonus in zip("abc", (1e8, 1.0, -1e8), strict=True)}
    scores = scorer(**bonuses, stepwise={})([group(["xy"])])
    assert scores.outcome.tolist() == [[1.0]]
    assert scores.total.tolist() == [[3.0]]


# (what the completion does, what the message says)
FAULTS = [
    ("number", "returned 1.0, not StepScores (it says scores_steps = True),"),
    ("lengths", "returned 1 step score with 2 ends"),
    ("bare", "returned StepScores(values=None, ends=None), whose values and ends are not both sequences,"),
    ("infinite", "returned inf for step 2, not a finite number,"),
    ("word", "returned '1' for step 1, not a finite number,"),
    ("half", "returned an end of 1.5 for step 1, not a whole number,"),
    ("zero", "returned an end of 0 for step 1, outside 1 .. 4 (the characters of the text),"),
    ("late", "returned an end of 5 for step 2, outside 1 .. 4 (the characters of the text),"),
    ("same", "returned an end of 2 for step 2, not after the step before it, which ends at 2,"),
    ("back", "returned an end of 1 for step 2, not after the step before it, which ends at 3,"),
    ("raise", "raised ValueError: no such unit (naughty.py, line "),
    ("sleep", "exceeded its time limit of 0.4 s a group"),
    ("die", "took its worker process with it, which ended with exit code 0,"),
]


@pytest.mark.parametrize(("order", "message"), FAULTS)
def test_what_is_wrong_with_steps_is_told_with_the_completion(scorer, group, order, message):
    with pytest.raises(RewardError) as stopped:
        scorer(1, stepwise={})([group(["fine", order, "ab c"])])
    assert str(stopped.value).startswith(f"reward.stepwise: {message}")
    assert f"on prompt 'p0', completion 2 of 3: '{order}'; fix" in str(stopped.value).replace(
        "raise scoring.timeout, ", ""
    )


def test_a_fixed_score_is_of_the_completion_as_a_whole(scorer, group):
    score = scorer(1, on_error=-3, length={"weight": 0.5}, stepwise={"weight": 2.0})
    scores = score([group(["ab c", order, "abc"], id=order) for order, _ in FAULTS])
    assert scores.by_reward["stepwise"].tolist() == [[3.0, -3.0, 3.0]] * len(FAULTS)
    sizes = [len(order) for order, _ in FAULTS]
    assert scores.outcome.tolist() == [[2.0, 0.5 * size - 6.0, 1.5] for size in sizes]
    assert scores.total.tolist() == [[8.0, 0.5 * size - 6.0, 7.5] for size in sizes]
    of_a_group = [StepScores(values=(4.0, 2.0), ends=(2, 4)), NONE, StepScores(values=(6.0,), ends=(3,))]
    assert scores.steps == [of_a_group] * len(FAULTS)
    assert score.num_failures == len(FAULTS)


def test_a_number_of_steps_that_does_not_fit_the_group_is_refused():
    found = checked_steps([NONE], ["a", "b"])
    assert isinstance(found, Failure)
    assert found.problem == "returned 1 score for 2 completions"
    found = checked_steps(None, ["a", "b"])
    assert isinstance(found, Failure)
    assert found.problem == "returned NoneType, not a list of 2 StepScores"


def test_steps_from_a_reward_that_does_not_say_so_are_refused(scorer, group):
    with pytest.raises(RewardError, match=r"reward.unsaid: returned StepScores\(.*, not a finite number, .* 1 of 1"):
        scorer(unsaid={})([group(["ab"])])


def test_no_steps_at_all_are_no_fault_not_even_of_an_empty_text():
    assert checked_steps([NONE, NONE], ["", "ab"]) == [NONE, NONE]


def test_steps_arrive_as_plain_floats_and_ints():
    given = StepScores(values=(np.float32(0.5), True, torch.tensor(2.0)), ends=[np.int64(1), torch.tensor(2), 3])  # type: ignore[arg-type]
    (steps,) = checked_steps([given], ["abc"])  # type: ignore[misc]
    assert steps == StepScores(values=(0.5, 1.0, 2.0), ends=(1, 2, 3))
    assert [type(value) for value in (*steps.values, *steps.ends)] == [float] * 3 + [int] * 3
