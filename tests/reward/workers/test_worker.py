"""What a worker makes of what a reward returns: scores, steps and verdicts, or what is wrong with them."""

import pickle

import numpy as np
import pytest
import torch
from in_one_test import each
from naughty import WRONG_STEPS

from rlft.reward.workers.reward_spec import RewardSpec, TrlReward
from rlft.reward.workers.scorer import describe
from rlft.reward.workers.worker import Failure, Loaded, checked, checked_steps, load, score
from rlft.types import StepScores, Verdict

NONE = StepScores(values=(), ends=())


def returning(values):
    return lambda group: values


@each(("values", "scores"), [
    ([1, True], [1.0, 1.0]),
    ((0.5, False), [0.5, 0.0]),
    (np.ones(2, dtype=np.float32), [1.0, 1.0]),
    ([np.float16(0.5), np.int64(2)], [0.5, 2.0]),
    ([np.array(0.5), np.array([2.0])], [0.5, 2.0]),
    (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
    ([torch.tensor(1), torch.tensor([2.0])], [1.0, 2.0]),
    ((float(n) for n in range(2)), [0.0, 1.0]),
    ([1e12, -1e12], [1e12, -1e12]),
])  # fmt: skip
def test_numbers_of_every_kind_are_scores(group, values, scores):
    assert score(Loaded(reward=returning(values), scores_steps=False), group(["a", "b"]), 10.0, [0, 0]) == scores


LISTED = "return a list of numbers, one for each completion, in their order"
SMALLER = "divide the reward by a constant"
NO_SCORES = [
    *(
        (values, f"returned {kind}, not a list of 2 numbers", LISTED)
        for values, kind in [
            (1.0, "float"), (None, "NoneType"), (np.float64(1), "float64"), (np.array(1.0), "ndarray"),
            (torch.tensor(1.0), "Tensor"), (True, "bool"), ("11", "str"), (b"11", "bytes"), ({0: 1.0, 1: 0.0}, "dict"),
            ({0.0, 1.0}, "set"),
        ]
    ),
    ([1.0], "returned 1 score for 2 completions", LISTED),
    ([1.0] * 3, "returned 3 scores for 2 completions", LISTED),
    ([], "returned 0 scores for 2 completions", LISTED),
    ([1.0, None], "returned None, not a finite number,", "return 0.0 where the reward does not apply"),
    *(
        ([1.0, value], f"returned {shown}, not a finite number,", "")
        for value, shown in [
            (float("nan"), "nan"), (float("inf"), "inf"), ("1", "'1'"), (1j, "1j"), ([1.0, 2.0], "[1.0, 2.0]"),
            (torch.ones(2), "tensor([1., 1.])"),
        ]
    ),
    ([1.0, 1e39], "returned 1e+39, larger than a score may be", SMALLER),
    ([1.0, -1e20], "returned -1e+20, larger than a score may be", SMALLER),
    ([1.0, 10**20], "returned 100000000000000000000, larger than", SMALLER),
]  # fmt: skip


@each(("values", "problem", "remedy"), NO_SCORES)
def test_what_is_no_score_is_told_with_what_to_do(group, values, problem, remedy):
    for reward in (returning(values), TrlReward(function=lambda **_: values, keys={}, form="texts")):
        if isinstance(reward, TrlReward) and isinstance(values, list) and None in values:
            continue  # there None means that the reward does not apply
        failure = score(Loaded(reward=reward, scores_steps=False), group(["a", "b"]), 10.0, [0, 0])
        assert failure.problem.startswith(problem)
        assert failure.remedy == remedy
        message = describe("mine", group(["a", "b"]), failure, None)
        assert message.startswith(f"reward.mine: {problem}")
        assert message.endswith(remedy or "scoring.on_error=0")


def test_a_score_may_be_as_large_as_its_weight_allows():
    for weight, largest in ((1.0, 1e12), (1e-3, 1e15), (1e6, 1e6), (0.0, 1e12)):
        spec = RewardSpec(name="length", target="naughty.length", kwargs={}, weight=weight)
        assert load([spec])["length"].largest == pytest.approx(largest)


# -- steps and verdicts ------------------------------------------------------------------------------------------------
STEPS_PROBLEMS = {
    "number": "returned 1.0, not StepScores (it says scores_steps = True),",
    "lengths": "returned 1 step score with 2 ends",
    "bare": "returned StepScores(values=None, ends=None), whose values and ends are not both sequences,",
    "infinite": "returned inf for step 2, not a finite number,",
    "word": "returned '1' for step 1, not a finite number,",
    "half": "returned an end of 1.5 for step 1, not a whole number,",
    "zero": "returned an end of 0 for step 1, outside 1 .. 4 (the characters of the text),",
    "late": "returned an end of 5 for step 2, outside 1 .. 4 (the characters of the text),",
    "same": "returned an end of 2 for step 2, not after the step before it, which ends at 2,",
    "back": "returned an end of 1 for step 2, not after the step before it, which ends at 3,",
}


def test_what_is_wrong_with_steps_is_told_with_the_completion():
    assert STEPS_PROBLEMS.keys() == WRONG_STEPS.keys()
    for order, problem in STEPS_PROBLEMS.items():
        found = checked_steps([NONE, WRONG_STEPS[order]], ["", "text"])
        assert isinstance(found, Failure)
        assert (found.problem, found.completion) == (problem, 1)
    for values, problem in (([NONE], "1 score for 2 completions"), (None, "NoneType, not a list of 2 StepScores")):
        found = checked_steps(values, ["a", "b"])
        assert isinstance(found, Failure)
        assert found.problem == f"returned {problem}"


def test_steps_arrive_as_plain_floats_and_ints_and_none_at_all_are_no_fault():
    given = StepScores(values=(np.float32(0.5), True, torch.tensor(2.0)), ends=[np.int64(1), torch.tensor(2), 3])
    steps, none, empty = checked_steps([given, NONE, NONE], ["abc", "ab", ""])
    assert steps == StepScores(values=(0.5, 1.0, 2.0), ends=(1, 2, 3))
    assert [type(value) for value in (*steps.values, *steps.ends)] == [float] * 3 + [int] * 3
    assert none == empty == NONE


def test_a_verdict_is_its_score_and_keeps_its_answer_on_the_way():
    verdict = pickle.loads(pickle.dumps(Verdict(1, "18")))
    assert (verdict, verdict.answer) == (1.0, "18")
    found = checked([Verdict(0.5, "a"), 0.5], 2)
    assert found == [0.5, 0.5]
    assert [getattr(score, "answer", "none") for score in found] == ["a", "none"]
    assert isinstance(checked([Verdict(float("nan"), "a")], 1), Failure)
    assert isinstance(checked([Verdict(10.0, "a")], 1, largest=1.0), Failure)
    with pytest.raises(TypeError, match="is text or None, got 18"):
        Verdict(1.0, 18)
