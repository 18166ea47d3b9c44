"""The launcher of a run's members, as `cluster` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlft.cluster.config import ClusterConfig
from rlft.cluster.member import Launcher
from rlft.cluster.processes import LOGS, LocalProcesses
from rlft.cluster.room import check_room


@contextmanager
def open_launcher(
    config: ClusterConfig,
    folder: Path,
    *,
    on_cards: bool = False,
    own_card: str | None = None,
    threads: int = 1,
    scorers: int = 0,
) -> Iterator[Launcher]:
    """Yields the launcher, and ends all that it has started afterwards. Ray is imported only for kind=ray.

    Args:
        folder: of the run; logs of members are in `<folder>/cluster/`.
        on_cards: whether members need cards.
        own_card: that of this process, as CUDA_VISIBLE_DEVICES names it; None if it has none. A cluster that is joined
            gives it to nobody else.
        threads: of each member but the reward workers.
        scorers: reward workers among the members.

    Raises:
        UserError: the cluster that is joined does not answer, is too small, or others have the own card.
    """
    launcher: Launcher = LocalProcesses(folder)
    if config.kind == "ray":
        launcher = _ray(config, folder, own_card, {"on_cards": on_cards, "threads": threads, "scorers": scorers})
    try:
        yield launcher
    finally:
        launcher.close()


def _ray(config: ClusterConfig, folder: Path, own_card: str | None, needs: Mapping[str, Any]) -> Launcher:
    """needs: what `check_room` looks at."""
    from rlft.cluster.ray_actors import RayActors
    from rlft.cluster.ray_session import RaySession

    session = RaySession(config.address, log=folder / LOGS / "ray.log")
    if config.is_joined:
        try:
            counts_own = own_card is None or session.reserve(own_card)
            check_room(config, session.resources, counts_own=counts_own, **needs)
        except BaseException:
            session.close()
            raise
    return RayActors(folder, session)
