"""What is refused about ranks, and said about engines, by the config alone."""

from __future__ import annotations

from rlft.cluster.config import ClusterConfig
from rlft.cluster.engine_pool import units_of
from rlft.generation.engine import Engine
from rlft.types import UserError


def check_ranks(cluster: ClusterConfig) -> None:
    """Refuses ranks that cannot have equally many lanes each."""
    lanes = cluster.num_lanes
    if lanes % cluster.ranks:
        divisors = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise UserError(
            "cluster.ranks",
            f"does not divide cluster.lanes={lanes}, which a run keeps from its first step",
            got=cluster.ranks,
            remedy=f"use one of {divisors}, or begin a run with other lanes",
        )


def idle_engines(cluster: ClusterConfig, name: str, engine: Engine, num_prompts: int, group_size: int) -> str | None:
    """A warning that a step has fewer parts than there are engines; None where every engine gets one.

    name: of the engine, in `generation`.
    """
    if not cluster.engines:
        return None
    size = units_of(engine.at_once, divisible=engine.divisible, num_engines=cluster.engines)(group_size, num_prompts)
    parts = -(-num_prompts // size)
    if parts >= cluster.engines:
        return None
    if num_prompts < cluster.engines:
        why, remedy = f"a step has {num_prompts} prompts", f"raise prompts_per_step, or use at most {num_prompts}"
    else:
        why = f"{engine.title} computes {engine.at_once} completions of a step together"
        remedy = f"use generation.{name}.{engine.at_once_key}={num_prompts // cluster.engines * group_size}"
    problem = f"only {parts} of them will have something to sample: {why}"
    return f"cluster.engines: {problem}, got {cluster.engines}; {remedy}"
