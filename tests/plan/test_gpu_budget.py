"""`token_budget: auto` on a GPU: lowered to what its memory holds, by the plan's own numbers, else left alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlft.config.compose import compose
from rlft.config.resolved import GPU_TOKENS, resolve
from rlft.generation.memory import peak
from rlft.plan import gpu_budget, memory_demand
from rlft.plan.gpu_budget import fit_to_device
from rlft.plan.memory_demand import CUDA_CONTEXT, on_a_gpu, sizes_of
from rlft.plan.memory_parts import parts

WORDS = (
    "+recipe=grpo_arithmetic",
    "model.device=cpu",
    "data.size=64",
    "data.held_out_size=32",
    "generation=transformers",
)


@pytest.fixture
def on_gpu(monkeypatch):
    """Plans are made here and sized as if for a GPU of so many bytes, on which `auto` would be its budget."""

    def of(num_bytes: int, *words: str):
        plan = resolve(compose([*WORDS, *words])).plan()
        if plan.plain["token_budget"] == "auto":
            plan = replace(plan, config=replace(plan.config, token_budget=GPU_TOKENS))
        for module in (gpu_budget, memory_demand):
            monkeypatch.setattr(module, "resolve_device", lambda name: torch.device("cuda"))
        properties = SimpleNamespace(total_memory=num_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return plan

    return of


def needed(plan, budget: int, recompute: bool) -> int:
    model = sizes_of(plan.config.model, plan.config.lora)
    asked = on_a_gpu(plan.demand(model, recompute), plan, 0, absent=False)
    return peak(parts(model, replace(asked, token_budget=budget), CUDA_CONTEXT))


def test_a_large_gpu_keeps_its_budget(on_gpu):
    found = fit_to_device(on_gpu(80 * 2**30)).config
    assert (found.token_budget, found.model.gradient_checkpointing) == (GPU_TOKENS, False)


@pytest.mark.parametrize("checkpointing", ["auto", "false"])
def test_a_small_one_takes_the_largest_that_fits(checkpointing, on_gpu):
    words, recompute = f"model.gradient_checkpointing={checkpointing}", checkpointing == "auto"
    plan = on_gpu(0, words)
    limit = (needed(plan, GPU_TOKENS, recompute) + needed(plan, 512, recompute)) // 2
    found = fit_to_device(on_gpu(limit, words)).config.token_budget
    group = 22 + 8 * 48
    assert group < found < GPU_TOKENS
    assert needed(plan, found, recompute) <= limit < needed(plan, found + 64 + group, recompute)
    assert fit_to_device(on_gpu(limit, words)).config.model.gradient_checkpointing is recompute


def test_a_number_that_a_user_gave_is_kept_and_so_is_a_cpus(on_gpu, monkeypatch):
    assert fit_to_device(on_gpu(600 * 2**20, "token_budget=9000")).config.token_budget == 9000
    monkeypatch.setattr(gpu_budget, "resolve_device", lambda name: torch.device("cpu"))
    plan = resolve(compose([*WORDS])).plan()
    assert fit_to_device(plan) is plan


def test_where_nothing_fits_the_rehearsal_is_to_say_so(on_gpu):
    found = fit_to_device(on_gpu(300 * 2**20)).config
    assert (found.token_budget, found.model.gradient_checkpointing) == (GPU_TOKENS, True)


def test_a_learned_reward_that_says_auto_takes_the_lowered_budget_and_one_with_a_number_keeps_it(on_gpu):
    words = ("reward=[exact_match,learned]", "reward_model.refresh_every=5", "reward_model.labels=exact_match")
    plan = on_gpu(0, *words)
    limit = (needed(plan, GPU_TOKENS, True) + needed(plan, 512, True)) // 2
    found = fit_to_device(on_gpu(limit, *words)).config
    assert found.token_budget < GPU_TOKENS
    assert found.reward["learned"]["token_budget"] == found.token_budget
    assert "token_budget" not in found.reward["exact_match"]
    kept = fit_to_device(on_gpu(limit, *words, "reward.learned.token_budget=700")).config
    assert kept.reward["learned"]["token_budget"] == 700
