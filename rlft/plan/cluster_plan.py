"""Decides on which GPUs the engines and ranks of a planned run are, by the numbers of `rlft plan`."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlft.config.resolved import AUTO
from rlft.config.schema import RunConfig
from rlft.generation.memory import ModelSizes, peak
from rlft.model.backbone import resolve_device
from rlft.plan.fit import in_words
from rlft.plan.memory_demand import CUDA_CONTEXT, on_a_gpu, sizes_of
from rlft.plan.memory_parts import Demand, engine_memory, parts
from rlft.plan.ranks import why_whole
from rlft.plan.run_plan import Plan
from rlft.plan.train_plan import TrainPlan
from rlft.system.process.placement import GpuMemory, Placement, place
from rlft.types import UserError

MORE_RANKS = (2, 4, 8, 16, 32, 64)
"""The numbers of ranks that a refusal may suggest."""


def placed_here(plan: Plan) -> Plan:
    """The plan of a run that starts now, with its placement on the GPUs of this machine, or of the cluster it joins.

    Raises:
        UserError: the GPUs are too few or too small.
    """
    if not isinstance(plan, TrainPlan):
        return plan
    device = resolve_device(plan.config.model.device)
    if device.type != "cuda":
        return replace(plan, placement=placement_of(plan, None, None, on_gpus=False)) if has_members(plan) else plan
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    model = sizes_of(plan.config.model, plan.config.lora)
    check_base(plan.config, model, gpu_bytes)
    if not has_members(plan):
        return plan
    joined = plan.config.cluster.is_joined
    available = None if joined else torch.cuda.device_count()
    return replace(plan, placement=placement_of(plan, model, gpu_bytes, on_gpus=True, available=available))


def check_base(config: RunConfig, model: ModelSizes, gpu: int) -> None:
    """Refuses a base that does not fit on a GPU; a remedy says how much each rank would hold if it were divided."""
    ranks, sharded = config.cluster.ranks, config.cluster.shard_base
    divided = model.divided_bytes(ranks) if model.layers else model.base_bytes
    needed = divided if sharded else model.base_bytes
    if needed <= gpu:
        return
    problem = f"{'what a rank holds of ' * sharded}the base takes {in_words(needed)}, and a GPU has {in_words(gpu)}"
    if not sharded and divided <= gpu and why_whole(config) is None:
        remedy = f"set cluster.shard_base=true: each of the {ranks} ranks then holds {in_words(divided)} at most"
    elif fitting := next((n for n in MORE_RANKS if model.layers and model.divided_bytes(n) <= gpu), None):
        remedy = f"divide it: cluster.shard_base=true cluster.engines=1 cluster.ranks={fitting} (or more)"
        remedy += ", or use model.quantization=4bit" * (config.model.quantization is None)
    else:
        remedy = "use a smaller model, or model.quantization=4bit"
    raise UserError("model.path", problem, got=config.model.path, remedy=remedy)


def placed_elsewhere(plan: Plan, model: ModelSizes, gpu: int | None, *, on_gpus: bool, absent: bool) -> Plan:
    """The plan of a run that is only planned, perhaps for a cluster that this machine does not belong to.

    Args:
        plan: the plan without a placement.
        model: the sizes of its base.
        gpu: bytes of a GPU's memory; None on a CPU.
        on_gpus: whether engines and ranks are on GPUs rather than on a CPU.
        absent: whether the GPUs are in other machines.
    """
    if not isinstance(plan, TrainPlan) or not has_members(plan):
        return plan
    return replace(plan, placement=placement_of(plan, model, gpu, on_gpus=on_gpus, absent=absent))


def has_members(plan: TrainPlan) -> bool:
    """Whether processes other than the run's own sample or train."""
    return plan.config.cluster.engines > 0 or plan.config.cluster.ranks > 1


def placement_of(
    plan: TrainPlan,
    model: ModelSizes | None,
    gpu: int | None,
    *,
    on_gpus: bool,
    available: int | None = None,
    absent: bool = False,
) -> Placement:
    pair = alone = None
    if on_gpus and model is not None and gpu is not None and plan.config.cluster.engines:
        pair, alone = gpu_memory(plan, model, gpu, absent=absent)
    lag = plan.config.overlap.lag
    return place(plan.config.cluster, on_gpus=on_gpus, available=available, lag=lag, pair=pair, alone=alone)


def context_bytes(plan: Plan) -> int:
    """Bytes of the CUDA contexts on the trainer's GPU: two where an engine in another process shares the GPU."""
    placement = plan.placement if isinstance(plan, TrainPlan) else None
    is_shared = placement is not None and placement.kind == "pairs" and bool(placement.engines)
    return 2 * CUDA_CONTEXT if is_shared else CUDA_CONTEXT


def gpu_memory(plan: TrainPlan, model: ModelSizes, gpu: int, *, absent: bool) -> tuple[GpuMemory, GpuMemory]:
    """(memory that an engine and a rank take together on one GPU, memory that an engine takes alone).

    Keys that are `auto` count with the values that take the least memory.
    """
    config = plan.config
    recompute = config.model.gradient_checkpointing in (True, AUTO)
    demand = on_a_gpu(replace(plan, placement=None).demand(model, recompute), plan, gpu, absent=absent)
    if plan.plain.get("token_budget") == AUTO:
        demand = replace(demand, token_budget=demand.prompt_tokens + demand.completion_tokens)
    of_both = peak(parts(model, demand, 2 * CUDA_CONTEXT))
    return _memory(of_both, gpu, 1), _memory(_of_an_engine(plan, model, demand), gpu, config.cluster.gpus_per_engine)


def _of_an_engine(plan: TrainPlan, model: ModelSizes, demand: Demand) -> int:
    """Bytes that an engine with GPUs of its own takes on each of them: they divide weights and keys among them."""
    gpus = plan.config.cluster.gpus_per_engine
    share = replace(
        model,
        parameters=model.parameters // gpus,
        base_bytes=model.base_bytes // gpus,
        key_size=model.key_size // gpus,
        linear=model.linear // gpus,
    )
    assert demand.engine is not None, "it is placed"
    engine_bytes = sum(part.bytes for part in engine_memory(share, demand).parts)
    return CUDA_CONTEXT + engine_bytes + demand.engine.on_trainers_base * share.base_bytes


def _memory(needed: int, gpu: int, gpus: int) -> GpuMemory:
    each = " each" if gpus > 1 else ""
    return GpuMemory(needed=needed, gpu=gpu, text=f"{in_words(needed)} of {in_words(gpu)}{each}")
