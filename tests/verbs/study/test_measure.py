"""What trials are compared by: metrics that there will be, measured alike."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fake_studies import line, write

from rlft.config.compose import compose
from rlft.types import UserError
from rlft.verbs.study.measure import (
    check_loggers,
    check_measured_alike,
    check_metric,
    curve,
    lower_is_better,
    metrics_of,
)


def test_the_metrics_of_a_run_are_those_of_its_evaluations() -> None:
    assert metrics_of(compose(["eval.num_samples=4", "eval.kl_base=true"])) == [
        "accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@4",
        "eval/reward/exact_match", "eval/reward/format", "eval/kl_base",
    ]  # fmt: skip
    sft = ["demonstrations=jsonl", "demonstrations.path=x.jsonl"]
    assert metrics_of(compose(sft, verb="sft")) == ["eval/loss"]
    assert metrics_of(compose(["preferences=jsonl", "preferences.path=x.jsonl"], verb="rm")) == [
        "accuracy",
        "eval/loss",
    ]
    dpo = compose(["preferences=jsonl", "preferences.path=x.jsonl"], verb="dpo")
    assert metrics_of(dpo) == ["accuracy", "eval/loss", "eval/margin", "eval/chosen_logprob"]


def test_a_metric_that_there_will_not_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"sweep.metric: no evaluation has it, got eval/pass@8; use one of accuracy, "):
        check_metric("eval/pass@8", compose(["eval.num_samples=4"]))
    with pytest.raises(UserError, match=r"eval.every: trials are compared by what evaluations measure"):
        check_metric("accuracy", compose(["eval.every=0"]))
    check_metric("eval/reward/format", compose([]))


def test_loggers_that_write_no_evaluations_are_refused() -> None:
    with pytest.raises(UserError, match=r"logger: trials are compared by eval.jsonl, .*, got console; add jsonl"):
        check_loggers(compose(["logger=console"]))
    check_loggers(compose(["logger=[console,jsonl]"]))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["eval.num_samples=8"], "eval.num_samples"),
        (["reward=[format,exact_match]"], "reward"),
        (["generation.temperature=0.5"], "generation.temperature"),
    ],
)
def test_trials_that_would_be_measured_differently_are_refused(words: list[str], key: str) -> None:
    with pytest.raises(UserError) as refused:
        check_measured_alike(compose([]), compose(words))
    assert refused.value.key == key


def test_what_only_trains_differently_is_measured_alike() -> None:
    check_measured_alike(compose([]), compose(["trainer.lr=1e-3", "reward.exact_match.weight=2", "algorithm=gspo"]))
    cold = ["eval.temperature=1.0"]
    check_measured_alike(compose(cold), compose([*cold, "generation.temperature=0.5"]))


def test_losses_and_divergences_are_better_when_they_are_lower() -> None:
    lower = ["eval/loss", "eval/pretrain_loss", "eval/kl_base"]
    assert [name for name in (*lower, "accuracy", "eval/pass@4") if lower_is_better(name)] == lower


def test_a_curve_leaves_the_evaluation_before_the_first_step_out(tmp_path: Path) -> None:
    write(tmp_path, [line(0, 0.1), line(2, 0.3), line(4, float("nan"))])
    found = curve(tmp_path, "accuracy")
    assert list(found) == [2, 4]
    assert found[2] == 0.3
    assert math.isnan(found[4])
    assert curve(tmp_path / "none", "accuracy") == {}
