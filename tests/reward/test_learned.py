import pytest

from rlft.reward.learned import Learned
from rlft.reward.workers.reward_spec import specs
from rlft.reward.workers.scorer import Scorer

LEARNED = {
    "_target_": "rlft.reward.learned.Learned", "weight": 1.0, "path": "runs/rm", "token_budget": 4096, "center": 0.5,
    "scale": 2,
}  # fmt: skip


def test_it_is_a_description_that_the_trainer_reads():
    spec = specs({"learned": LEARNED})["learned"]
    assert spec.runs_in_trainer
    assert not spec.scores_steps
    assert spec.build() == Learned(path="runs/rm", token_budget=4096, center=0.5, scale=2.0)


def test_a_path_may_be_none():
    assert specs({"learned": LEARNED | {"path": None}})["learned"].kwargs["path"] is None


def test_no_worker_can_score_with_it(group):
    with pytest.raises(RuntimeError, match="the trainer computes them"):
        specs({"learned": LEARNED})["learned"].build()(group(["18"]))
    with pytest.raises(ValueError, match="'learned'"):
        Scorer(specs({"learned": LEARNED}), 0, 1.0, "stop")
