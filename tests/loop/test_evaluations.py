"""The table of the metrics of evaluations."""

from __future__ import annotations

from in_one_test import each

from rlft.loop.evaluations import METRICS, label_of, metric_of


@each(
    ("name", "row", "label"),
    [
        ("eval/exact_match", "eval/<name>", "mean@4 (exact_match)"),
        ("eval/pass@2", "eval/pass@<k>", "pass@2"),
        ("eval/reward/exact_match", "eval/reward/<name>", "reward/exact_match"),
        ("eval/kl_base", "eval/kl_base", "kl_base"),  # and not a reward of this name
        ("eval/turns/mean", None, "turns/mean"),
    ],
)
def test_a_name_in_eval_jsonl_is_of_one_row(name: str, row: str | None, label: str) -> None:
    metric = metric_of(name)
    assert (metric.name if metric is not None else None) == row
    assert label_of(name, 4) == label


def test_what_is_computed_for_each_prompt_has_an_error() -> None:
    assert [metric.name for metric in METRICS if metric.of_prompt is not None and not metric.has_error] == []
