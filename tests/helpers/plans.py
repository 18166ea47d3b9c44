"""Plans of runs, made once for the same words, and what they count of memory."""

from functools import cache
from typing import Any

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.generation.memory import ModelSizes
from rlft.plan.demand import Demand
from rlft.plan.memory_parts import parts
from rlft.plan.sizes import sizes_of


@cache
def planned(*words: str, command: str = "train", runs_here: bool = True) -> Any:
    """The plan of a run with these words. Nobody changes it."""
    return resolve(compose(list(words), command=command), command).plan(runs_here=runs_here)


def counted(plan: Any, recompute: Any = False) -> tuple[ModelSizes, Demand]:
    """The sizes of the plan's model, and what its run asks for."""
    model = sizes_of(plan.config.model, plan.lora_settings)
    demand = plan.demand(model, recompute)
    assert demand is not None
    return model, demand


def bytes_by_part(model: ModelSizes, demand: Demand) -> dict[str, int]:
    return {part.name: part.bytes for part in parts(model, demand, 0)}


def bytes_of(*words: str, command: str = "train", recompute: Any = False) -> dict[str, int]:
    """{part of memory: its size} of the run with these words."""
    return bytes_by_part(*counted(planned(*words, command=command), recompute))
