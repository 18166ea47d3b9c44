"""Sizes that a config leaves to the machine: `token_budget: auto` and `model.gradient_checkpointing: auto`.

They change memory and time, never a gradient, so a run may be resumed where they come out otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

AUTO = "auto"

GPU_TOKENS = 16384
"""A GPU wants large products; its memory, not its cache, is the limit (`model.gradient_checkpointing`)."""

CPU_TOKENS, MOST_CPU_TOKENS = 1536, 4096
"""On a CPU small micro-batches stay in its caches. A whole group stays together, where it fits in the second number:
its prompt is computed once."""

ACTIVATION_SHARE = 0.5
"""Of the memory that is free once the weights are loaded, what activations may take without checkpointing."""


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """The plain config with numbers and booleans in place of `auto`, the rewards' own token budgets included."""
    result = dict(config)
    if result.get("token_budget") == AUTO:
        budget = result["token_budget"] = token_budget(config)
        rewards = result.get("reward") or {}
        result["reward"] = {name: _with_budget(reward, budget) for name, reward in rewards.items()} or rewards
        if "reward" not in config:
            del result["reward"]
    model = result.get("model")
    if isinstance(model, Mapping) and model.get("gradient_checkpointing") == AUTO:
        result["model"] = {**model, "gradient_checkpointing": needs_checkpointing(model, result.get("token_budget"))}
    return result


def token_budget(config: Mapping[str, Any]) -> int:
    """Tokens in one forward-backward: a GPU's, or a CPU's for the longest group of this config."""
    prompt, completion = _number(config, "prompts", "max_tokens"), _number(config, "generation", "max_tokens")
    completion = completion or _whole(config.get("max_completion_tokens"))
    least = max(prompt + completion, _number(config, "pretrain", "max_tokens"), prompt + 1)
    if on_gpu(config.get("model") or {}):
        return max(GPU_TOKENS, least)
    group = prompt + completion * max(1, _whole(config.get("group_size")))
    return max(min(max(CPU_TOKENS, group), MOST_CPU_TOKENS), least)


def on_gpu(model: Mapping[str, Any]) -> bool:
    """Whether the base will be on a GPU."""
    device = str(model.get("device", AUTO))
    if device != AUTO:
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def needs_checkpointing(model: Mapping[str, Any], tokens: Any) -> bool:
    """Whether the activations of a forward of so many tokens would take more than their share of free memory."""
    from rlft.model.activations import activation_bytes, weight_bytes
    from rlft.model.backbone import read_config, resolve_device, resolve_dtype
    from rlft.model.config import ModelConfig
    from rlft.targets import from_mapping

    settings = from_mapping(ModelConfig, {**model, "gradient_checkpointing": False}, "model")
    device = resolve_device(settings.device)
    dtype, shape = resolve_dtype(settings.dtype, device), read_config(settings)
    bits = 4 if settings.quantization is not None else dtype.itemsize * 8
    free = free_memory(device) - weight_bytes(shape, bits)
    return activation_bytes(shape, _whole(tokens), dtype.itemsize) > ACTIVATION_SHARE * free


def free_memory(device: Any) -> int:
    """Bytes that this device, or this process on a CPU, could still take."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available(), _control_group_room())


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**63  # not Linux: nothing is known, and nothing is limited
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _control_group_room() -> int:
    """What a container's limit leaves; far more than there is where there is none."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
    except OSError:
        return 2**63
    return 2**63 if limit == "max" else int(limit) - int(used)


def _with_budget(reward: Any, budget: int) -> Any:
    asks = isinstance(reward, Mapping) and reward.get("token_budget") == AUTO
    return {**reward, "token_budget": budget} if asks else reward


def _number(config: Mapping[str, Any], section: str, key: str) -> int:
    found = config.get(section)
    return _whole(found.get(key)) if isinstance(found, Mapping) else 0


def _whole(value: Any) -> int:
    """The value if it is one that a size can have; what is not is refused where the typed config is made."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
