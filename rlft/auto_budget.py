"""`token_budget: auto` and `model.gradient_checkpointing: auto` on a GPU, by the numbers that `rlft plan` prints.

By the device's whole memory, not by what happens to be free, so that a resumed run comes to the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from rlft.auto import AUTO, with_budget
from rlft.demand import CUDA_CONTEXT, demand_of, sizes_of, with_vllm
from rlft.fitting import largest_budget
from rlft.footprint import Demand, ModelSizes, parts, peak
from rlft.model.backbone import resolve_device

AnyPlan = TypeVar("AnyPlan", bound=Any)


def fitted(plan: AnyPlan) -> AnyPlan:
    """The plan of a run, with what `auto` comes to on this GPU; on a CPU as it is."""
    config = plan.config
    if not (hasattr(config, "lora") and AUTO in (plan.plain.get("token_budget"), config.model.gradient_checkpointing)):
        return plan
    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return plan
    limit = torch.cuda.get_device_properties(device).total_memory
    model = sizes_of(config.model, config.lora)
    demand = with_vllm(demand_of(plan, model, False), plan, limit, absent=False)
    return settled(plan, model, demand, limit, plan.plain.get("token_budget") == AUTO)


def settled(plan: AnyPlan, model: ModelSizes, demand: Demand, limit: int, may_lower: bool) -> AnyPlan:
    """The plan for a GPU of `limit` bytes: gradient checkpointing if it does not fit without, and where `may_lower` the
    largest budget that fits, if that is less than it has; learned rewards that say auto take the same.

    Where not even the longest row fits, the budget stays as it is, and the rehearsal says what is too large.
    """
    config = plan.config
    recompute = config.model.gradient_checkpointing
    if recompute == AUTO:
        recompute = peak(parts(model, replace(demand, recompute=False), CUDA_CONTEXT)) > limit
    budget = config.token_budget
    if may_lower:
        found = largest_budget(model, replace(demand, recompute=recompute), CUDA_CONTEXT, limit)
        budget = budget if found is None else min(budget, found)
    changed: dict[str, Any] = {"model": replace(config.model, gradient_checkpointing=recompute), "token_budget": budget}
    if "reward" in plan.plain:
        changed["reward"] = with_budget(config.reward, plan.plain["reward"], budget)
    return replace(plan, config=replace(config, **changed))
