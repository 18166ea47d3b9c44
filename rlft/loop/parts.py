"""The parts of a run with a model, each opened by itself: its roles, its trainer, its rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlft.config.schema import RunConfig
from rlft.config.trainer import ClusterConfig
from rlft.loop.base_loading import load_for_training
from rlft.loop.members import Members, Ranks
from rlft.model.backbone import Adopt
from rlft.model.full_weights import WholeModel
from rlft.model.reward_model import LearnedReward, open_learned, reward_role
from rlft.model.roles import Roles
from rlft.plan.train_plan import TrainPlan
from rlft.reward.workers.ahead import AheadScorer
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.reward.workers.scorer import Scorer
from rlft.trainer.local import LocalTrainer, open_optimizers
from rlft.trainer.protocol import Trainer
from rlft.trainer.ranked_trainer import RankedTrainer
from rlft.trainer.ranks import LaneShare
from rlft.trainer.reward_training import RewardRefresh
from rlft.trainer.sharded_base import ShardedLayers
from rlft.trainer.update import UpdateSettings


# -- roles -------------------------------------------------------------------------------------------------------------
@contextmanager
def open_roles(
    config: RunConfig, teacher: Any, *, adopt: Adopt | None = None, base: ShardedLayers | None = None
) -> Iterator[Roles]:
    """Loads the base and the roles on it.

    Args:
        config: the run's config.
        teacher: a teacher that is a separate model, loaded before; None without one.
        adopt: puts the base on its device (`load_for_training`).
        base: the base's layers where ranks divide them, else None.
    """
    backbone = load_for_training(config.model, config.lora, config.token_budget, adopt=adopt, sharded=base)
    roles = Roles(
        backbone,
        config.lora,
        config.snapshot,
        replace(config.critic, init=critic_source(config)),
        temperature=config.generation.temperature,
        token_budget=config.token_budget,
        seed=config.seed,
        teacher=teacher,
    )
    try:
        yield roles
    finally:
        roles.close()


def critic_source(config: RunConfig) -> str:
    """`critic.init`, with `reward` replaced by the folder of the learned reward's adapter."""
    if config.critic.init != "reward":
        return config.critic.init
    [learned] = learned_rewards(specs(config.reward))  # plan/roles.py refuses any other number
    return learned.kwargs["path"]


# -- trainer -----------------------------------------------------------------------------------------------------------
def open_trainer(plan: TrainPlan, roles: Roles, base: ShardedLayers | None = None) -> LocalTrainer:
    """The trainer of this run on these roles, with fresh optimizers; `base` is as in `open_roles`."""
    config = plan.config
    reward_training: RewardRefresh | None = None
    if config.reward_model.refresh_every and (learned := learned_rewards(specs(config.reward))):
        role = reward_role(learned[0].name)
        reward_training = RewardRefresh(config.reward_model, roles, role, config.trainer, config.seed)
    return LocalTrainer(
        roles,
        open_optimizers(roles, config.trainer, config.critic.lr),
        update_settings(config),
        needs_old=plan.needs_old,
        teacher_top_k=plan.algorithm.teacher_top_k,
        text=plan.pretrain_text,
        reward_training=reward_training,
        base=base,
    )


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


def update_settings(config: RunConfig) -> UpdateSettings:
    """The settings of this config that updates depend on."""
    return UpdateSettings(
        seed=config.seed,
        steps=config.steps,
        epochs=config.epochs,
        minibatches=config.minibatches,
        max_completion_tokens=config.generation.max_tokens,
        warmup_steps=config.critic.warmup_steps,
    )


# -- rewards -----------------------------------------------------------------------------------------------------------
@contextmanager
def open_scorer(
    config: Any, learner: Roles | WholeModel, *, learns: bool = False, members: Members | None = None
) -> Iterator[Scorer | AheadScorer]:
    """Opens the rewards of a config.

    Args:
        config: the config of any verb that scores.
        learner: the networks; those of learned rewards are on their base.
        learns: whether this run trains the learned rewards.
        members: the run's other processes. Engines there have groups scored as soon as they are finished.
    """
    rewards, scoring, members = specs(config.reward), config.scoring, members or Members()
    scorer: Scorer | AheadScorer = Scorer(
        rewards,
        scoring.workers,
        scoring.timeout,
        scoring.on_error,
        open_resident(rewards, learner, learns=learns) if isinstance(learner, Roles) else {},
        members.open_rewards,
        allow_unscorable=config.allows_unscorable,
    )
    if members.pool is not None and scoring.workers:
        scorer = AheadScorer(scorer)
        members.pool.finished = scorer.begin
    try:
        yield scorer
    finally:
        scorer.close()


def open_resident(rewards: Mapping[str, RewardSpec], roles: Roles, *, learns: bool) -> dict[str, LearnedReward]:
    """{name: callable} of the learned rewards; `learns` says whether this run trains their adapter."""
    return {
        spec.name: open_learned(spec.name, roles=roles, learns=learns, **spec.kwargs)
        for spec in learned_rewards(rewards)
    }


def learned_rewards(rewards: Mapping[str, RewardSpec]) -> Sequence[RewardSpec]:
    """The rewards that the trainer computes with a model."""
    return [spec for spec in rewards.values() if spec.runs_in_trainer]
