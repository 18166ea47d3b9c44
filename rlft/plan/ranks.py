"""Refusals about ranks and a warning about engines, from the config alone."""

from __future__ import annotations

from rlft.config.schema import RunConfig
from rlft.config.trainer import ClusterConfig
from rlft.generation.engine import Engine
from rlft.generation.pool import units_of
from rlft.types import UserError


def check_ranks(cluster: ClusterConfig) -> None:
    """Refuses a number of ranks among which the lanes cannot be divided evenly."""
    lanes = cluster.num_lanes
    if lanes % cluster.ranks:
        divisors = ", ".join(str(divisor) for divisor in range(1, lanes + 1) if lanes % divisor == 0)
        raise UserError(
            "cluster.ranks",
            f"does not divide cluster.lanes={lanes}, which a run keeps from its first step",
            got=cluster.ranks,
            remedy=f"use one of {divisors}, or begin a run with other lanes",
        )


def idle_engines(cluster: ClusterConfig, name: str, engine: Engine, num_prompts: int, group_size: int) -> str | None:
    """A warning that a step has fewer parts than there are engines; None where every engine gets one.

    Args:
        cluster: the `cluster` section of the config.
        name: the engine's section in `generation`.
        engine: the engine.
        num_prompts: number of prompts in a step.
        group_size: number of completions of each prompt.
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


def check_shard_base(config: RunConfig) -> None:
    """Refuses cluster.shard_base where every rank needs the whole base."""
    if config.cluster.shard_base and (why := why_whole(config)) is not None:
        problem, remedy = why
        raise UserError("cluster.shard_base", problem, got="true", remedy=f"{remedy}, or leave it out")


def why_whole(config: RunConfig) -> tuple[str, str] | None:
    """Why ranks cannot divide the layers of this run's base, and what to change; None where they can."""
    if not config.cluster.engines:
        return "an engine in the run's own process needs the whole base", "set cluster.engines=1 or more"
    if config.cluster.num_lanes == 1:  # the policy then learns on sums of base and adapter, which need all weights
        return "is for ranks that share lanes, and there is one lane", "set cluster.ranks=2 or cluster.lanes=2, or more"
    if config.model.quantization is not None:
        return "layers in 4 bits are not divided", "set model.quantization=null"
    if config.lora.use_dora:
        return "DoRA asks for the lengths of all weights before there are ranks", "set lora.use_dora=false"
    return None
