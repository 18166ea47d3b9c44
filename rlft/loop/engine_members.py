"""Opens the engines of a run that are members of the cluster (`cluster.engines`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlft.config.schema import RunConfig
from rlft.environment.protocol import Environment
from rlft.generation.pool import EnginePool, units_of
from rlft.loop.engine_worker import EngineSettings
from rlft.loop.members import Gpus, gpus_of_a_member, model_of_a_member
from rlft.plan.train_plan import TrainPlan
from rlft.system.process.member import Launcher, MemberSpec
from rlft.system.process.placement import Placement

FACTORY = "rlft.loop.engine_worker:EngineWorker"


def open_engines(plan: TrainPlan, launcher: Launcher, note: Callable[[str], None]) -> EnginePool:
    """The pool of engines, which still start: they load their bases while this process loads its own.

    Args:
        plan: the planned run, with its placement.
        launcher: starts the members.
        note: called with a line when an engine is replaced.
    """
    cluster = plan.config.cluster
    assert plan.placement is not None, "a run with engines is placed"
    engine = plan.config.generation.named(plan.engine)
    return EnginePool(
        launcher,
        engine_specs(plan.config, plan.engine, plan.placement, plan.environment),
        unit=units_of(engine.at_once, divisible=engine.divisible, num_engines=cluster.engines),
        timeout_s=cluster.timeout,
        max_restarts=cluster.max_engine_restarts,
        note=note,
        with_rows=plan.environment is not None,
    )


def engine_specs(
    config: RunConfig, engine: str, placement: Placement, environment: Environment | None = None
) -> list[MemberSpec]:
    """The engines' specs, each with as many threads as this process: on a CPU the bits of a product depend on them."""
    cluster = config.cluster
    settings = EngineSettings(
        engine=engine,
        gpus=cluster.gpus_per_engine,
        model=model_of_a_member(config.model),
        lora=config.lora,
        prompts=config.prompts,
        generation=config.generation,
        token_budget=config.token_budget,
        seed=config.seed,
        environment=environment,
    )
    return [
        MemberSpec(
            name=f"engine-{number}",
            factory=FACTORY,
            arguments={"settings": settings},
            threads=torch.get_num_threads(),
            **_gpus(config, placement, number),
        )
        for number in range(cluster.engines)
    ]


def _gpus(config: RunConfig, placement: Placement, number: int) -> Gpus:
    if placement.kind == "processes":
        return {"gpus": 0, "environment": NOT_BOUND}
    return gpus_of_a_member(config, placement.engines[number])


NOT_BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Engines of vLLM on a CPU would all bind their threads to the same cores."""
