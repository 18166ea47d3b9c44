"""The table of the metrics of evaluations."""

import pytest
from in_one_test import each

from rlft.loop.evaluations import METRICS, compared, label_of, metric_of


@each(
    ("name", "row", "label"),
    [
        ("eval/exact_match", "eval/<name>", "mean@4 (exact_match)"),
        ("eval/pass@2", "eval/pass@<k>", "pass@2"),
        ("eval/maj@4", "eval/maj@<k>", "maj@4"),
        ("eval/reward/exact_match", "eval/reward/<name>", "reward/exact_match"),
        ("eval/kl_base", "eval/kl_base", "kl_base"),  # and not a reward of this name
        ("eval/turns/mean", None, "turns/mean"),
    ],
)
def test_a_name_in_eval_jsonl_is_of_one_row(name, row, label):
    metric = metric_of(name)
    assert (metric.name if metric is not None else None) == row
    assert label_of(name, 4) == label


def test_what_is_computed_for_each_prompt_has_an_error():
    computed = [metric for metric in METRICS if metric.of_prompt is not None]
    assert len(computed) > 2
    assert all(metric.has_error for metric in computed)


@pytest.mark.parametrize(("rewards", "named"), [(["math", "format"], 2), ([], 0)])
def test_a_study_compares_by_the_rewards_that_there_are(rewards, named):
    reward = {name: {"_target_": f"rlft.reward.{name}.{name.title()}"} for name in rewards}
    names = compared({"command": "train", "eval": {"num_samples": 4}, "reward": reward})
    of_rewards = [name for name in names if name.startswith("eval/reward")]
    assert of_rewards == [f"eval/reward/{name}" for name in rewards]
    assert ("eval/maj@4" in names) == (named > 0)
    assert names[0] == "accuracy"
