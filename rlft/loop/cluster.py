"""Opens what a run has in other processes: engines, ranks and reward workers; and says which GPUs each gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlft.config.model import ModelConfig
from rlft.config.schema import RunConfig
from rlft.config.trainer import ClusterConfig
from rlft.environment.protocol import Environment
from rlft.generation.engine import units_of
from rlft.generation.pool import EnginePool
from rlft.plan.train_plan import TrainPlan
from rlft.reward.workers.pool import ClusterPool
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.system.device import resolve_device
from rlft.system.process.launcher import open_launcher
from rlft.system.process.placement import Placement, all_gpus
from rlft.system.process.worker import Launcher, Worker, WorkerSpec
from rlft.trainer.local import LocalTrainer
from rlft.trainer.ranked_trainer import RankedTrainer, Trainer
from rlft.trainer.ranks import LaneShare

ENGINE, RANK = "rlft.loop.workers:EngineWorker", "rlft.loop.workers:RankWorker"
NOT_BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Engines of vLLM on a CPU would all bind their threads to the same cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks 1, 2, .. besides the run's own process, which load their bases while this one loads its own."""

    launcher: Launcher
    specs: Sequence[WorkerSpec]
    workers: Sequence[Worker]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What a run has in other processes; None where it has none."""

    # The engines. Those that have GPUs of their own, or none, still start: they load their bases while this process
    # loads its own.
    pool: EnginePool | None = None
    ranks: Ranks | None = None
    open_rewards: Callable[[Sequence[RewardSpec]], ClusterPool] | None = None


@contextmanager
def open_workers(plan: TrainPlan, folder: Path, note: Callable[[str], None], *, has_ranks: bool) -> Iterator[Workers]:
    """Starts engines and ranks in other processes as far as the plan has any; they end afterwards.

    note: called with a line when a worker is replaced. has_ranks: whether the run trains, and so has ranks.
    """
    cluster = plan.config.cluster
    has_ranks = has_ranks and cluster.ranks > 1
    if not (cluster.engines or has_ranks or cluster.scoring):
        yield Workers()
        return
    with ExitStack() as stack:
        launcher, pool, ranks = stack.enter_context(opened_launcher(plan, folder)), None, None
        if cluster.engines:  # before ranks: with several GPUs each, engines are the hardest to place
            pool = open_engines(plan, launcher, note)
            stack.callback(pool.close)
            if plan.placement is not None and plan.placement.kind == "pairs":
                # vLLM measures what it takes of a GPU by what is free before and after: a base that a rank loads there
                # meanwhile would count as its own.
                pool.wait_until_started()
        if has_ranks:
            specs = rank_specs(plan)
            ranks = Ranks(launcher=launcher, specs=specs, workers=[launcher.start(spec) for spec in specs])

        def open_rewards(rewards: Sequence[RewardSpec]) -> ClusterPool:
            scoring = plan.config.scoring
            times = {"timeout_s": scoring.timeout, "answer_s": cluster.timeout}
            return ClusterPool(launcher, rewards, scoring.workers, **times, note=note)

        yield Workers(pool=pool, ranks=ranks, open_rewards=open_rewards if cluster.scoring else None)


def opened_launcher(plan: TrainPlan, folder: Path) -> AbstractContextManager[Launcher]:
    """Opens the launcher of a run's engines and ranks; it keeps the run's own GPU from them unless they share it."""
    config, device = plan.config, resolve_device(plan.config.model.device)
    on_gpus = device.type == "cuda"
    own_gpu = all_gpus(device)[0] if on_gpus else None
    scorers = config.scoring.workers if config.cluster.scoring else 0
    threads = torch.get_num_threads()
    return open_launcher(config.cluster, folder, on_gpus=on_gpus, own_gpu=own_gpu, threads=threads, scorers=scorers)


# -- engines -----------------------------------------------------------------------------------------------------------
def open_engines(plan: TrainPlan, launcher: Launcher, note: Callable[[str], None]) -> EnginePool:
    """The pool of engines; `note` is called with a line when one is replaced."""
    cluster = plan.config.cluster
    assert plan.placement is not None, "a run with engines is placed"
    engine = plan.config.generation.named(plan.engine)
    return EnginePool(
        launcher,
        engine_specs(plan.config, plan.engine, plan.placement, plan.environment, plan.images),
        unit=units_of(engine.at_once, divisible=engine.divisible, num_engines=cluster.engines),
        timeout_s=cluster.timeout,
        max_restarts=cluster.max_engine_restarts,
        note=note,
        with_rows=plan.environment is not None,
    )


def engine_specs(
    config: RunConfig, engine: str, placement: Placement, environment: Environment | None = None, images: int = 0
) -> list[WorkerSpec]:
    """The engines' specs, for prompts with at most so many images.

    Each has as many threads as this process: on a CPU the bits of a product depend on them.
    """
    cluster = config.cluster
    for_workers = replace(config, model=model_of_a_worker(config.model))
    unbound = {"gpus": 0, "environment": NOT_BOUND}
    return [
        WorkerSpec(
            name=f"engine-{number}",
            factory=ENGINE,
            arguments={"config": for_workers, "engine": engine, "environment": environment, "images": images},
            threads=torch.get_num_threads(),
            **(unbound if placement.kind == "processes" else gpus_of_a_worker(config, placement.engines[number])),
        )
        for number in range(cluster.engines)
    ]


# -- ranks -------------------------------------------------------------------------------------------------------------
def rank_specs(plan: TrainPlan) -> list[WorkerSpec]:
    """The specs of the workers that are ranks 1, 2, .., each with as many threads as this process."""
    config, cluster = plan.config, plan.config.cluster
    assert plan.placement is not None, "a run with ranks is placed"
    gpus = plan.placement.ranks
    return [
        WorkerSpec(
            name=f"rank-{rank}",
            factory=RANK,
            arguments={
                "config": replace(config, model=model_of_a_worker(config.model)),
                "rank": rank,
                "lanes": cluster.num_lanes,
                **plan.annotated,
            },
            threads=torch.get_num_threads(),
            **gpus_of_a_worker(config, gpus[rank : rank + 1]),
        )
        for rank in range(1, cluster.ranks)
    ]


def make_trainer(
    local: LocalTrainer, cluster: ClusterConfig, ranks: Ranks | None, note: Callable[[str], None], again: str | None
) -> Trainer:
    """The trainer of these ranks, of which `local` is rank 0, or `local` alone with all lanes.

    note: called with a line when a rank is replaced. again: the command that goes on from the newest checkpoint.
    """
    if ranks is None:
        local.share = LaneShare(lanes=cluster.num_lanes)
        return local
    assert again is not None, "only a run that trains has ranks"
    return RankedTrainer(
        local,
        ranks.launcher,
        ranks.specs,
        ranks.workers,
        lanes=cluster.num_lanes,
        sequence=cluster.sequence_ranks,
        timeout=cluster.timeout,
        note=note,
        again=again,
    )


# -- each worker -------------------------------------------------------------------------------------------------------
def gpus_of_a_worker(config: RunConfig, gpus: Sequence[int]) -> dict[str, Any]:
    """The fields of the `WorkerSpec` of a worker with these GPUs of the run's placement.

    A cluster that the run has joined assigns GPUs itself. Workers on this machine see theirs through environment
    variables.
    """
    device = resolve_device(config.model.device)
    if device.type != "cuda" or config.cluster.is_joined:
        return {"gpus": len(gpus) if device.type == "cuda" else 0, "environment": {}}
    names = all_gpus(device)
    return {"gpus": 0, "environment": {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus)}}


def model_of_a_worker(model: ModelConfig) -> ModelConfig:
    """The model's settings for a process that sees only its own GPUs."""
    return replace(model, device=resolve_device(model.device).type)
