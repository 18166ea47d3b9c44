"""What is refused about the ranks that share the passes of training, by the config alone."""

from __future__ import annotations

from rlft.cluster.config import ClusterConfig
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
