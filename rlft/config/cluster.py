"""The typed `cluster` section; meanings and defaults are in configs/cluster/local.yaml."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlft.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The `cluster` section. The defaults: one process does all."""

    kind: typing.Literal["local", "ray"] = "local"
    address: str | None = None
    engines: NonNegativeInt = 0
    gpus_per_engine: PositiveInt = 1
    ranks: PositiveInt = 1
    lanes: PositiveInt | typing.Literal["auto"] = "auto"
    placement: typing.Literal["auto", "pairs", "divided"] = "auto"
    timeout: PositiveFloat = 600.0
    max_engine_restarts: NonNegativeInt = 3
    scoring: bool = False
    jobs: PositiveInt = 1
    shard_base: bool = False

    @property
    def num_lanes(self) -> int:
        """The lanes of a run that begins so; a resumed run has a number there (`kept_lanes`)."""
        return self.ranks if self.lanes == "auto" else self.lanes

    @property
    def is_joined(self) -> bool:
        """Whether the members run on a Ray cluster that runs already."""
        return self.kind == "ray" and self.address is not None


def kept_lanes(cluster: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The plain section with a number instead of `lanes: auto`, unless one process does all.

    Args:
        before: the section of the run that is resumed; None for a new run.
    """
    if cluster.get("lanes", "auto") != "auto":
        return dict(cluster)
    ranks = cluster.get("ranks", 1)
    kept = ranks
    if before is not None:
        kept = before.get("lanes", "auto")
        kept = before.get("ranks", 1) if kept == "auto" else kept
    return dict(cluster) if kept == ranks == 1 else {**cluster, "lanes": kept}
