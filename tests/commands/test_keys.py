"""`rlft keys`: every key with its meaning."""

from __future__ import annotations

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands.lists import all_keys
from rlft.config import command as commands
from rlft.config.compose import compose
from rlft.config.keys import flatten, is_below


@each("command", commands.OWN)
def test_every_key_of_a_composed_config_is_listed_with_a_meaning(command: str) -> None:
    recipe = [] if command in ("train", "sample") else [f"+recipe={command}_arithmetic"]
    keys = [key for key in flatten(compose(recipe, None, command)) if not key.endswith("_target_")]
    listed = {row.key for row in all_keys() if row.meaning}
    assert len(keys) > 50
    assert [key for key in keys if not is_below(key, listed)] == []


@each(
    "pattern, lines",
    [
        ("trainer.lr", ["trainer.lr = 1.0e-5", "[configs/base/training.yaml: train"]),
        ("algorithm.kl_c*", ["algorithm.kl_coef = ", "algorithm=grpo"]),
        ("serve.port", ["serve.port = ", "configs/base/serve.yaml: rlft serve"]),
        ("reward.code.*", ["reward.code.weight = ", "reward=code"]),
        ("first steps in which only the critic", ["critic.warmup_steps = 0"]),
        ("gradient_checkpointing", ["auto", "offload"]),
        ("prompts.over_limit", ["drop | refuse"]),
        ("algorithm", ["a group; its choices: a2c, "]),
    ],
)
def test_a_pattern_chooses_keys_by_path_or_text(
    pattern: str, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["keys", pattern]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert [line for line in lines if line not in printed] == []
