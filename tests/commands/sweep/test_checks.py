"""What is refused of a sweep before its first run, and what makes trials comparable."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from fake_studies import line, write
from in_one_test import each
from slow_cases import slow

from rlft.commands.sweep.checks import (
    check_measured_alike,
    check_metric,
    check_possible,
    check_same_questions,
    checked_configs,
    corners_of,
    curve,
    lower_is_better,
    planned,
)
from rlft.commands.sweep.space import Choice, Space
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.loop.evaluations import compared
from rlft.types import UserError

SMALL = ("generation=transformers", "model.device=cpu", "data.size=16", "data.held_out_size=4", "scoring.workers=0")
TOKENS = Choice(key="generation.max_tokens", values=("16", "256"))
PROMPTS = Choice(key="prompts.max_tokens", values=("64", "300"))


def with_recipes(folder: Path, **texts: str) -> Space:
    """A space of recipes with these keys."""
    (folder / "recipe").mkdir()
    for name, text in texts.items():
        (folder / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n# A recipe.\n{text}\n")
    return Space(fixed=SMALL, varied=(Choice(key="+recipe", values=tuple(texts)),))


def test_recipes_of_other_lengths_are_refused_though_they_read_the_same_files(tmp_path: Path) -> None:
    space = with_recipes(tmp_path, one="steps: 2", same="steps: 2\nepochs: 2", longer="steps: 4")
    configs = checked_configs(corners_of(space), space, tmp_path, "train", "accuracy")
    with pytest.raises(UserError, match=r"^recipe: decides how many steps a run has, .*, got 2 and 4 steps; "):
        planned(corners_of(space), configs)


def test_a_study_stays_possible_whatever_its_other_values_are() -> None:
    """Each of the two is accepted with the first of the other, and both together are refused."""
    check_possible(Space(fixed=SMALL, varied=(TOKENS, PROMPTS)), None, "train")


def test_a_server_that_does_not_answer_refuses_every_trial() -> None:
    fixed = (*SMALL, "reward=http", "reward.http.url=http://127.0.0.1:9/score")  # the discard port: nobody listens
    with pytest.raises(UserError, match=r"^reward\.http\.url: "):
        check_possible(Space(fixed=fixed, varied=(TOKENS, PROMPTS)), None, "train")


def test_a_file_that_is_gone_refuses_every_trial_and_one_that_is_back_none(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    fixed = (*SMALL[:2], "scoring.workers=0", "data=jsonl", f"data.path={data}")
    space = Space(fixed=fixed, varied=(TOKENS,))
    with pytest.raises(UserError, match=r"^data\.path: "):
        check_possible(space, None, "train")
    data.write_text("".join(json.dumps({"prompt": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(40)))
    check_possible(space, None, "train")


def test_the_metrics_of_a_run_are_those_of_its_evaluations() -> None:
    assert compared(compose(["eval.num_samples=4", "eval.kl_base=true"])) == [
        "accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/maj@4",
        "eval/reward/exact_match", "eval/reward/format", "eval/kl_base",
    ]  # fmt: skip
    assert "eval/maj@4" not in compared(compose(["eval.num_samples=4", "reward=[length,exact_match]"]))
    assert "eval/maj@4" not in compared({**compose(["eval.num_samples=4"]), "reward": {}})
    assert "eval/maj@1" not in compared(compose([]))
    sft = ["demonstrations=jsonl", "demonstrations.path=x.jsonl"]
    assert compared(compose(sft, command="sft")) == ["eval/loss"]
    assert compared(compose(["preferences=jsonl", "preferences.path=x.jsonl"], command="rm")) == [
        "accuracy",
        "eval/loss",
    ]
    dpo = compose(["preferences=jsonl", "preferences.path=x.jsonl"], command="dpo")
    assert compared(dpo) == ["accuracy", "eval/loss", "eval/margin", "eval/chosen_logprob"]


def test_a_metric_that_there_will_not_be_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"sweep.metric: no evaluation has it, got eval/pass@8; did you mean eval/pass@4[?] All: accuracy",
    ):
        check_metric("eval/pass@8", compose(["eval.num_samples=4"]))
    for every, got in ((0, "0"), (None, "null")):
        with pytest.raises(UserError, match=rf"eval.every: trials are compared by .*, and there is none, got {got};"):
            check_metric("accuracy", {"command": "train", "eval": {"every": every}})
    check_metric("eval/reward/format", compose([]))


@each(
    "word",
    ["eval.num_samples=8", "reward=[format,exact_match]", "generation.temperature=0.5", "generation.top_p=0.9",
     "generation.top_k=5", "generation.min_p=0.1", "generation.stop=['4']",
     "generation.include_stop_str_in_output=true", "scoring.on_error=0"],
)  # fmt: skip
def test_trials_that_would_be_measured_differently_are_refused(word: str) -> None:
    with pytest.raises(UserError) as refused:
        check_measured_alike(compose([]), compose([word]), "accuracy")
    assert refused.value.key == word.partition("=")[0]


def test_the_reward_that_trials_are_compared_by_is_one_for_all() -> None:
    changed = compose(["reward.format.mode=soft"])
    check_measured_alike(compose([]), changed, "accuracy")
    with pytest.raises(UserError, match=r"^reward.format: decides how a run is measured"):
        check_measured_alike(compose([]), changed, "eval/reward/format")
    check_measured_alike(compose([]), compose(["reward.format.weight=0.5"]), "eval/reward/format")


PREFERENCES = ("preferences=jsonl", "preferences.path=embedded:arithmetic-preferences", "max_completion_tokens=64")


# another start is another reference
@each("word", ["loss=ipo", "loss.beta=0.5", "snapshot.reference=base", "lora.path=elsewhere"])
def test_dpos_loss_and_margin_are_compared_in_one_unit(word: str) -> None:
    first, other = (compose([*PREFERENCES, *more], command="dpo") for more in ([], [word]))
    for metric in ("accuracy", "eval/chosen_logprob"):
        check_measured_alike(first, other, metric)
    for metric in ("eval/loss", "eval/margin"):
        with pytest.raises(UserError) as refused:
            check_measured_alike(first, other, metric)
        assert refused.value.key == word.partition("=")[0]


def test_a_loss_without_a_reference_is_compared_wherever_the_policy_begins() -> None:
    first, other = (
        compose([*PREFERENCES, "loss=simpo", *more], command="dpo") for more in ([], ["lora.path=elsewhere"])
    )
    check_measured_alike(first, other, "eval/loss")


def test_a_reward_models_loss_is_measured_without_its_margin() -> None:
    first, other = (compose([*PREFERENCES, *more], command="rm") for more in ([], ["margin=1"]))
    check_measured_alike(first, other, "eval/loss")


def test_the_text_that_a_loss_of_pretraining_is_measured_on_is_one_for_all() -> None:
    first, longer, more = (
        compose(["pretrain.path=embedded:arithmetic-text", *words])
        for words in ([], ["pretrain.max_tokens=33"], ["pretrain.sequences_per_update=3"])
    )
    check_measured_alike(first, longer, "accuracy")
    check_measured_alike(first, more, "eval/pretrain_loss")
    with pytest.raises(UserError, match=r"^pretrain.max_tokens: decides how a run is measured"):
        check_measured_alike(first, longer, "eval/pretrain_loss")


@pytest.mark.parametrize(
    ("command", "section"), [("dpo", "preferences"), slow("rm", "preferences"), ("sft", "demonstrations")]
)
def test_trials_are_compared_on_the_same_held_out_texts(command: str, section: str) -> None:
    """A limit of 20 tokens leaves some of the embedded completions out, which have up to 23."""
    words = [f"{section}=jsonl", f"{section}.path=embedded:arithmetic-{section}", "model.device=cpu"]
    whole, short, same = (
        resolve(compose([*words, *more], command=command)).plan()
        for more in (
            ["max_completion_tokens=64"],
            ["max_completion_tokens=20"],
            ["max_completion_tokens=64", "trainer.lr=1e-3"],
        )
    )
    check_same_questions("trainer.lr", whole, same)
    with pytest.raises(UserError, match=f"^max_completion_tokens: decides which {section} are held out"):
        check_same_questions("max_completion_tokens", whole, short)


def test_what_only_trains_differently_is_measured_alike() -> None:
    other = compose(["trainer.lr=1e-3", "reward.exact_match.weight=2", "algorithm=gspo", "generation.max_tokens=99"])
    check_measured_alike(compose([]), other, "accuracy")
    cold = ["eval.temperature=1.0"]
    check_measured_alike(compose(cold), compose([*cold, "generation.temperature=0.5"]), "accuracy")


def test_losses_and_divergences_are_better_when_they_are_lower() -> None:
    lower = ["eval/loss", "eval/pretrain_loss", "eval/kl_base"]
    others = ["accuracy", "eval/pass@4", "eval/reward/no_loss", "eval/reward/kl_base"]
    assert [name for name in (*lower, *others) if lower_is_better(name)] == lower


def test_a_direction_that_is_given_holds_for_any_metric() -> None:
    for metric in ("accuracy", "eval/loss", "eval/reward/no_loss"):
        assert lower_is_better(metric, "min")
        assert not lower_is_better(metric, "max")


def test_a_curve_leaves_the_evaluation_before_the_first_step_out(tmp_path: Path) -> None:
    write(tmp_path, [line(0, 0.1), line(2, 0.3), line(4, float("nan"))])
    found = curve(tmp_path, "accuracy")
    assert list(found) == [2, 4]
    assert found[2] == 0.3
    assert math.isnan(found[4])
    assert curve(tmp_path / "none", "accuracy") == {}
