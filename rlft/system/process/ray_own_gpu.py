"""Reserves the GPU of the run's own process on a cluster that is joined, so that Ray gives it to nobody else.

Ray chooses which GPU an actor gets. So actors that do nothing are started on this machine, each with a GPU, until one
has the GPU of this process; the others are ended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlft.types import UserError

RESERVE_S = 60.0
"""Seconds that Ray may take to assign a GPU."""
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
SEES_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
KEY = "cluster.address"


class Holder:
    """An actor that has a GPU, and does nothing with it."""

    def gpu(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def is_of_a_job(environment: Mapping[str, str]) -> bool:
    """Whether this process is the entrypoint of a Ray job that has GPUs of its own (`--entrypoint-num-gpus 1`)."""
    return JOB in environment and SEES_ALL not in environment and bool(environment.get("CUDA_VISIBLE_DEVICES"))


def reserve(gpu: str, node: str, timeout_s: float = RESERVE_S) -> Any | None:
    """The actor that holds this GPU; None if Ray has no such GPU on this machine to give out.

    Args:
        gpu: as CUDA_VISIBLE_DEVICES names it.
        node: Ray's id of this machine.
        timeout_s: seconds that Ray may take to assign a GPU.

    Raises:
        UserError: by cluster.address: others use the GPUs of this machine, or Ray names them in another way.
    """
    import ray

    [gpus] = [int(machine["Resources"].get("GPU", 0)) for machine in ray.nodes() if machine["NodeID"] == node]
    holders: list[Any] = []
    names: list[str] = []
    try:
        for _ in range(gpus):
            holders.append(_holder_on(node))
            names.append(_gpu_of(holders[-1], gpu, names, timeout_s))
            if names[-1] == gpu:
                return holders.pop()
    finally:
        for holder in holders:
            with suppress(Exception):  # Ray may have ended
                ray.kill(holder, no_restart=True)
    if any(name.isdigit() != gpu.isdigit() for name in names):
        problem = f"Ray names the GPUs of this machine {', '.join(names)}, and this process has GPU {gpu}"
        remedy = "start Ray and the run with CUDA_VISIBLE_DEVICES of one kind, numbers or ids"
        raise UserError(KEY, problem, got=gpu, remedy=remedy)
    return None


def _holder_on(node: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    actor: Any = ray.remote(Holder)
    return actor.options(num_cpus=0, num_gpus=1, max_restarts=0, scheduling_strategy=on_node).remote()


def _gpu_of(holder: Any, gpu: str, others: list[str], timeout_s: float) -> str:
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return ray.get(holder.gpu.remote(), timeout=timeout_s)
    except GetTimeoutError:
        free = f"only {', '.join(others)}" if others else "no GPU"
        problem = f"GPU {gpu} of the run's own process is not free: in {timeout_s:g} s Ray has given out {free} here"
        remedy = "end what uses it, or submit the run as a Ray job with a GPU of its own (--entrypoint-num-gpus 1)"
        raise UserError(KEY, problem, got=gpu, remedy=remedy) from None
