"""Rules for what learns: an adapter on a frozen base, or all weights of the model (lora=null)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlft.config.model import CriticKind, LoraSettings, is_adapter
from rlft.config.schema import AUTO, RunConfig, SftConfig, section_of
from rlft.generation.engine import Engine
from rlft.plan.adapters import Use, check_adapters
from rlft.plan.model_rules import check_adapted, check_served, check_shared_tokens, check_targets, check_whole
from rlft.reward.workers.reward_spec import specs
from rlft.runs.fork import MOVING_REFERENCES
from rlft.types import UserError, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NO_ADAPTER = "is an adapter, which stands on a frozen base, and lora=null changes that"


def check_learner(config: RunConfig | SftConfig) -> None:
    """Checks what learns by the config alone: that the engine serves the adapter, or what all weights rule out."""
    if config.lora is None:
        _check_all_weights(config)
    else:
        check_served(config.generation, config.lora)


def check_learner_on(
    config: RunConfig | SftConfig,
    engine: Engine | None,
    used: Sequence[Use],
    base: Mapping[str, str],
    model: PreTrainedConfig,
) -> None:
    """Checks what learns on the base of these fingerprints and config; loads no weights.

    Args:
        engine: the one that samples; None if nothing is sampled.
        used: the folders that the config names.
    """
    lora, settings = config.lora, config.model
    if isinstance(config, RunConfig):
        check_shared_tokens(config, model)
    if lora is None:
        problem = f"a checkpoint of all weights would lack the vision tower of a {model.model_type}"
        remedy = "train an adapter, or use a model of texts"
        require(getattr(model, "vision_config", None) is None, "lora", problem, got="null", remedy=remedy)
        if engine is not None:
            check_whole(engine, settings, model)
    else:
        check_targets(lora, settings, model)
        if engine is not None:
            check_adapted(engine, lora, settings, model)
    check_adapters(used, lora, settings, base, model)


def start_of(lora: LoraSettings | None) -> str | None:
    """The adapter folder that the policy starts from; None if it starts as the base."""
    return None if lora is None else lora.path


def _check_all_weights(config: RunConfig | SftConfig) -> None:
    remedy = "set it to null, or train an adapter"
    require(config.model.quantization is None, "model.quantization", "4-bit weights cannot be trained", remedy=remedy)
    if isinstance(config, RunConfig):
        _check_roles(config)
        _check_processes(config)
    _check_engine(config)
    remedy = "set it to false, or train an adapter"
    require(not config.eval.kl_base, "eval.kl_base", "lora=null changes the base itself", remedy=remedy)
    problem = "a reward adapter stands on a frozen base, which lora=null changes"
    stands_alone = "name a sequence-classification model (folder or hub id), or "
    learns = isinstance(config, RunConfig) and config.reward_model.refresh_every > 0
    remedy = f"{'' if learns else stands_alone}use rule rewards"
    for name, spec in specs(config.reward).items() if config.data else ():
        if spec.runs_in_trainer and is_adapter(path := spec.kwargs["path"]):
            raise UserError(f"reward.{name}.path", problem, got="null" if path is None else path, remedy=remedy)
    saves_each_step = config.checkpoint.on_signal == "step" or config.checkpoint.every == 1
    problem = "with lora=null, no copy of all weights is kept that could be saved in place of a step's"
    remedy = "set it to step, or checkpoint.every=1"
    require(saves_each_step, "checkpoint.on_signal", problem, got=config.checkpoint.on_signal, remedy=remedy)
    _check_trainable(config.model.dtype)


def _check_engine(config: RunConfig | SftConfig) -> None:
    generation = config.generation
    if generation.engine == AUTO:
        return
    engine = generation.named(generation.engine)
    problem = "is given adapters only, and lora=null has none"
    remedy = "use transformers"
    require(engine.serves_whole_models, "generation.engine", problem, got=generation.engine, remedy=remedy)
    if engine.on_trainers_base and engine.rounds:
        key = f"generation.{section_of(generation.engine)}.weights"
        problem = "rounds the sum of base and adapter, and lora=null has none"
        raise UserError(key, problem, got=str(getattr(engine, "weights", "")), remedy="leave it out")


def _check_roles(config: RunConfig) -> None:
    snapshot, critic = config.snapshot, config.critic
    problem = "a critic with an adapter stands on a frozen base, which lora=null changes"
    remedy = "use shared (a value head on the policy's features), or train an adapter"
    require(critic.kind is not CriticKind.adapter, "critic.kind", problem, got=critic.kind, remedy=remedy)
    is_copy = snapshot.reference in ("none", "base", *MOVING_REFERENCES)
    remedy = "use base, copy or ema, or train an adapter"
    require(is_copy, "snapshot.reference", NO_ADAPTER, got=snapshot.reference, remedy=remedy)
    remedy = "use base, or a model's folder or hub id, or train an adapter"
    require(snapshot.teacher_adapter is None, "snapshot.teacher", NO_ADAPTER, got=snapshot.teacher, remedy=remedy)
    problem = "the engine would sample from weights that the update changes meanwhile"
    remedy = "set it to 0, or train an adapter"
    require(not config.overlap.lag, "overlap.lag", problem, got=config.overlap.lag, remedy=remedy)


def _check_processes(config: RunConfig) -> None:
    gpus, remedy = config.cluster.gpus_per_engine, "set it to 1, or train an adapter"
    problem = "engines that divide the layers among GPUs are sent adapters only, and lora=null has none"
    require(gpus == 1, "cluster.gpus_per_engine", problem, got=gpus, remedy=remedy)


def _check_trainable(dtype: str) -> None:
    """Refuses a dtype in which the small steps of an optimizer are lost."""
    problem = f"small updates are lost in the rounding of {dtype} weights"
    remedy = "set model.dtype=float32, or train an adapter (whose weights are float32)"
    require(dtype in ("float32", "float64"), "model.dtype", problem, got=dtype, remedy=remedy)
