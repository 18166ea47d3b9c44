"""Makes a run fit the memory of its devices: values of `auto`, places of engines and ranks, keys to change.

All by the numbers of `rlft plan`, which depend on the whole memory of a device, not on what happens to be free, so that
a resumed run gets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch

from rlft.config.model import LESS_MEMORY, Recompute
from rlft.config.resolved import with_number
from rlft.config.schema import AUTO, RunConfig, section_of
from rlft.generation.engine import Engine
from rlft.generation.memory import TEACHER_SHARE, ModelSizes, in_words, peak
from rlft.model.activations import activation_bytes
from rlft.plan.demand import Demand, TeacherDemand
from rlft.plan.memory_parts import engine_memory, memory_shortfall, parts, teacher_memory
from rlft.plan.model_rules import settle_engine
from rlft.plan.rules import why_whole
from rlft.plan.run_plan import Plan
from rlft.plan.sizes import CUDA_CONTEXT, on_a_gpu, sizes_of
from rlft.plan.train_plan import TrainPlan
from rlft.system.device import has_own_memory, resolve_device, total_bytes
from rlft.system.process.placement import GpuMemory, place
from rlft.types import UserError

CHECKPOINTING = "model.gradient_checkpointing"
SHARE = 0.5  # of the memory that is free after loading the weights: larger activations are recomputed
LOWERED_TOKENS = 4096  # to so many in a forward-backward `auto` lowers the budget before it recomputes activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Keys to change, their new values, and the peak of memory that the run would then have."""

    changes: Mapping[str, str]
    peak: int

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.changes.items())


def remedies(model: ModelSizes, demand: Demand, process: int, limit: int) -> list[Remedy]:
    """Changes of one key, each of which makes the run fit; if none does, a change of several keys, or nothing."""
    fitting = [remedy for remedy in _single(model, demand, process, limit) if remedy is not None]
    if fitting:
        return fitting
    return next(
        ([found] for how in _less_memory(demand) if (found := _several(model, demand, process, limit, how))), []
    )


def _less_memory(demand: Demand) -> Sequence[Recompute]:
    """What gradient checkpointing may compute again on the demand's device, the least first."""
    return LESS_MEMORY if demand.device == "cuda" else LESS_MEMORY[:1]


def _several(model: ModelSizes, demand: Demand, process: int, limit: int, how: Recompute) -> Remedy | None:
    """All keys at once, with this gradient checkpointing; None if the run does not fit even so."""
    longest = demand.rows.tokens
    changes = {"token_budget": str(longest), CHECKPOINTING: _as_typed(how)} if demand.trains else {}
    smallest = replace(demand, token_budget=longest, recompute=how)
    if demand.engine is not None:
        changed: dict[str, Any] = {}
        for engine in _smaller_engines(model, smallest, process, limit):
            changed |= _changed_fields(demand.engine, engine)
        smallest = replace(smallest, engine=replace(demand.engine, **changed))
        changes |= _as_keys(demand, smallest)
    found = Remedy(changes=changes, peak=peak(parts(model, smallest, process)))
    return found if found.peak <= limit and not memory_shortfall(model, smallest) else None


def _single(model: ModelSizes, demand: Demand, process: int, limit: int) -> Iterator[Remedy | None]:
    """Changes of one key; None for a change with which the run does not fit or its engine does not start."""

    def remedy(key: str, value: str, changed: Demand, sizes: ModelSizes = model) -> Remedy | None:
        needed = peak(parts(sizes, changed, process))
        fits = needed <= limit and not memory_shortfall(sizes, changed)
        return Remedy(changes={key: value}, peak=needed) if fits else None

    budget = largest_budget(model, demand, process, limit)
    if budget is not None and budget < demand.token_budget:
        yield remedy("token_budget", str(budget), replace(demand, token_budget=budget))
    yield next((way for way in _fewer_groups(demand, remedy) if way is not None), None)
    less = _less_memory(demand)
    further = less[less.index(demand.recompute) + 1 :] if demand.recompute in less else less
    ways = (remedy(CHECKPOINTING, _as_typed(how), replace(demand, recompute=how)) for how in further)
    yield next((way for way in ways if way is not None), None)
    for engine in _smaller_engines(model, demand, process, limit):
        smaller = replace(demand, engine=engine)
        [(key, value)] = _as_keys(demand, smaller).items()
        yield remedy(key, value, smaller)
    for teacher in _other_teachers(model, demand, process, limit):
        yield remedy(TEACHER_SHARE, f"{teacher.share:g}", replace(demand, teacher=teacher))
    if demand.ranks.sharded is False and demand.device != "cpu":
        yield remedy("cluster.shard_base", "true", replace(demand, ranks=replace(demand.ranks, sharded=True)))
    if model.itemsize == 4 and not demand.networks.whole_model:
        half = replace(model, itemsize=2, base_bytes=model.base_bytes // 2)
        yield remedy("model.dtype", "bfloat16", demand, half)


def _fewer_groups(demand: Demand, remedy: Callable[..., Remedy | None]) -> Iterator[Remedy | None]:
    """A half, a quarter .. of a step's groups, as long as each optimizer batch has whole ones; not where there are
    several lanes, which share them."""
    rows, ranks = demand.rows, demand.ranks
    groups, update_groups = rows.number // rows.group, rows.in_update // rows.group
    while ranks.number == ranks.gradients == 1 and groups % 2 == update_groups % 2 == 0:
        groups, update_groups = groups // 2, update_groups // 2
        yield remedy(rows.key, str(groups), demand.with_groups(groups))


def _smaller_engines(model: ModelSizes, demand: Demand, process: int, limit: int) -> Iterator[Engine]:
    """The engine with one key made smaller at a time."""
    if demand.engine is not None:
        rest = peak(parts(model, replace(demand, engine=None), process))
        room = max(0, limit - rest) // max(1, demand.work.apart)
        yield from demand.engine.smaller(model, demand.load, room)


def _other_teachers(model: ModelSizes, demand: Demand, process: int, limit: int) -> Iterator[TeacherDemand]:
    """The teacher with another share of the device."""
    memory = teacher_memory(demand)
    teacher_bytes = sum(part.bytes for part in memory.parts if part.key == TEACHER_SHARE)
    if demand.teacher is not None and (teacher_bytes or memory.lacks):
        rest = peak(parts(model, demand, process)) - teacher_bytes
        yield from demand.teacher.other_shares(demand.teacher_load, max(0, limit - rest))


def _changed_fields(before: Engine, after: Engine) -> dict[str, Any]:
    names = (field.name for field in fields(before))
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def _as_keys(before: Demand, after: Demand) -> dict[str, str]:
    """{key: value as it is typed on the command line} of the engine's changed keys."""
    if before.engine is None or after.engine is None:
        return {}
    changed = _changed_fields(before.engine, after.engine)
    return {f"generation.{before.work.section}.{name}": _as_typed(changed[name]) for name in sorted(changed)}


def _as_typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def largest_budget(model: ModelSizes, demand: Demand, process: int, limit: int) -> int | None:
    """The largest token budget with which the run fits, a multiple of 64 or the longest row; None if none fits."""
    longest = demand.rows.tokens

    def fits(budget: int) -> bool:
        return peak(parts(model, replace(demand, token_budget=budget), process)) <= limit

    if not fits(longest):
        return None
    low, high = longest, max(longest, demand.token_budget)
    while high - low > 64:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high if fits(high) else max(longest, low // 64 * 64)


MORE_RANKS = (2, 4, 8, 16, 32, 64)  # what a refusal may suggest


def placed_here(plan: Plan) -> Plan:
    """The plan of a run that starts now, with its placement on the GPUs of this machine, or of the cluster it joins."""
    if not isinstance(plan, TrainPlan):
        return plan
    device = resolve_device(plan.config.model.device)
    if device.type != "cuda":
        return with_placement(plan, None, None)
    gpu_bytes = total_bytes(device)
    model = sizes_of(plan.config.model, plan.config.lora)
    check_base(plan.config, model, gpu_bytes)
    available = None if plan.config.cluster.is_joined else torch.cuda.device_count()
    return with_placement(plan, model, gpu_bytes, available=available)


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


def with_placement(
    plan: Plan, model: ModelSizes | None, gpu: int | None, *, available: int | None = None, absent: bool = False
) -> Plan:
    """The plan with its placement, where processes other than the run's own sample or train; else the plan itself.

    Args:
        model: the sizes of its base; None on a CPU.
        gpu: bytes of a GPU's memory; None where engines and ranks are on a CPU.
        available: number of GPUs; None if it is not known.
        absent: whether the GPUs are in other machines, perhaps of a cluster that this machine does not belong to.
    """
    if not isinstance(plan, TrainPlan) or (not plan.config.cluster.engines and plan.config.cluster.ranks == 1):
        return plan
    cluster, lag, pair, alone = plan.config.cluster, plan.config.overlap.lag, None, None
    if model is not None and gpu is not None and cluster.engines:
        pair, alone = gpu_memory(plan, model, gpu, absent=absent)
    placement = place(cluster, on_gpus=gpu is not None, available=available, lag=lag, pair=pair, alone=alone)
    return replace(plan, placement=placement)


def context_bytes(plan: Plan) -> int:
    """Bytes of the CUDA contexts on the trainer's GPU: two where an engine in another process shares the GPU."""
    placement = plan.placement if isinstance(plan, TrainPlan) else None
    is_shared = placement is not None and placement.kind == "pairs" and bool(placement.engines)
    return 2 * CUDA_CONTEXT if is_shared else CUDA_CONTEXT


def gpu_memory(plan: TrainPlan, model: ModelSizes, gpu: int, *, absent: bool) -> tuple[GpuMemory, GpuMemory]:
    """(memory of an engine with a rank on one GPU, of an engine alone), where `auto` keys take the least."""
    config = plan.config
    recompute = True if config.model.gradient_checkpointing == AUTO else config.model.gradient_checkpointing
    demand = on_a_gpu(replace(plan, placement=None).demand(model, recompute), plan, gpu, absent=absent)
    if plan.plain.get("token_budget") == AUTO:
        demand = replace(demand, token_budget=demand.rows.tokens)
    of_both = peak(parts(model, demand, 2 * CUDA_CONTEXT))
    of_one, each = _of_an_engine(plan, model, demand), " each" * (config.cluster.gpus_per_engine > 1)
    return (
        GpuMemory(needed=of_both, gpu=gpu, text=f"{in_words(of_both)} of {in_words(gpu)}"),
        GpuMemory(needed=of_one, gpu=gpu, text=f"{in_words(of_one)} of {in_words(gpu)}{each}"),
    )


def _of_an_engine(plan: TrainPlan, model: ModelSizes, demand: Demand) -> int:
    """Bytes that an engine with GPUs of its own takes on each of them: they divide weights and keys among them."""
    gpus = plan.config.cluster.gpus_per_engine
    divided = ("parameters", "base_bytes", "key_size", "linear")
    share = replace(model, **{name: getattr(model, name) // gpus for name in divided})
    assert demand.engine is not None, "it is placed"
    engine_bytes = sum(part.bytes for part in engine_memory(share, demand).parts)
    return CUDA_CONTEXT + engine_bytes + demand.engine.on_trainers_base * share.base_bytes


def needs_checkpointing(config: Any, tokens: int, itemsize: int, free: int, **layers: Any) -> bool:
    """Whether activations (as `activation_bytes`) exceed SHARE of the free bytes without checkpointing."""
    return activation_bytes(config, tokens, itemsize, **layers) > SHARE * free


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def fit_to_device(plan: AnyPlan) -> AnyPlan:
    """The plan of a run with the values of `auto` for this GPU, if it is one, and with its engines and ranks placed."""
    plan = settled_here(cast(AnyPlan, placed_here(plan)))
    config = plan.config
    is_auto = hasattr(config, "lora") and AUTO in (plan.plain.get("token_budget"), config.model.gradient_checkpointing)
    found = planned_here(plan) if is_auto else None
    return plan if found is None else resolve_auto(plan, *found, plan.plain.get("token_budget") == AUTO)


def planned_here(plan: Plan) -> tuple[ModelSizes, Demand, int] | None:
    """(sizes of the base, what the run asks of this GPU, its bytes); None on a CPU, or if the plan does not say."""
    device = resolve_device(plan.config.model.device)
    if not has_own_memory(device):
        return None
    model, limit = sizes_of(plan.config.model, plan.lora_settings), total_bytes(device)
    demand = plan.demand(model, False)
    return None if demand is None else (model, on_a_gpu(demand, plan, limit, absent=False), limit)


def settled_here(plan: AnyPlan) -> AnyPlan:
    """The plan of a run that starts now, with its engine settled for this machine."""
    return plan if plan.engine is None else settled(plan, plan.engine, lambda: planned_here(plan))


def settled(
    plan: AnyPlan, name: str, planned: Callable[[], tuple[ModelSizes, Demand, int] | None], device: str | None = None
) -> AnyPlan:
    """The plan whose engine of this name is settled (`settle_engine`), also in the config that the run records.

    It fits if nothing has to be done that takes time: activations are not computed again, and the budget is at least
    LOWERED_TOKENS. `planned` gives what `planned_here` does. Engines in other processes have no base next to them.
    """
    config, section, is_auto = plan.config, section_of(name), plan.plain.get("token_budget") == AUTO

    def fits(engine: Engine) -> bool:
        if (found := planned()) is None:
            return True
        model, demand, memory = found
        budget = min(demand.token_budget, max(LOWERED_TOKENS, demand.rows.tokens)) if is_auto else demand.token_budget
        demand = replace(demand, engine=engine, token_budget=budget)
        return peak(parts(model, demand, context_bytes(plan))) <= memory and not memory_shortfall(model, demand)

    lora = None if getattr(getattr(config, "cluster", None), "engines", 0) else plan.lora_settings
    generation = settle_engine(config.generation, name, lora, config.model, device=device, fits=fits)
    changed = _changed_fields(config.generation.named(name), generation.named(name))
    recorded = plan.plain.get("generation", {})
    plain = {**plan.plain, "generation": {**recorded, section: {**recorded.get(section, {}), **changed}}}
    return replace(plan, config=replace(config, generation=generation), plain=plain) if changed else plan


def resolve_auto(plan: AnyPlan, model: ModelSizes, demand: Demand, memory: int, may_lower: bool) -> AnyPlan:
    """The plan for a GPU: with a token budget that fits; with gradient checkpointing where LOWERED_TOKENS need it, and
    as much of it as the longest row needs.

    Learned rewards whose budget is `auto` get the same one. If not even the longest row fits, the budget stays, and the
    rehearsal says what is too large. `memory` is the GPU's, in bytes.
    """
    config, process = plan.config, context_bytes(plan)
    budget, recompute = config.token_budget, config.model.gradient_checkpointing
    if recompute == AUTO:  # it makes a step a third longer, and smaller products do not, down to LOWERED_TOKENS
        longest = demand.rows.tokens

        def fits(how: Recompute, at_least: int) -> bool:
            lowest = min(budget, max(at_least, longest)) if may_lower else budget
            return peak(parts(model, replace(demand, token_budget=lowest, recompute=how), process)) <= memory

        less = _less_memory(demand)
        recompute = not fits(False, LOWERED_TOKENS) and next((how for how in less if fits(how, 0)), True)
    if may_lower:
        largest = largest_budget(model, replace(demand, recompute=recompute), process, memory)
        budget = budget if largest is None else min(budget, largest)
    config = replace(config, model=replace(config.model, gradient_checkpointing=recompute))
    return replace(plan, config=with_number(config, plan.plain, budget))
