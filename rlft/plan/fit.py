"""Finds the changes of keys with which a run fits into a device's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rlft.generation.engine import Engine
from rlft.generation.memory import ModelSizes, peak
from rlft.plan.memory_parts import Demand, memory_shortfall, parts, teacher_memory
from rlft.plan.teacher_memory import TEACHER_SHARE, TeacherDemand

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Keys to change, their new values, and the peak of memory that the run would then have."""

    changes: Mapping[str, str]
    peak: int

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.changes.items())


def in_words(size: int) -> str:
    """A size in GiB or MiB, for people.

    >>> in_words(1610612736), in_words(3 * 2**20)
    ('1.50 GiB', '3 MiB')
    """
    return f"{size / GIB:,.2f} GiB" if size >= GIB // 10 else f"{size / 2**20:,.0f} MiB"


def remedies(model: ModelSizes, demand: Demand, process: int, limit: int) -> list[Remedy]:
    """Changes of one key, each of which makes the run fit; if none does, a change of several keys, or nothing."""
    fitting = [remedy for remedy in _single(model, demand, process, limit) if remedy is not None]
    if fitting:
        return fitting
    longest = demand.prompt_tokens + demand.completion_tokens
    changes = {"token_budget": str(longest), "model.gradient_checkpointing": "true"}
    smallest = replace(demand, token_budget=longest, recompute=True)
    if demand.engine is not None:
        changed: dict[str, Any] = {}
        for engine in _smaller_engines(model, smallest, process, limit):
            changed |= _changed_fields(demand.engine, engine)
        smallest = replace(smallest, engine=replace(demand.engine, **changed))
        changes |= _as_keys(demand, smallest)
    several = Remedy(changes=changes, peak=peak(parts(model, smallest, process)))
    return [several] if several.peak <= limit and not memory_shortfall(model, smallest) else []


def _single(model: ModelSizes, demand: Demand, process: int, limit: int) -> Iterator[Remedy | None]:
    """Changes of one key; None for a change with which the run does not fit or its engine does not start."""

    def remedy(key: str, value: str, changed: Demand, sizes: ModelSizes = model) -> Remedy | None:
        needed = peak(parts(sizes, changed, process))
        fits = needed <= limit and not memory_shortfall(sizes, changed)
        return Remedy(changes={key: value}, peak=needed) if fits else None

    budget = largest_budget(model, demand, process, limit)
    if budget is not None and budget < demand.token_budget:
        yield remedy("token_budget", str(budget), replace(demand, token_budget=budget))
    if not demand.recompute:
        yield remedy("model.gradient_checkpointing", "true", replace(demand, recompute=True))
    for engine in _smaller_engines(model, demand, process, limit):
        smaller = replace(demand, engine=engine)
        [(key, value)] = _as_keys(demand, smaller).items()
        yield remedy(key, value, smaller)
    for teacher in _other_teachers(model, demand, process, limit):
        yield remedy(TEACHER_SHARE, f"{teacher.share:g}", replace(demand, teacher=teacher))
    if demand.sharded is False and demand.device == "cuda":
        yield remedy("cluster.shard_base", "true", replace(demand, sharded=True))
    if model.itemsize == 4 and not demand.whole_model:
        half = replace(model, itemsize=2, base_bytes=model.base_bytes // 2)
        yield remedy("model.dtype", "bfloat16", demand, half)


def _smaller_engines(model: ModelSizes, demand: Demand, process: int, limit: int) -> Iterator[Engine]:
    """The engine with one key made smaller at a time."""
    if demand.engine is not None:
        rest = peak(parts(model, replace(demand, engine=None), process))
        room = max(0, limit - rest) // max(1, demand.engines_apart)
        yield from demand.engine.smaller(model, demand.load, room)


def _other_teachers(model: ModelSizes, demand: Demand, process: int, limit: int) -> Iterator[TeacherDemand]:
    """The teacher with another share of the device."""
    teacher_bytes = sum(part.bytes for part in teacher_memory(demand).parts if part.key == TEACHER_SHARE)
    if demand.teacher is not None and teacher_bytes:
        rest = peak(parts(model, demand, process)) - teacher_bytes
        yield from demand.teacher.other_shares(demand.device_memory, max(0, limit - rest))


def _changed_fields(before: Engine, after: Engine) -> dict[str, Any]:
    names = (field.name for field in fields(before))
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def _as_keys(before: Demand, after: Demand) -> dict[str, str]:
    """{key: value as it is typed on the command line} of the engine's changed keys."""
    if before.engine is None or after.engine is None:
        return {}
    changed = _changed_fields(before.engine, after.engine)
    return {f"generation.{before.section}.{name}": _as_typed(changed[name]) for name in sorted(changed)}


def _as_typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def largest_budget(model: ModelSizes, demand: Demand, process: int, limit: int) -> int | None:
    """The largest token budget with which the run fits, a multiple of 64 or the longest row; None if none fits."""
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
