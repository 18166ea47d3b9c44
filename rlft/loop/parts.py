"""The parts of a run in this process, each opened by itself: its base, roles, trainer and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlft.config.model import LoraSettings, ModelConfig
from rlft.config.schema import RunConfig
from rlft.config.trainer import ClusterConfig
from rlft.generation.pool import EnginePool
from rlft.model.activations import NO_ADAPTER, AdapterLayers, layer_modules, set_checkpointing
from rlft.model.backbone import Adopt, Backbone, decoder_layers, load_backbone, read_backbone
from rlft.model.full_weights import WholeModel
from rlft.model.lora_config import lora_config
from rlft.model.networks import Networks
from rlft.model.reward_model import LearnedReward, open_learned, reward_role
from rlft.model.roles import Roles
from rlft.plan.fit import needs_checkpointing
from rlft.plan.model_rules import empty_model, fresh_shapes
from rlft.plan.train_plan import TrainPlan
from rlft.reward.workers.pool import Pool
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.reward.workers.scorer import AheadScorer, Scorer
from rlft.system.device import free_bytes
from rlft.trainer.local import LocalTrainer, open_optimizers
from rlft.trainer.reward_training import RewardRefresh
from rlft.trainer.sharded_base import ShardedLayers

# -- base --------------------------------------------------------------------------------------------------------------


def load_for_training(
    config: ModelConfig,
    lora: LoraSettings | None,  # the shape of the trained adapter; None if the base itself is trained
    token_budget: int,  # the most tokens in a forward with gradient
    *,
    adopt: Adopt | None = None,  # puts the base on its device (`rlft.model.backbone.read_backbone`)
    sharded: ShardedLayers | None = None,  # divides the base's layers among ranks
) -> Backbone:
    """Loads the base, which jobs of a sweep share unless it is trained itself or divided among ranks."""
    if lora is None or sharded is not None:
        backbone = read_backbone(config, adopt if sharded is None else sharded.adopt)
    else:  # jobs share a base by the arguments that it was loaded with
        backbone = load_backbone(config) if adopt is None else load_backbone(config, adopt)
    if config.gradient_checkpointing == "auto":
        model, free, layers = backbone.model, free_bytes(backbone.device), NO_ADAPTER
        plain, itemsize = backbone.kernels.are_plain, model.dtype.itemsize
        if lora is not None and (plain or lora.dropout > 0 or lora.use_dora):
            empty = empty_model(config, model.config)
            shapes = fresh_shapes(empty, lora_config(lora, empty))
            layers = AdapterLayers.of(shapes, dropout=lora.dropout > 0, dora=lora.use_dora)
        device = backbone.device.type
        adapter_bytes = layers.bytes_of_a_token(itemsize, device, plain=plain)
        is_fused = lora is not None and backbone.kernels.decision.fused_layers and layers.serves_fused(plain=plain)
        how = {"device": device, "plain": plain, "is_fused": is_fused, "adapter": adapter_bytes}
        how["modules"] = layer_modules(decoder_layers(model))
        needed = needs_checkpointing(model.config, token_budget, itemsize, free, **how)
        set_checkpointing(model, needed and model.supports_gradient_checkpointing)
    return backbone


def layers_of_rank(cluster: ClusterConfig, rank: int) -> ShardedLayers | None:
    """This rank's share of the base's layers; None where every rank holds all of them."""
    return ShardedLayers(rank, cluster.ranks) if cluster.shard_base else None


# -- roles -------------------------------------------------------------------------------------------------------------
@contextmanager
def open_roles(
    config: RunConfig, teacher: Any, *, adopt: Adopt | None = None, base: ShardedLayers | None = None
) -> Iterator[Networks]:
    """Loads the base and the roles on it; teacher: one that is a separate model, loaded before.

    adopt puts the base on its device (`load_for_training`); base: its layers where ranks divide them.
    """
    lora, critic = config.lora, config.critic
    backbone = load_for_training(config.model, lora, config.token_budget, adopt=adopt, sharded=base)
    tokenizer = backbone.tokenizer.with_variables(config.prompts.template_variables)
    backbone = replace(backbone, tokenizer=tokenizer)  # jobs of a sweep share the base, but not these
    if critic.init == "reward":
        [learned] = learned_rewards(specs(config.reward))  # plan/roles.py refuses any other number
        critic = replace(critic, init=learned.kwargs["path"])
    how = {"temperature": config.generation.temperature, "token_budget": config.token_budget, "teacher": teacher}
    roles = (
        WholeModel(backbone, config.snapshot, critic, **how)
        if lora is None
        else Roles(backbone, lora, config.snapshot, critic, seed=config.seed, **how)
    )
    try:
        yield roles
    finally:
        roles.close()


# -- trainer -----------------------------------------------------------------------------------------------------------
def open_trainer(plan: TrainPlan, roles: Networks, base: ShardedLayers | None = None) -> LocalTrainer:
    """The trainer of this run on these roles, with fresh optimizers; `base` is as in `open_roles`."""
    config, reward_training = plan.config, None
    if config.reward_model.refresh_every and (learned := learned_rewards(specs(config.reward))):
        assert isinstance(roles, Roles), "plan/roles.py refuses reward adapters next to all weights"
        role = reward_role(learned[0].name)
        reward_training = RewardRefresh(config.reward_model, roles, role, config.trainer, config.seed)
    return LocalTrainer(
        roles,
        open_optimizers(roles, config.trainer, config.critic.lr),
        config,
        text=None if plan.pretrain_text is None else plan.pretrain_text.batch,
        reward_training=reward_training,
        base=base,
        **plan.annotated,
    )


# -- rewards -----------------------------------------------------------------------------------------------------------
@contextmanager
def open_scorer(
    config: Any,
    learner: Networks,  # the networks; reward adapters are on their base
    *,
    learns: bool = False,  # whether this run trains the learned rewards
    # The run's engines in other processes, which have groups scored as soon as they are finished.
    pool: EnginePool | None = None,
    # Opens the reward workers if they are not processes of this machine.
    open_rewards: Callable[[Sequence[RewardSpec]], Pool] | None = None,
) -> Iterator[Scorer]:
    """Opens the rewards of a config."""
    rewards, scoring = specs(config.reward), config.scoring
    engines = pool if scoring.workers else None
    scorer = (Scorer if engines is None else AheadScorer)(
        rewards,
        scoring.workers,
        scoring.timeout,
        scoring.on_error,
        open_resident(rewards, learner, learns=learns),
        open_rewards,
        allow_unscorable=config.allows_unscorable,
    )
    if engines is not None and isinstance(scorer, AheadScorer):
        engines.finished = scorer.begin
    try:
        yield scorer
    finally:
        scorer.close()


def open_resident(rewards: Mapping[str, RewardSpec], roles: Networks, *, learns: bool) -> dict[str, LearnedReward]:
    """{name: callable} of the learned rewards; `learns` says whether this run trains their adapter."""
    return {
        spec.name: open_learned(spec.name, roles=roles, learns=learns, **spec.kwargs)
        for spec in learned_rewards(rewards)
    }


def learned_rewards(rewards: Mapping[str, RewardSpec]) -> Sequence[RewardSpec]:
    return [spec for spec in rewards.values() if spec.runs_in_trainer]
