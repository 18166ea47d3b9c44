"""Checks whether a cluster has room for the members of a run or a sweep; Ray would let them wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlft.config.cluster import ClusterConfig
from rlft.system.process.placement import place
from rlft.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a cluster can assign to members.

    Attributes:
        cpus: number of processor cores of all machines together.
        gpus: number of GPUs of each machine.
    """

    cpus: float
    gpus: Sequence[int]


def cores_of_a_member(threads: int, *, on_gpus: bool) -> int:
    """The number of cores that Ray counts for a member, which on a GPU only waits, with one core."""
    return 1 if on_gpus else threads


def check_room(
    config: ClusterConfig, has: Resources, *, on_gpus: bool, threads: int, scorers: int = 0, counts_own: bool = True
) -> None:
    """Refuses a run or sweep that the cluster is too small for.

    Args:
        config: the section `cluster`.
        has: what the cluster has.
        on_gpus: whether members need GPUs.
        threads: number of threads of each member.
        scorers: number of reward workers, each of which has a core and no GPU.
        counts_own: whether the GPU of the run's own process is one of the cluster's.

    Raises:
        UserError: the cluster is too small; the message has the numbers.
    """
    members = config.jobs if config.jobs > 1 else config.engines + config.ranks - 1
    key = "jobs" if config.jobs > 1 else "engines" if config.engines else "ranks"
    if on_gpus and config.jobs > 1:
        if members > sum(has.gpus):
            problem = f"each job that runs at a time has a GPU of its own, and the cluster has {sum(has.gpus)}"
            remedy = f"use cluster.jobs={max(1, sum(has.gpus))}"
            raise UserError("cluster.jobs", problem, got=members, remedy=remedy)
    elif on_gpus:
        place(config, on_gpus=True, available=sum(has.gpus) + (not counts_own))
        each = config.gpus_per_engine
        if (blocks := sum(gpus // each for gpus in has.gpus)) < config.engines:
            counts = ", ".join(map(str, has.gpus))
            problem = f"an engine's GPUs are on one machine; machines with {counts} GPUs have room for {blocks}"
            remedy = "use fewer GPUs for each engine, or fewer engines"
            raise UserError("cluster.gpus_per_engine", problem, got=each, remedy=remedy)
    each = cores_of_a_member(threads, on_gpus=on_gpus)
    if members * each + scorers > has.cpus:
        beside = f" beside {scorers} reward worker(s)" if scorers else ""
        needed = f"{members} processes of {each} thread(s){beside}"
        problem = f"{needed} need as many cores, and the cluster has {has.cpus:g}"
        fewer = "" if on_gpus else ", or fewer threads each (OMP_NUM_THREADS)"
        raise UserError(
            f"cluster.{key}",
            problem,
            got=getattr(config, key),
            remedy=f"use at most {max(0, int(has.cpus) - scorers) // each} in all{fewer}",
        )
