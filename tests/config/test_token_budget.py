"""`auto` sizes: what they come to, and that they change no gradient's config."""

from __future__ import annotations

import pytest
import torch

from rlft.config import token_budget
from rlft.config.compose import build, compose


def config(*overrides: str) -> dict:
    return compose(["model.device=cpu", *overrides])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["prompts.max_tokens=64", "generation.max_tokens=48", "group_size=8"], 1536),
        (["prompts.max_tokens=384", "generation.max_tokens=64", "group_size=32"], 384 + 32 * 64),
        (["prompts.max_tokens=64", "generation.max_tokens=512", "group_size=32"], 4096),
        (["prompts.max_tokens=4000", "generation.max_tokens=1000"], 5000),  # the longest row must fit
        (["token_budget=700"], 700),
    ],
)
def test_on_a_cpu_the_budget_holds_the_longest_group_within_bounds(overrides: list[str], expected: int) -> None:
    assert token_budget.resolved(config(*overrides))["token_budget"] == expected


def test_on_a_gpu_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plain = compose(["prompts.max_tokens=64"])
    assert token_budget.token_budget(plain) == 16384
    assert token_budget.token_budget({**plain, "model": {"device": "cpu"}}) == 64 + 8 * 256
    assert token_budget.token_budget(compose(["prompts.max_tokens=20000"])) > 20000


def test_a_learned_reward_takes_the_runs_budget() -> None:
    plain = config("reward=[exact_match,learned]", "reward.learned.path=somewhere")
    assert plain["token_budget"] == plain["reward"]["learned"]["token_budget"] == "auto"
    built = build(plain)
    assert built.reward["learned"]["token_budget"] == built.token_budget
    assert plain["token_budget"] == "auto", "the saved config goes on saying auto"


def test_supervised_verbs_have_a_budget_without_groups() -> None:
    assert token_budget.token_budget({"prompts": {"max_tokens": 256}, "model": {"device": "cpu"}}) == 1536
    plain = {"prompts": {"max_tokens": 256}, "max_completion_tokens": 3000, "model": {"device": "cpu"}}
    assert token_budget.token_budget(plain) == 3256
