"""Rewards that the trainer computes itself, mixed with those of the workers."""

import psutil
import pytest
from in_one_test import each

from rlft.reward.workers.scorer import RewardError, Scorer, specs
from rlft.types import StepScores

JUDGE = {"_target_": "naughty.Judge", "weight": 10.0, "taste": "good"}
LENGTH = {"_target_": "naughty.length", "weight": 1.0}
BONUS = {"_target_": "naughty.Bonus", "weight": 1.0, "bonus": 0.5}
STEPWISE = {"_target_": "naughty.stepwise", "weight": 1.0}


def scorer(rewards, resident, workers=0):
    return Scorer(specs(rewards), workers, 5.0, "stop", resident)


def digits(groups):
    """1 for each digit in a completion."""
    return [[float(sum(map(str.isdigit, r.completion.text))) for r in group.rollouts] for group in groups]


@pytest.mark.parametrize("workers", [0, 1])
def test_they_are_mixed_by_weight_in_the_configured_order(group, workers):
    score = scorer({"length": LENGTH, "judge": JUDGE, "bonus": BONUS}, {"judge": digits}, workers)
    scores = score([group(["a1", "b"], id="p0"), group(["22", ""], id="p1")])
    assert list(scores.by_reward) == ["length", "judge", "bonus"]
    assert scores.by_reward["judge"].tolist() == [[1.0, 0.0], [2.0, 0.0]]
    # length + 10 x digits + 0.5
    assert scores.total.tolist() == [[12.5, 1.5], [22.5, 0.5]]
    assert scores.steps is None
    score.close()


def test_all_groups_come_at_once(group):
    seen = []

    def look(groups):
        seen.append([g.prompt.id for g in groups])
        return digits(groups)

    scorer({"judge": JUDGE}, {"judge": look})([group(["1"], id=f"p{i}") for i in range(3)])
    assert seen == [["p0", "p1", "p2"]]


def test_where_nothing_is_for_workers_none_are_started(group):
    before = psutil.Process().children(recursive=True)
    score = scorer({"judge": JUDGE}, {"judge": digits}, workers=2)
    assert score([group(["12", "3"])]).total.tolist() == [[20.0, 10.0]]
    assert psutil.Process().children(recursive=True) == before
    score.close()
    score.close()


def test_beside_a_process_reward_they_are_part_of_the_outcome(group):
    score = scorer({"stepwise": STEPWISE, "judge": JUDGE}, {"judge": digits})
    scores = score([group(["ab 1"])])
    assert scores.outcome.tolist() == [[10.0]]
    assert scores.total.tolist() == [[13.0]]
    assert scores.steps == [[StepScores(values=(2.0, 1.0), ends=(2, 4))]]


def test_a_reward_that_runs_in_the_trainer_needs_its_callable():
    with pytest.raises(ValueError, match=r"rewards \['judge'\] run in the trainer, and no resident callable"):
        scorer({"length": LENGTH, "judge": JUDGE}, {})


def test_a_callable_for_a_reward_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"resident rewards \['jugde'\] are not among the rewards \['length'\]"):
        scorer({"length": LENGTH}, {"jugde": digits})


@each(
    ("returned", "message"),
    [
        (
            [[1.0, float("nan")], [1.0, 1.0]],
            "returned nan, not a finite number, on prompt 'p0', completion 2 of 2: 'b'; ",
        ),
        ([[1.0, 1.0], ["1", 1.0]], "returned '1', not a finite number, on prompt 'p1', completion 1 of 2: 'c'; "),
        ([[1.0, 1.0], [1.0]], "returned 1 score for 2 completions on prompt 'p1', its 2 completions as a whole; "),
        ([[1.0, 1.0], 1.0], "returned float, not a list of 2 numbers on prompt 'p1'"),
        ([[1.0, 1.0]], "returned scores of 1 group, not a list for each of 2 groups; "),
        ([[1.0, 1.0]] * 3, "returned scores of 3 groups, not a list for each of 2 groups; "),
        (None, "returned NoneType, not a list for each of 2 groups; "),
    ],
)
def test_what_is_wrong_with_their_scores_stops_the_run(group, returned, message):
    score = Scorer(specs({"judge": JUDGE}), 0, 5.0, 0.0, {"judge": lambda groups: returned})
    with pytest.raises(RewardError) as stopped:
        score([group(["a", "b"], id="p0"), group(["c", "d"], id="p1")])
    assert str(stopped.value).startswith(f"reward.judge: {message}")
    assert str(stopped.value).endswith("look at the model, adapter and numbers this reward is made of")


def test_an_error_of_the_callable_itself_is_not_hidden(group):
    def broken(groups):
        raise MemoryError("too long")

    with pytest.raises(MemoryError, match="too long"):
        scorer({"judge": JUDGE}, {"judge": broken})([group(["a"])])
