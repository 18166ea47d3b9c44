"""Which GPUs engines and ranks have: in pairs, an engine and a rank on one GPU, or divided, each on its own GPUs.

Also whether a cluster has room for them; Ray would let them wait for ever.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlft.system.lazy import torch
from rlft.types import UserError, counted, require


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """The bytes that an engine needs on a GPU, alone or together with a rank, and those of the GPU; both in words."""

    needed: int
    gpu: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the workers are."""

    kind: Literal["processes", "pairs", "divided"]  # `pairs` or `divided` on GPUs, `processes` on a CPU
    reason: str  # why, for the start-up table
    gpus: int = 0  # number of GPUs that the run needs in all
    # The GPUs of each engine. GPUs are counted from that of the run's own process, which is 0.
    engines: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()  # the GPU of each rank, the first of which is the run's own process


def place(
    config: Any,  # the section `cluster`, a `rlft.config.trainer.ClusterConfig`
    *,
    on_gpus: bool,  # whether the run's model is on a GPU
    available: int | None = None,  # number of GPUs of the cluster, the run's own included; None if it is not known
    lag: int = 0,  # `overlap.lag`; if it is 1, engines need GPUs of their own
    pair: GpuMemory | None = None,  # the memory of an engine and a rank on one GPU; None if it is not known
    alone: GpuMemory | None = None,  # the memory of an engine on each of its GPUs; None if it is not known
) -> Placement:
    """The placement of a run. UserError: the GPUs are too few or too small."""
    engines, gpus_each, ranks = config.engines, config.gpus_per_engine, config.ranks
    if not on_gpus:
        if gpus_each > 1:
            remedy = "set it to 1, or run on GPUs (model.device=cuda)"
            raise UserError("cluster.gpus_per_engine", "the model is on a CPU", got=gpus_each, remedy=remedy)
        return Placement(kind="processes", reason="on the cores of the CPU")
    paired_gpus, divided_gpus = max(engines * gpus_each, ranks), engines * gpus_each + ranks
    too_large = f"an engine and a rank do not fit on one GPU: {pair.text}" if pair and pair.needed > pair.gpu else ""
    whole = "the GPUs of a cluster that is joined are given out whole" if config.is_joined else ""
    if config.placement == "pairs":
        problem = whole or too_large
        require(not problem, "cluster.placement", problem, got="pairs", remedy="use divided, or auto")
    kind, reason = config.placement, "as cluster.placement says"
    if kind == "auto":
        is_enough = available is not None and available >= divided_gpus
        why_divided = (
            "" if engines else "a GPU for each rank",
            whole,
            "overlap.lag=1 samples during the update" if lag else "",
            f"the {available} GPUs are enough for one each" if is_enough else "",
            too_large,
        )
        reason = next(filter(None, why_divided), "")
        kind = "divided" if reason else "pairs"
        together = f"; together they take {pair.text}" if pair is not None else ""
        reason = reason or f"an engine sleeps while its rank trains{together}"
    needed = paired_gpus if kind == "pairs" else divided_gpus
    if available is not None and needed > available:
        raise _too_few(config, kind, reason, needed, available)
    if kind == "divided" and engines and alone is not None:
        if alone.needed > alone.gpu:
            remedy = "give an engine more GPUs (cluster.gpus_per_engine, generation=vllm), or take larger ones"
            raise UserError("cluster.engines", f"an engine does not fit: {alone.text}", got=engines, remedy=remedy)
        reason += f"; an engine takes {alone.text}"
    # Engines come after the ranks: the run's own process is rank 0, on GPU 0.
    first = 0 if kind == "pairs" else ranks
    return Placement(
        kind=kind,
        reason=reason,
        gpus=needed,
        engines=tuple(tuple(range(first + i * gpus_each, first + (i + 1) * gpus_each)) for i in range(engines)),
        ranks=tuple(range(ranks)),
    )


def _too_few(config: Any, kind: str, reason: str, needed: int, available: int) -> UserError:
    workers = (
        f"{counted(config.engines, 'engine')} of {counted(config.gpus_per_engine, 'GPU')} "
        f"and {counted(config.ranks, 'rank')}, {kind} ({reason})"
    )
    room = available if kind == "pairs" else available - config.ranks
    most = max(0, room) // config.gpus_per_engine
    enough_for_engines = kind == "pairs" and config.engines * config.gpus_per_engine <= available
    key = "cluster.ranks" if not config.engines or enough_for_engines else "cluster.engines"
    problem = f"{workers} need {counted(needed, 'GPU')}, and the cluster has {available}"
    if key == "cluster.ranks":
        return UserError(key, problem, got=config.ranks, remedy="use fewer, or more GPUs")
    remedy = f"use at most {counted(most, 'engine')}" if most else "use fewer, or more GPUs"
    return UserError(key, problem, got=config.engines, remedy=remedy)


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(gpu) for gpu in range(torch.cuda.device_count())]


def all_gpus(own: torch.device) -> list[str]:
    """All of them, that of the run's own process first: as `Placement` counts them."""
    gpus, index = visible_gpus(), own.index or 0
    return [gpus[index], *gpus[:index], *gpus[index + 1 :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a cluster can assign to workers: the processor cores of all machines together, the GPUs of each."""

    cpus: float
    gpus: Sequence[int]


def cores_of_a_worker(threads: int, *, on_gpus: bool) -> int:
    """The number of cores that Ray counts for a worker, which on a GPU only waits, with one core."""
    return 1 if on_gpus else threads


def check_room(
    config: Any, has: Resources, *, on_gpus: bool, threads: int, scorers: int = 0, counts_own: bool = True
) -> None:
    """Refuses a run or sweep that the cluster is too small for, by a UserError with the numbers.

    Args:
        config: the section `cluster`, a `rlft.config.trainer.ClusterConfig`.
        on_gpus: whether each worker has a GPU of its own.
        threads: number of threads of each worker that is not a reward worker.
        scorers: number of reward workers, each of which has a core and no GPU.
        counts_own: whether the GPU of the run's own process is one of the cluster's.
    """
    workers = config.jobs if config.jobs > 1 else config.engines + config.ranks - 1
    key = "jobs" if config.jobs > 1 else "engines" if config.engines else "ranks"
    if on_gpus and config.jobs > 1:
        if workers > sum(has.gpus):
            problem = f"each job that runs at a time has a GPU of its own, and the cluster has {sum(has.gpus)}"
            remedy = f"use cluster.jobs={max(1, sum(has.gpus))}"
            raise UserError("cluster.jobs", problem, got=workers, remedy=remedy)
    elif on_gpus:
        place(config, on_gpus=True, available=sum(has.gpus) + (not counts_own))
        each = config.gpus_per_engine
        if (blocks := sum(gpus // each for gpus in has.gpus)) < config.engines:
            counts = ", ".join(map(str, has.gpus))
            problem = f"an engine's GPUs are on one machine; machines with {counts} GPUs have room for {blocks}"
            remedy = "use fewer GPUs for each engine, or fewer engines"
            raise UserError("cluster.gpus_per_engine", problem, got=each, remedy=remedy)
    each = cores_of_a_worker(threads, on_gpus=on_gpus)
    if workers * each + scorers > has.cpus:
        beside = f" and {counted(scorers, 'reward worker')}" if scorers else ""
        needed = f"{counted(workers, 'process')} of {counted(each, 'thread')}{beside}"
        problem = f"{needed} need as many cores, and the cluster has {has.cpus:g}"
        fewer = "" if on_gpus else ", or fewer threads each (OMP_NUM_THREADS)"
        raise UserError(
            f"cluster.{key}",
            problem,
            got=getattr(config, key),
            remedy=f"use at most {max(0, int(has.cpus) - scorers) // each} in all{fewer}",
        )
