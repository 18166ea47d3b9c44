"""`auto` sizes: what they come to, and that they change no gradient's config; and what a config is warned of."""

import logging
import random

import pytest
import torch
from in_one_test import each
from slow_cases import slow

from rlft.config import command as commands, resolved
from rlft.config.compose import compose
from rlft.config.resolved import build, resolve, token_budget, with_budget_of_device, with_number, with_token_budget


def config(*overrides):
    return compose(["model.device=cpu", *overrides])


@pytest.mark.parametrize(("overrides", "expected"), [
    (["prompts.max_tokens=64", "generation.max_tokens=48", "group_size=8"], 1536),
    (["prompts.max_tokens=384", "generation.max_tokens=64", "group_size=32"], 384 + 32 * 64),
    (["prompts.max_tokens=64", "generation.max_tokens=512", "group_size=32"], 4096),
    (["prompts.max_tokens=4000", "generation.max_tokens=1000"], 5000),  # the longest row must fit
    (["token_budget=700"], 700),
])  # fmt: skip
def test_on_a_cpu_the_budget_holds_the_longest_group_within_bounds(overrides, expected):
    assert with_token_budget(config(*overrides))["token_budget"] == expected


def test_on_a_gpu_it_is_large(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for words, expected in {
        ("prompts.max_tokens=64",): 32768,
        ("prompts.max_tokens=64", "model.device=cpu"): 64 + 8 * 256,
        ("prompts.max_tokens=64", "model.device=xpu"): 32768,
        ("prompts.max_tokens=40000",): 40256,
    }.items():
        plain = compose(words)
        assert with_budget_of_device(build(plain), plain).token_budget == expected


def test_a_learned_reward_takes_the_runs_budget():
    plain = config("reward=[exact_match,learned]", "reward.learned.path=somewhere")
    assert plain["token_budget"] == plain["reward"]["learned"]["token_budget"] == "auto"
    built = build(plain)
    assert built.reward["learned"]["token_budget"] == built.token_budget
    assert plain["token_budget"] == "auto", "the saved config goes on saying auto"


def test_supervised_commands_have_a_budget_without_groups():
    plain = {"prompts": {"max_tokens": 256}}
    assert token_budget(plain, gpu=False) == 1536
    assert token_budget({**plain, "max_completion_tokens": 3000}, gpu=False) == 3256


@each(("words", "named"), [
    (["generation.stop=['\\n\\n']"], ["generation.stop"]),
    (['generation.stop=["\n\n"]'], []),
    (["data.text='One.\\nTwo'", "generation.stop=[Q,'b\\tc']"], ["generation.stop", "data.text"]),
    (["data.text='Is \\neq the sign, or \\times, \\text{x} or \\nu?'"], []),
    (["data.text='Take \\neither'"], ["data.text"]),
    (["reward=format", "reward.format.pattern='a\\nb'"], []),  # a regular expression reads it
])  # fmt: skip
def test_a_text_that_holds_the_letters_of_a_line_break_is_warned_of(caplog, words, named):
    caplog.clear()
    resolved._warn_of_escape.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            resolved.resolve(compose(["data=episodes", "model.device=cpu", *words]))
    messages = [record.getMessage() for record in caplog.records]
    assert sorted(message.partition(":")[0] for message in messages) == sorted(named), "once a process"
    assert all("not a line break or tab" in message for message in messages)


@pytest.mark.parametrize("draws", [5, slow(25)])
def test_auto_is_never_refused_by_its_own_rule(draws, tmp_path):
    """Limits on both sides of the budgets that `auto` starts from, for each of five commands that have one."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1?", "chosen": "1", "rejected": "2"}\n')
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a text"}\n')
    of_command = {
        "train": (f"pretrain.path={texts}", "algorithm=ppo_ptx", "critic.kind=adapter"),
        "sample": (),
        "sft": ("demonstrations.path=embedded:arithmetic-demonstrations",),
        "rm": (f"preferences.path={pairs}",),
        "dpo": (f"preferences.path={pairs}",),
    }
    limits = (1, 500, 1000, 1535, 1536, 4096, 40_000)
    for command, words in of_command.items():
        plain = compose(["model.device=cpu", *words], None, command)
        wide = "prompts.max_tokens", "generation.max_tokens", "max_completion_tokens", "pretrain.max_tokens"
        keys = [key for key in (name.split(".") for name in wide) if key[0] in plain]
        rng = random.Random(command)
        for _ in range(draws):
            for *section, name in keys:
                (plain[section[0]] if section else plain)[name] = rng.choice(limits)
            resolve(plain, command)
            on_gpu = with_number(build(plain, *of(command)), plain, token_budget(plain, gpu=True))
            commands.named(command).check(on_gpu)


def of(command):
    return commands.named(command).root, command
