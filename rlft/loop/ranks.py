"""Opens the trainer of `rlft train`: one in this process alone, or one of several ranks that share its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rlft.config.cluster import ClusterConfig
from rlft.loop.members import gpus_of_a_member, model_of_a_member
from rlft.plan.train_plan import TrainPlan
from rlft.system.process.member import Launcher, Member, MemberSpec
from rlft.trainer.local import LocalTrainer
from rlft.trainer.protocol import Trainer
from rlft.trainer.ranked_trainer import RankedTrainer
from rlft.trainer.ranks import LaneShare

WORKER = "rlft.loop.rank_worker:RankWorker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks besides the run's own process, which load their bases while this one loads its own.

    Attributes:
        launcher: the launcher that has started them; whoever opened it closes it.
        specs: the specs of ranks 1, 2, ..
        members: the members that are these ranks.
    """

    launcher: Launcher
    specs: Sequence[MemberSpec]
    members: Sequence[Member]


def start_ranks(plan: TrainPlan, launcher: Launcher) -> Ranks:
    """Starts the ranks of a plan besides this process, each with as many threads as this one."""
    specs = rank_specs(plan)
    return Ranks(launcher=launcher, specs=specs, members=[launcher.start(spec) for spec in specs])


def rank_specs(plan: TrainPlan) -> list[MemberSpec]:
    """The specs of the members that are ranks 1, 2, .."""
    config, cluster = plan.config, plan.config.cluster
    assert plan.placement is not None, "a run with ranks is placed"
    gpus = plan.placement.ranks
    return [
        MemberSpec(
            name=f"rank-{rank}",
            factory=WORKER,
            arguments={
                "config": replace(config, model=model_of_a_member(config.model)),
                "needs_old": plan.needs_old,
                "teacher_top_k": plan.algorithm.teacher_top_k,
                "rank": rank,
                "lanes": cluster.num_lanes,
            },
            threads=torch.get_num_threads(),
            **gpus_of_a_member(config, gpus[rank : rank + 1]),
        )
        for rank in range(1, cluster.ranks)
    ]


def make_trainer(
    local: LocalTrainer, cluster: ClusterConfig, ranks: Ranks | None, note: Callable[[str], None]
) -> Trainer:
    """The trainer of these ranks, of which `local` is rank 0, or `local` alone with all lanes."""
    if ranks is None:
        local.share = LaneShare(lanes=cluster.num_lanes)
        return local
    return RankedTrainer(
        local,
        ranks.launcher,
        ranks.specs,
        ranks.members,
        lanes=cluster.num_lanes,
        timeout=cluster.timeout,
        host=ranks.launcher.address,
        note=note,
    )
