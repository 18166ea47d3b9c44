import pytest
from in_one_test import each

from rlft.reward.workers.reward_spec import specs
from rlft.types import UserError

FORMAT = {
    "_target_": "rlft.reward.format.Format",
    "weight": 0.2,
    "mode": "strict",
    "tags": ["think", "answer"],
    "pattern": None,
}


def test_weight_and_on_error_stay_with_the_scorer():
    spec = specs({"format": {**FORMAT, "on_error": 0}})["format"]
    assert (spec.weight, spec.on_error) == (0.2, 0.0)
    assert set(spec.kwargs) == {"mode", "tags", "pattern"}


def test_a_class_and_a_function_from_outside_the_tree_both_work(group):
    built = specs(
        {
            "bonus": {"_target_": "naughty.Bonus", "weight": 1, "bonus": 2.5},
            "length": {"_target_": "naughty.length", "weight": 1},
            "scaled": {"_target_": "naughty.scaled_length", "weight": 1, "scale": 2},
        }
    )
    scores = {name: spec.build()(group(["ab"])) for name, spec in built.items()}
    assert scores == {"bonus": [2.5], "length": [2.0], "scaled": [4]}


def test_a_spec_knows_whether_its_reward_scores_steps_or_runs_in_the_trainer():
    built = specs(
        {
            "format": FORMAT,
            "words": {"_target_": "naughty.stepwise", "weight": 1},
            "same": {"_target_": "naughty.SameSteps", "weight": 1, "values": [1.0], "ends": [1]},
            "judge": {"_target_": "naughty.Judge", "weight": 1, "taste": "good"},
        }
    )
    assert [name for name, spec in built.items() if spec.scores_steps] == ["words", "same"]
    assert [name for name, spec in built.items() if spec.runs_in_trainer] == ["judge"]


def without(key):
    return {k: v for k, v in FORMAT.items() if k != key}


@each(
    ("config", "message"),
    [
        (FORMAT | {"_target_": "no.such.Reward"}, "reward.r._target_: cannot be imported"),
        (FORMAT | {"_target_": "rlft.reward.format.Fromat"}, "reward.r._target_: cannot be imported"),
        (FORMAT | {"_target_": "format"}, "reward.r._target_: must be module.Name"),
        (FORMAT | {"_target_": None}, "reward.r._target_: must be module.Name"),
        ({"_target_": "naughty.number", "weight": 1}, "reward.r._target_: is not callable"),
        ({"_target_": "naughty.NotAReward", "weight": 1}, "reward.r._target_: builds something that is not callable"),
        (without("_target_"), "reward.r: has no _target_"),
        (None, "reward.r: has no _target_"),
        (without("weight"), "reward.r.weight: must be a finite number, got nothing"),
        (FORMAT | {"weight": "much"}, "reward.r.weight: must be a finite number, got 'much'"),
        (FORMAT | {"weight": float("nan")}, "reward.r.weight: must be a finite number"),
        (FORMAT | {"on_error": "go on"}, "reward.r.on_error: must be a finite number"),
        (FORMAT | {"mode": "lax"}, "reward.r.mode: is not one of its choices, got 'lax'; choose one of strict, soft"),
        (FORMAT | {"moed": "soft"}, "reward.r.moed: there is no such key, got 'soft'; did you mean reward.r.mode?"),
        (FORMAT | {"tags": 3}, "reward.r.tags: "),
        (FORMAT | {"tags": []}, "reward.r.tags: must be different names"),
        (without("tags"), "reward.r.tags: is missing"),
        ({"_target_": "naughty.Bonus", "weight": 1, "bonus": "big"}, "reward.r.bonus: "),
        ({"_target_": "naughty.scaled_length", "weight": 1}, "reward.r.scale: is missing"),
        ({"_target_": "naughty.length", "weight": 1, "unit": "cm"}, "reward.r.unit: there is no such key"),
        (
            {"_target_": "naughty.Judge", "weight": 1, "taste": "good", "on_error": 0.0},
            "reward.r.on_error: is for rewards that run in workers",
        ),
    ],
)
def test_a_wrong_reward_is_refused_by_its_key(config, message):
    with pytest.raises(UserError) as refusal:
        specs({"r": config})
    assert str(refusal.value).startswith(message)
