"""Resolves `token_budget: auto`: the number of tokens in one forward-backward on this machine.

It changes memory and time, never a gradient, so a run may be resumed on a machine where it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

AUTO = "auto"

GPU_TOKENS = 16384
"""A GPU needs large matrix products, and memory limits them, not caches: plan/fit.py lowers the number."""

CPU_TOKENS, MOST_CPU_TOKENS = 1536, 4096
"""On a CPU small micro-batches stay in its caches. A group of up to MOST_CPU_TOKENS stays together, so that its prompt
is computed once."""


def resolved(config: Mapping[str, Any], *, gpu: bool = False) -> dict[str, Any]:
    """The plain config with a number instead of `auto`, also in the rewards' own token budgets.

    `gpu` says whether the base will be on a GPU.
    """
    result = dict(config)
    if result.get("token_budget") == AUTO:
        budget = result["token_budget"] = token_budget(config, gpu=gpu)
        if isinstance(rewards := config.get("reward"), Mapping):
            result["reward"] = with_budget(rewards, rewards, budget)
    return result


def with_budget_of_device(config: Any, plain: Mapping[str, Any]) -> Any:
    """The typed config of this plain one, with a GPU's budget for `auto` if the base will be on a GPU."""
    if plain.get("token_budget") != AUTO or not on_gpu(plain["model"]):
        return config
    return with_number(config, plain, token_budget(plain, gpu=True))


def with_number(config: Any, plain: Mapping[str, Any], budget: int) -> Any:
    """The typed config with this token budget, also in the rewards whose section says `auto` in the plain one."""
    rewards = {"reward": with_budget(config.reward, plain["reward"], budget)} if plain.get("reward") else {}
    return replace(config, token_budget=budget, **rewards)


def with_budget(rewards: Mapping[str, Any], written: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """The rewards, with this token budget in each whose section says `token_budget: auto`."""
    automatic = {n for n, keys in written.items() if isinstance(keys, Mapping) and keys.get("token_budget") == AUTO}
    return {n: {**keys, "token_budget": budget} if n in automatic else keys for n, keys in rewards.items()}


def token_budget(config: Mapping[str, Any], *, gpu: bool) -> int:
    """The number of tokens in one forward-backward, on a GPU or for the longest group of this config on a CPU."""
    prompt, completion = _number(config, "prompts", "max_tokens"), _number(config, "generation", "max_tokens")
    completion = completion or _positive_int(config.get("max_completion_tokens"))
    minimum = max(prompt + completion, _number(config, "pretrain", "max_tokens"), prompt + 1)
    if gpu:
        return max(GPU_TOKENS, minimum)
    group = prompt + completion * max(1, _positive_int(config.get("group_size")))
    return max(min(max(CPU_TOKENS, group), MOST_CPU_TOKENS), minimum)


def on_gpu(model: Mapping[str, Any]) -> bool:
    """Whether the base will be on a GPU; imports torch if the config leaves it to this machine."""
    if model["device"] != AUTO:
        return model["device"].startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _number(config: Mapping[str, Any], section: str, key: str) -> int:
    keys = config.get(section)
    return _positive_int(keys.get(key)) if isinstance(keys, Mapping) else 0


def _positive_int(value: Any) -> int:
    """The value if it is a positive integer, else 0: a wrong value is refused later, when the config is typed."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
