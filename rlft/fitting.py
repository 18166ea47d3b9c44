"""Whether a run fits into a device's memory, and which key to change by how much where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlft.footprint import Demand, ModelSizes, Sampled, parts, peak

GIB = 2**30
LEAST_SHARE = 0.1  # of a device, in which an engine can still do something


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Keys to change, with their values, and what the run would take with them."""

    changes: Mapping[str, str]
    peak: int

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.changes.items())


def in_words(size: int) -> str:
    """A size for people.

    >>> in_words(1610612736), in_words(3 * 2**20)
    ('1.50 GiB', '3 MiB')
    """
    return f"{size / GIB:,.2f} GiB" if size >= GIB // 10 else f"{size / 2**20:,.0f} MiB"


def ways(model: ModelSizes, demand: Demand, process: int, limit: int) -> list[Way]:
    """Changes of one key that would each make the run fit; where none does, the least that fits, or nothing."""
    fitting = [way for way in _single(model, demand, process, limit) if way.peak <= limit]
    if fitting:
        return fitting
    longest = demand.prompt_tokens + demand.completion_tokens
    changes = {"token_budget": str(longest), "model.gradient_checkpointing": "true"}
    smallest = replace(demand, token_budget=longest, recompute=True)
    if demand.sampled:
        fewest, group = _a_group_at_a_time(demand)
        smallest = replace(smallest, sampled=tuple(replace(one, weights="apart") for one in fewest))
        changes |= {"generation.transformers.batch_size": str(group), "generation.transformers.weights": "apart"}
    least = Way(changes=changes, peak=peak(parts(model, smallest, process)))
    return [least] if least.peak <= limit else []


def _single(model: ModelSizes, demand: Demand, process: int, limit: int) -> Iterator[Way]:
    def way(key: str, value: str, changed: Demand, sizes: ModelSizes = model) -> Way:
        return Way(changes={key: value}, peak=peak(parts(sizes, changed, process)))

    budget = largest_budget(model, demand, process, limit)
    if budget is not None and budget < demand.token_budget:
        yield way("token_budget", str(budget), replace(demand, token_budget=budget))
    if not demand.recompute:
        yield way("model.gradient_checkpointing", "true", replace(demand, recompute=True))
    if any(one.weights == "merged" for one in demand.sampled):
        apart = replace(demand, sampled=tuple(replace(one, weights="apart") for one in demand.sampled))
        yield way("generation.transformers.weights", "apart", apart)
    if any(one.prompts > 1 for one in demand.sampled):
        fewest, group = _a_group_at_a_time(demand)
        yield way("generation.transformers.batch_size", str(group), replace(demand, sampled=fewest))
    if demand.engine:
        beside = peak(parts(model, replace(demand, engine=0), process))
        share = int(100 * (limit - beside) / limit) / 100
        if share >= LEAST_SHARE and share * limit < demand.engine and not demand.engine_sleeps:
            smaller = replace(demand, engine=int(share * limit))
            yield way("generation.vllm.gpu_memory_utilization", f"{share:g}", smaller)
        if not demand.engine_sleeps:
            yield way("generation.vllm.sleep", "true", replace(demand, engine_sleeps=True))
    if model.itemsize == 4 and not demand.whole_model:
        half = replace(model, itemsize=2, base_bytes=model.base_bytes // 2)
        yield way("model.dtype", "bfloat16", demand, half)


def _a_group_at_a_time(demand: Demand) -> tuple[tuple[Sampled, ...], int]:
    """What is decoded with the smallest batch size that holds every group, and that batch size."""
    size = max(one.rows // one.prompts for one in demand.sampled)
    fewest = []
    for one in demand.sampled:
        group = one.rows // one.prompts
        prompts = min(one.prompts, size // group)
        fewest.append(replace(one, rows=prompts * group, prompts=prompts))
    return tuple(fewest), size


def largest_budget(model: ModelSizes, demand: Demand, process: int, limit: int) -> int | None:
    """The largest token budget with which the run fits, a multiple of 64 or the longest row; None: there is none."""
    longest = demand.prompt_tokens + demand.completion_tokens

    def fits(budget: int) -> bool:
        return peak(parts(model, replace(demand, token_budget=budget), process)) <= limit

    if not fits(longest):
        return None
    low, high = longest, max(longest, demand.token_budget)
    while high - low > 64:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high if fits(high) else max(longest, low // 64 * 64)
