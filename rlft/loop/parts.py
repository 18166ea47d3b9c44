"""The parts of a run in this process, each opened by itself: its engines and teacher, base, roles, trainer, rewards.

An engine that is slow to start serves every job of a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from typing import Any, cast

from rlft.config.model import LoraSettings, ModelConfig, SnapshotConfig, teacher_settings
from rlft.config.schema import RunConfig, section_of
from rlft.config.trainer import ClusterConfig
from rlft.environment.conversations import Conversations
from rlft.environment.endpoint.agents import Endpoint
from rlft.environment.endpoint.played import AgentGenerator, Traces
from rlft.environment.protocol import Environment
from rlft.generation.engine import Engine, EngineArgs, Generator, TeacherSettings
from rlft.generation.pool import EnginePool
from rlft.model.activations import NO_ADAPTER, AdapterLayers, layer_modules, set_checkpointing
from rlft.model.adapter_folder import POLICY, adapted_modules
from rlft.model.backbone import (
    Adopt,
    Backbone,
    decoder_layers,
    ends_of,
    load_backbone,
    load_tokenizer,
    read_backbone,
    read_config,
    resolve_path,
)
from rlft.model.forward import Forward, choose
from rlft.model.full_weights import WholeModel
from rlft.model.lora_config import lora_config
from rlft.model.networks import Networks
from rlft.model.reward_model import LearnedReward, open_learned, reward_role
from rlft.model.roles import Roles
from rlft.plan.fit import needs_checkpointing
from rlft.plan.model_rules import empty_model, fresh_shapes, modules_to_adapt
from rlft.plan.roles import teacher_is_meant
from rlft.plan.run_plan import Plan
from rlft.plan.train_plan import TrainPlan
from rlft.reward.workers.pool import Pool
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.reward.workers.scorer import AheadScorer, Scorer
from rlft.system.device import free_bytes, resolve_device, resolve_dtype
from rlft.system.memory import Largest
from rlft.trainer.local import LocalTrainer, open_optimizers
from rlft.trainer.reward_training import RewardRefresh
from rlft.trainer.sharded_base import ShardedLayers


class Engines(AbstractContextManager["Engines"]):
    """Opens generators and closes each of them once: one that several jobs share at the end of the context."""

    def __init__(self) -> None:
        self._shared: tuple[object, Generator] | None = None  # (what it was opened with, the open one)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the shared generator."""
        shared, self._shared = self._shared, None  # first: one that fails to close serves no other job
        if shared is not None:
            shared[1].close()

    @contextmanager
    def opened(self, engine: Engine, args: EngineArgs) -> Iterator[Generator]:
        """Yields the engine's generator, and closes it afterwards unless other jobs may share it."""
        generator = self._shared_by_jobs(engine, args) if engine.shared else engine.open(args)
        try:
            if engine.shared:
                generator.serve(args.slot)
            yield generator
        finally:
            if engine.shared:
                generator.serve(None)
            else:
                generator.close()

    @contextmanager
    def opened_for(
        self,
        plan: Plan,
        learner: Networks,  # on whose base the engine may decode
        lora: LoraSettings | None,  # the adapter's settings; None if the base itself is trained
        environment: Environment | None = None,
        traces: Traces | None = None,  # as in `wrap_with_environment`
    ) -> Iterator[Generator]:
        """Yields the generator of a run: its engine, with conversations over it if there is an environment."""
        assert plan.engine is not None, "the run samples"
        engine = plan.config.generation.named(plan.engine)
        args = engine_args(plan.config, lora, learner, images=plan.images)
        args = replace(args, decodings=tuple(plan.decodings))
        with self.opened(engine, args) as generator:
            over = wrap_with_environment(generator, engine, environment, args, traces)
            try:
                yield over
            finally:
                if over is not generator:
                    over.close()

    def adopting(self, plan: Plan, lora: LoraSettings | None) -> Adopt | None:
        """The function that puts the trainer's base on the engine's storage; None where each holds its own base.

        The engine is opened first, so that the device never holds two bases. Jobs of a sweep that share the engine get
        the same function, and so the same base.
        """
        if plan.engine is None:
            return None
        chosen: Engine = plan.config.generation.named(plan.engine)
        if base_sharing_obstacle(chosen, plan.config.model) is not None:
            return None
        assert chosen.shared, "only an engine that stays open for all jobs can hold the base that they share"
        return self._shared_by_jobs(chosen, engine_args(plan.config, lora, images=plan.images)).adopt

    def _shared_by_jobs(self, engine: Engine, args: EngineArgs) -> Generator:
        key = engine, args.of_the_engine
        if self._shared is not None and self._shared[0] != key:
            self.close()  # first, as two would not fit at the same time
        if self._shared is None:
            self._shared = key, engine.open(args)
        return self._shared[1]


def load_teacher(snapshot: SnapshotConfig, model: ModelConfig) -> Forward | None:
    """The forward of a teacher that is a separate model; None where the teacher is on the base or there is none."""
    settings = teacher_settings(snapshot, model)
    if settings is None:
        return None
    with teacher_is_meant():
        backbone = read_backbone(settings)
    return choose(backbone.model, backbone.kernels)


@contextmanager
def opened_teacher(config: RunConfig, row_tokens: int) -> Iterator[Any]:
    """Yields the teacher of this run if it is a separate model: its forward, or the engine that computes it.

    row_tokens: number of tokens of the longest row that it will read.
    """
    settings = teacher_settings(config.snapshot, config.model)
    engine = config.generation.named(config.snapshot.teacher_engine)
    if settings is None or not engine.teaches:
        yield load_teacher(config.snapshot, config.model)
        return
    device = resolve_device(settings.device)
    asked = TeacherSettings(
        model_path=str(resolve_path(settings.path)),
        dtype=str(resolve_dtype(settings.dtype, device)).removeprefix("torch."),
        trust_remote_code=settings.trust_remote_code,
        quantization=settings.quantization,
        row_tokens=row_tokens,
        gpu_memory_utilization=config.snapshot.teacher_gpu_memory_utilization,
    )
    with closing(engine.open_teacher(engine.teacher_settings(asked))) as teacher:
        yield teacher


def largest_of(plan: Plan) -> dict[str, Largest]:
    """{stage: the engine's largest allocation in it}, for the message of a memory error; empty without an engine."""
    if plan.engine is None:
        return {}
    name, engine = plan.engine, plan.config.generation.named(plan.engine)
    return {
        stage: Largest(
            what=what,
            key=f"generation.{section_of(name)}.{key}",
            value=getattr(engine, key),
            may_change=key in engine.may_change,
        )
        for stage, (what, key) in engine.grows.items()
    }


def base_sharing_obstacle(engine: Engine, model: ModelConfig) -> str | None:
    """Why this engine holds its own base next to the trainer's; None where one copy serves both, "" without one."""
    device = resolve_device(model.device)
    itemsize, quantized = resolve_dtype(model.dtype, device).itemsize, model.quantization is not None
    return engine.base_sharing_obstacle(device=str(device), itemsize=itemsize, quantized=quantized)


def engine_args(
    config: Any, lora: LoraSettings | None, learner: Networks | None = None, *, images: int = 0
) -> EngineArgs:
    """The arguments for opening the engine of this config.

    Args:
        config: the run's config, or any with `model`, `prompts`, `generation` and `seed`.
        lora: the settings of the adapters that the engine will load; None if it loads none.
        learner: the trainer's networks, on whose base the engine may decode; None where there are none (yet).
        images: the most images of a prompt.
    """
    model, modules = config.model, ()
    if learner is not None:
        device, dtype = learner.backbone.device, learner.backbone.model.dtype
        tokenizer = learner.backbone.tokenizer.with_variables(config.prompts.template_variables)
        if isinstance(learner, Roles):
            modules = adapted_modules(learner.weights(POLICY))
    else:
        device = resolve_device(model.device)
        dtype = resolve_dtype(model.dtype, device)
        tokenizer = load_tokenizer(model, config.prompts.template_variables)
        if lora is not None:
            modules = modules_to_adapt(lora, model, read_config(model))
    return EngineArgs(
        slot=learner,
        tokenizer=tokenizer,
        ends=ends_of(model, config.prompts.style, tokenizer),
        device=device,
        model_path=str(resolve_path(model.path)),
        revision=model.revision,
        dtype=str(dtype).removeprefix("torch."),
        quantization=model.quantization,
        trust_remote_code=model.trust_remote_code,
        lora_rank=None if lora is None else lora.rank,
        lora_modules=frozenset(name.rpartition(".")[2] for name in modules) or None,
        max_sequence_tokens=config.prompts.max_tokens + config.generation.max_tokens,
        seed=config.seed,
        images=images,
    )


def wrap_with_environment(
    generator: Generator,
    engine: Engine,
    environment: Environment | None,
    args: EngineArgs,
    traces: Traces | None = None,  # where outside agents' conversations are recorded for a resume; None: nowhere
) -> Generator:
    """The engine's generator, or conversations over it; closing these ends the environment's workers only."""
    if environment is None:
        return generator
    tokenizer, longest_row = args.tokenizer, args.max_sequence_tokens
    if environment.plays_itself:
        agents = cast(Endpoint, environment)
        return AgentGenerator(generator, agents, tokenizer, longest_row=longest_row, traces=traces)
    at_once = None if engine.divisible else engine.at_once
    return Conversations(generator, environment, tokenizer, at_once=at_once, longest_row=longest_row)


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
