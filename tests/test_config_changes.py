"""A run's config with changes from the command line."""

from __future__ import annotations

import pytest

from rlft.config import changed, compose
from rlft.roots import Verb
from rlft.types import UserError

PLAIN = compose(["generation.max_tokens=77", "generation.temperature=0.5", "reward.format.weight=3", "seed=9"])


def test_only_what_was_named_changes() -> None:
    after = changed(PLAIN, ["trainer.lr=0.5", "group_size=3"], None)
    assert (after["trainer"]["lr"], after["group_size"]) == (0.5, 3)
    after["trainer"]["lr"], after["group_size"] = PLAIN["trainer"]["lr"], PLAIN["group_size"]
    assert after == PLAIN


def test_a_choice_of_a_group_changes_the_whole_section_and_its_keys_follow_in_any_order() -> None:
    after = changed(PLAIN, ["data.path=rows.jsonl", "data=jsonl"], None)
    assert after["data"]["path"] == "rows.jsonl"
    assert "difficulty" not in after["data"]
    assert after["seed"] == 9


def test_other_rewards_refer_to_the_runs_own_limits() -> None:
    after = changed(PLAIN, ["reward=[exact_match,overlong]"], None)
    assert list(after["reward"]) == ["exact_match", "overlong"]
    assert after["reward"]["overlong"]["max_tokens"] == 77
    again = changed(PLAIN, ["reward=[overlong]", "generation.max_tokens=55"], None)
    assert again["reward"]["overlong"]["max_tokens"] == 55, "whatever the order"


def test_another_engine_samples_as_the_run_did() -> None:
    after = changed(PLAIN, ["generation=vllm"], None)
    assert after["generation"] == {**PLAIN["generation"], "engine": "vllm"}


@pytest.mark.parametrize(
    ("override", "verb", "message"),
    [
        ("grop_size=3", Verb.train, "grop_size: there is no such key; did you mean group_size?"),
        ("group_size=3", Verb.sft, "group_size: there is no such key"),
        ("data=arithmetik", Verb.train, "data: is not one of its choices, got arithmetik; did you mean arithmetic?"),
    ],
)
def test_what_is_not_there_is_refused(override: str, verb: Verb, message: str) -> None:
    plain = PLAIN if verb == Verb.train else compose(["demonstrations.path=x"], verb=verb)
    with pytest.raises(UserError) as refused:
        changed(plain, [override], None, verb)
    assert str(refused.value).startswith(message)
