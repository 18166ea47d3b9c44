"""Opens the launcher of a run's members that the section `cluster` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlft.config.cluster import ClusterConfig
from rlft.system.process.member import Launcher
from rlft.system.process.processes import LOGS, LocalProcesses
from rlft.system.process.room import check_room


@contextmanager
def open_launcher(
    config: ClusterConfig,
    folder: Path,
    *,
    on_gpus: bool = False,
    own_gpu: str | None = None,
    threads: int = 1,
    scorers: int = 0,
) -> Iterator[Launcher]:
    """Yields the launcher, and afterwards ends all that it has started. Ray is imported only for kind=ray.

    Args:
        config: the section `cluster`.
        folder: the run's folder; logs of members are in `<folder>/cluster/`.
        on_gpus: whether members need GPUs.
        own_gpu: the GPU of this process, as CUDA_VISIBLE_DEVICES names it; None if it has none. If the run joins a
            cluster, the GPU is reserved there.
        threads: number of threads of each member, except reward workers.
        scorers: number of reward workers among the members.

    Raises:
        UserError: the cluster that is joined does not answer, is too small, or others use this process's GPU.
    """
    launcher: Launcher = LocalProcesses(folder)
    if config.kind == "ray":
        launcher = _ray(config, folder, own_gpu, {"on_gpus": on_gpus, "threads": threads, "scorers": scorers})
    try:
        yield launcher
    finally:
        launcher.close()


def _ray(config: ClusterConfig, folder: Path, own_gpu: str | None, needs: Mapping[str, Any]) -> Launcher:
    """The launcher of Ray's actors, on a cluster that has room for `needs`, the arguments of `check_room`."""
    from rlft.system.process.ray_actors import RayActors
    from rlft.system.process.ray_session import RaySession

    session = RaySession(config.address, log=folder / LOGS / "ray.log")
    if config.is_joined:
        try:
            counts_own = own_gpu is None or session.reserve(own_gpu)
            check_room(config, session.resources, counts_own=counts_own, **needs)
        except BaseException:
            session.close()
            raise
    return RayActors(folder, session)
