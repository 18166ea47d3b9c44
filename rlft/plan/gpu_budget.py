"""Resolves `token_budget: auto` and `model.gradient_checkpointing: auto` on a GPU, by the numbers of `rlft plan`.

They depend on the whole memory of the device, not on what happens to be free, so that a resumed run gets the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar, cast

import torch

from rlft.config.resolved import AUTO, with_number
from rlft.generation.memory import ModelSizes, peak
from rlft.model.backbone import resolve_device
from rlft.plan.cluster_plan import context_bytes, placed_here
from rlft.plan.fit import largest_budget
from rlft.plan.memory_demand import on_a_gpu, sizes_of
from rlft.plan.memory_parts import Demand, parts
from rlft.plan.run_plan import Plan

AnyPlan = TypeVar("AnyPlan", bound=Plan)


def fit_to_device(plan: AnyPlan) -> AnyPlan:
    """The plan of a run with the values of `auto` for this GPU, and with its engines and ranks placed.

    On a CPU the values stay as they are.
    """
    plan = cast(AnyPlan, placed_here(plan))
    config = plan.config
    if not (hasattr(config, "lora") and AUTO in (plan.plain.get("token_budget"), config.model.gradient_checkpointing)):
        return plan
    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return plan
    limit = torch.cuda.get_device_properties(device).total_memory
    model = sizes_of(config.model, config.lora)
    demand = plan.demand(model, False)
    if demand is None:
        return plan
    demand = on_a_gpu(demand, plan, limit, absent=False)
    return resolve_auto(plan, model, demand, limit, plan.plain.get("token_budget") == AUTO)


def resolve_auto(plan: AnyPlan, model: ModelSizes, demand: Demand, limit: int, may_lower: bool) -> AnyPlan:
    """The plan for a GPU: with gradient checkpointing if it does not fit without, and a token budget that fits.

    Learned rewards whose budget is `auto` get the same one. If not even the longest row fits, the budget stays, and the
    rehearsal says what is too large.

    Args:
        plan: the planned run.
        model: the sizes of its base.
        demand: the memory demand of the run.
        limit: bytes of the GPU's memory.
        may_lower: whether the budget may be lowered.
    """
    config, process = plan.config, context_bytes(plan)
    recompute = config.model.gradient_checkpointing
    if recompute == AUTO:
        recompute = peak(parts(model, replace(demand, recompute=False), process)) > limit
    budget = config.token_budget
    if may_lower:
        largest = largest_budget(model, replace(demand, recompute=recompute), process, limit)
        budget = budget if largest is None else min(budget, largest)
    config = replace(config, model=replace(config.model, gradient_checkpointing=recompute))
    return replace(plan, config=with_number(config, plan.plain, budget))
