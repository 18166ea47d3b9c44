"""Configs of every command and of every choice are typed sections, whose keys have bounds."""

import pytest
from in_one_test import each

from rlft.config import catalog
from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.config.keys import with_values
from rlft.config.resolved import build
from rlft.config.schema import SampleConfig, SftConfig
from rlft.reward.workers.reward_spec import specs
from rlft.types import UserError

CHOICES = [(group, choice) for group in catalog.groups() if group != "recipe" for choice in catalog.choices(group)]
FILES = {"sft": ["demonstrations.path=some.jsonl"], "rm": ["preferences.path=some.jsonl"],
         "dpo": ["preferences.path=some.jsonl"]}  # fmt: skip
"""{command: what its config needs}."""


def test_prompts_with_answers_are_left_out_by_default_of_sft_only():
    config = build(compose([*FILES["sft"], "lora=null"], command="sft"), SftConfig, "sft")
    assert (config.data, config.lora) == ({}, None), "without an adapter there is no section"
    plain = compose([], command="sample")
    del plain["data"]
    with pytest.raises(UserError, match=r"^data: is missing; choose data=arithmetic or "):
        build(plain, SampleConfig, "sample")


NEEDS = {
    ("data", "jsonl"): ["data.path=some.jsonl"],
    ("data", "hub"): ["data.path=some/set"],
    ("environment", "tools"): ["environment.tools=[mine.search]"],
    ("environment", "class"): ["environment.factory=mine.Shop"],
    ("environment", "game"): ["environment.factory=mine.Game"],
    ("environment", "mcp"): ["environment.command=[python,server.py]"],
    ("environment", "textarena"): ["environment.game=GuessTheNumber-v0"],
}

COMMAND_OF = {"demonstrations": "sft", "preferences": "rm", "loss": "dpo"}


@each(("group", "choice"), CHOICES)
def test_every_choice_composes_and_builds(group, choice):
    if group in COMMAND_OF:
        command = COMMAND_OF[group]
        plain = compose([f"{group}={choice}", *FILES[command]], command=command)
        kind = type(instantiate(plain[group], group))
        found = kind.__name__.lower() if group == "loss" else kind.__module__
        assert found == (choice if group == "loss" else f"rlft.data.{group}")
        return
    config = build(compose([f"{group}={choice}", *NEEDS.get((group, choice), [])]))
    if group in ("generation", "cluster"):
        assert choice == (config.generation.engine if group == "generation" else config.cluster.kind)
        return
    built = {
        "reward": lambda: specs(config.reward)[choice].build(),
        "logger": lambda: instantiate(config.logger[choice], f"logger.{choice}"),
    }.get(group, lambda: instantiate(getattr(config, group), group))()
    assert type(built).__module__.startswith(f"rlft.{group}.")


DEFAULTS = compose([])

OUT_OF_BOUNDS = {
    "prompts_per_step": 0, "epochs": 0, "eval.num_samples": 0, "checkpoint.keep": 0, "checkpoint.on_signal": 0,
    "lora.rank": 0, "lora.dropout": 1, "prompts.over_limit": "droop", "scoring.on_error": "go", "scoring.timeout": 0,
    "generation.vllm.gpu_memory_utilization": 90, "generation.vllm.weights": "both", "generation.temperature": -1,
    "generation.min_p": 1, "rollouts.every": -1, "rollouts.keep": 0, "snapshot.ema_decay": 1.5, "snapshot.old": "never",
    "snapshot.teacher_gpu_memory_utilization": 0, "snapshot.teacher_quantization": "8bit", "overlap.lag": 2,
    "snapshot.teacher_engine": "trl", "model.kernels": "fast", "model.quantization": "8bit", "critic.kind": "own",
}  # fmt: skip


@each(("key", "value"), OUT_OF_BOUNDS.items())
def test_a_value_out_of_the_bounds_of_its_key_is_refused(key, value):
    with pytest.raises(UserError) as refusal:
        build(with_values(DEFAULTS, {key: value}))
    assert refusal.value.key == key
