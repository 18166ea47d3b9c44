"""Rules for what learns, for the roles next to it, and for the folders that they start from.

What learns is an adapter on a frozen base, or all weights of the model (lora=null). Of folders only small files are
read, never weights: first files, rank and alpha, which needs no model, then whether an adapter was made for this base,
by the fingerprint in its rlft.json if there is one, and always by the names and shapes of its tensors. A teacher that
is a separate model has rules about its config and tokenizer, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.algorithm.objective import Objective
from rlft.algorithm.ops.kl import KLAnchor
from rlft.config.choices import closest
from rlft.config.model import (
    ANSWER,
    EMBEDDED,
    CriticKind,
    LoraSettings,
    ModelConfig,
    Old,
    is_adapter,
    resolve_path,
    teacher_settings,
)
from rlft.config.schema import ANYWHERE, AUTO, RunConfig, SftConfig, section_of
from rlft.environment.protocol import read_environment
from rlft.generation.engine import Engine
from rlft.model.adapter_folder import (
    HEAD,
    OLD,
    POLICY,
    REFERENCE,
    adapted_modules,
    check_adapter_folder,
    check_head,
    check_shape,
    content_fingerprint,
    does_nothing,
    has_head,
    read_record,
    switches_of,
    tensor_shapes,
)
from rlft.model.families import limit_of
from rlft.plan import model_rules
from rlft.plan.identity import template_in
from rlft.reward.workers.reward_spec import RewardSpec, specs
from rlft.runs.fingerprints import OF_SAMPLES, PARTS, differing, name_of
from rlft.runs.fork import MOVING_REFERENCES
from rlft.system.terminal import override
from rlft.tokens.text import RunTokenizer
from rlft.types import UserError, counted, require

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedModel


# -- what learns -------------------------------------------------------------------------------------------------------
def check_learner(config: RunConfig | SftConfig) -> None:
    """Checks what learns by the config alone: that the engine serves the adapter, or what all weights rule out."""
    if config.lora is None:
        _check_all_weights(config)
    else:
        model_rules.check_served(config.generation, config.lora)


def check_learner_on(
    config: RunConfig | SftConfig,
    engine: Engine | None,
    used: Sequence[Use],
    base: Mapping[str, str],
    model: PreTrainedConfig,
) -> None:
    """Checks what learns on the base with these fingerprints and config, sampled by `engine` if that is not None."""
    lora, settings = config.lora, config.model
    if isinstance(config, RunConfig):
        model_rules.check_shared_tokens(config, model)
    if lora is None:
        problem = f"a checkpoint of all weights would lack the vision tower of a {model.model_type}"
        remedy = "train an adapter, or use a model of texts"
        require(getattr(model, "vision_config", None) is None, "lora", problem, got="null", remedy=remedy)
        if engine is not None:
            # `auto` has chosen it by now; what is said of an engine that samples nothing does not matter.
            _check_sums(engine, next(name for name, own in config.generation.engines.items() if own is engine))
            model_rules.check_whole(engine, settings, model)
    else:
        model_rules.check_targets(lora, settings, model)
        if engine is not None:
            model_rules.check_adapted(engine, lora, settings, model)
    check_adapters(used, lora, settings, base, model)


def start_of(lora: LoraSettings | None) -> str | None:
    """The adapter folder that the policy starts from; None if it starts as the base."""
    return None if lora is None else lora.path


NO_ADAPTER = "is an adapter, which stands on a frozen base, and lora=null changes that"


def _check_all_weights(config: RunConfig | SftConfig) -> None:
    remedy = "set it to null, or train an adapter"
    require(config.model.quantization is None, "model.quantization", "4-bit weights cannot be trained", remedy=remedy)
    if isinstance(config, RunConfig):
        _check_roles(config)
        gpus, remedy = config.cluster.gpus_per_engine, "set it to 1, or train an adapter"
        problem = "engines that divide the layers among GPUs are sent adapters only, and lora=null has none"
        require(gpus == 1, "cluster.gpus_per_engine", problem, got=gpus, remedy=remedy)
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
    dtype = config.model.dtype
    problem = f"small updates are lost in the rounding of {dtype} weights"
    remedy = "set model.dtype=float32, or train an adapter (whose weights are float32)"
    require(dtype in ("float32", "float64"), "model.dtype", problem, got=dtype, remedy=remedy)


def _check_engine(config: RunConfig | SftConfig) -> None:
    generation = config.generation
    name = ANYWHERE if generation.engine == AUTO else generation.engine  # auto takes one that serves all weights
    engine = generation.named(name)
    problem = "is given adapters only, and lora=null has none"
    remedy = "use transformers"
    require(engine.serves_whole_models, "generation.engine", problem, got=generation.engine, remedy=remedy)
    if generation.engine != AUTO:
        _check_sums(engine, section_of(name))


def _check_sums(engine: Engine, section: str) -> None:
    if engine.needs_sums:
        key = f"generation.{section}.weights"
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


# -- the roles that an algorithm needs ---------------------------------------------------------------------------------
def check_roles(
    config: RunConfig, algorithm: Objective, rewards: Mapping[str, RewardSpec], *, trains: bool = True
) -> None:
    """Checks that the config has the roles that the algorithm needs and no other; trains: False if evaluated only."""
    learned = {name: spec for name, spec in rewards.items() if spec.runs_in_trainer}
    _reference(config, algorithm)
    if trains:
        _teacher(config, algorithm)
    _steps(config, algorithm, rewards)
    _text(config, algorithm)
    _critic(config, algorithm)
    _critic_init(config, learned)
    _reward_model(config, rewards, learned)


def _reference(config: RunConfig, algorithm: Objective) -> None:
    snapshot = config.snapshot
    if algorithm.needs_reference and snapshot.reference == "none":
        problem = "algorithm.kl_coef is above 0, which needs a reference policy"
        remedy = "set snapshot.reference=base, copy, ema or an adapter folder, or algorithm.kl_coef=0"
        raise UserError("snapshot.reference", problem, got="none", remedy=remedy)
    problem = "an exact KL to the old policy needs its network during the updates"
    is_there = algorithm.exact_kl_to != KLAnchor.old or snapshot.old is Old.copy
    remedy = "set snapshot.old=copy, or algorithm.kl_estimator=auto"
    require(is_there, "algorithm.kl_estimator", problem, got="exact", remedy=remedy)
    problem = "an exact KL is not computed where the LM head has an adapter"
    is_exact = algorithm.exact_kl_to is not None or algorithm.reference_field == "reference_kl"
    adapts_head = config.lora is not None and config.lora.adapts_head
    remedy = "leave lm_head out, or use algorithm.kl_estimator=auto"
    require(not (is_exact and adapts_head), "lora.target_modules", problem, remedy=remedy)
    problem = "a KL of whole distributions cannot be computed from the engine's log-probs of sampled tokens"
    is_there = algorithm.reference_field != "reference_kl" or snapshot.old is not Old.sampled
    require(is_there, "snapshot.old", problem, got=snapshot.old, remedy="use auto, or algorithm.kl_estimator=auto")
    if snapshot.refresh_every and snapshot.reference != "copy":
        problem = f"only a `copy` reference is refreshed, and snapshot.reference is {snapshot.reference}"
        remedy = "set snapshot.reference=copy, or snapshot.refresh_every=0"
        raise UserError("snapshot.refresh_every", problem, got=snapshot.refresh_every, remedy=remedy)
    if snapshot.reference == "ema" and snapshot.ema_decay is None:
        problem = "an `ema` reference needs the share of it that stays, per step"
        remedy = "use for instance 0.99, which follows the policy in about 100 steps"
        raise UserError("snapshot.ema_decay", problem, got="null", remedy=remedy)
    if snapshot.ema_decay is not None and snapshot.reference != "ema":
        problem = f"only an `ema` reference follows the policy, and snapshot.reference is {snapshot.reference}"
        remedy = "set snapshot.reference=ema, or snapshot.ema_decay=null"
        raise UserError("snapshot.ema_decay", problem, got=snapshot.ema_decay, remedy=remedy)
    problem = "all of the reference stays, so it never moves"
    remedy = "use for instance 0.99, or snapshot.reference=copy for one that stays where the run began"
    require(snapshot.ema_decay != 1, "snapshot.ema_decay", problem, got=snapshot.ema_decay, remedy=remedy)


def _critic(config: RunConfig, algorithm: Objective) -> None:
    critic = config.critic
    if algorithm.needs_values and critic.kind is CriticKind.none:
        problem = "this algorithm needs values, and only a critic gives them"
        remedy = "set critic.kind=adapter (its own LoRA), or shared (a value head on the policy's features)"
        raise UserError("critic.kind", problem, got="none", remedy=remedy)
    if critic.kind is not CriticKind.none and not algorithm.needs_values:
        problem = "this algorithm has no use for a critic's values"
        raise UserError("critic.kind", problem, got=critic.kind, remedy="set critic.kind=none, or algorithm=ppo or a2c")
    if critic.kind is CriticKind.none:
        unused = {"init": "base", "warmup_steps": 0, "normalize_values": False}
        for name in (name for name, unset in unused.items() if getattr(critic, name) != unset):
            got = str(getattr(critic, name)).lower() if name == "normalize_values" else getattr(critic, name)
            remedy = "set critic.kind=adapter or shared, or leave it out"
            raise UserError(f"critic.{name}", "has no effect with critic.kind=none", got=got, remedy=remedy)
    elif critic.warmup_steps >= config.steps:
        problem = f"the policy would never learn, the run has steps={config.steps}"
        raise UserError("critic.warmup_steps", problem, got=critic.warmup_steps, remedy="use fewer, or more steps")


def _critic_init(config: RunConfig, learned: Mapping[str, RewardSpec]) -> None:
    if config.critic.init != "reward":
        return
    problem = f"`reward` is the adapter of the one learned reward, and there are {len(learned)}"
    remedy = "set reward=[...,learned] reward.learned.path=<folder>, or critic.init=<that folder>"
    require(len(learned) == 1, "critic.init", problem, got="reward", remedy=remedy)
    [(name, spec)] = learned.items()
    path = spec.kwargs["path"]
    problem = f"`reward` is an adapter's folder, and reward.{name}.path={'null' if path is None else path} is none"
    remedy = f"set reward.{name}.path=<folder of a reward adapter>, or critic.init=base"
    require(path is not None and is_adapter(path), "critic.init", problem, got="reward", remedy=remedy)


def _reward_model(config: RunConfig, rewards: Mapping[str, RewardSpec], learned: Mapping[str, RewardSpec]) -> None:
    """A learned reward that the run trains must be an adapter with labels; a new one must be trained."""
    refresh_every, labels = config.reward_model.refresh_every, config.reward_model.labels
    if not refresh_every:
        for name in (name for name, spec in learned.items() if spec.kwargs["path"] is None):
            problem = "an untrained head scores every completion 0, and reward_model.refresh_every=0 never trains it"
            remedy = "give it a folder, or set for instance reward_model.refresh_every=10"
            remedy += " reward_model.labels=<a rule reward>"
            raise UserError(f"reward.{name}.path", problem, got="null", remedy=remedy)
        return
    if not learned:
        return  # a recipe may say how a learned reward would be trained, if the command line adds one
    problem = f"trains the one learned reward, and there are {len(learned)}"
    remedy = "leave all but one out, or set reward_model.refresh_every=0"
    require(len(learned) <= 1, "reward_model.refresh_every", problem, got=refresh_every, remedy=remedy)
    [(name, spec)] = learned.items()
    path = spec.kwargs["path"]
    problem = f"only an adapter is trained, and reward.{name}.path={path} is a network of its own"
    remedy = f"set reward.{name}.path=null or the folder of a reward adapter, or reward_model.refresh_every=0"
    require(is_adapter(path), "reward_model.refresh_every", problem, got=refresh_every, remedy=remedy)
    rules = [other for other in rewards if other not in learned]
    problem = "must name the rule reward that says which of two completions is better"
    remedy = f"use {' or '.join(rules)}" if rules else "put one in: reward=[exact_match,...]"
    require(labels in rules, "reward_model.labels", problem, got="null" if labels is None else labels, remedy=remedy)
    problem = "learns from pairs of a group's completions, and group_size=1 has none"
    remedy = "set group_size=8, or reward_model.refresh_every=0"
    require(config.group_size != 1, "reward_model.refresh_every", problem, got=refresh_every, remedy=remedy)


def _steps(config: RunConfig, algorithm: Objective, rewards: Mapping[str, RewardSpec]) -> None:
    engine = config.generation.engines.get(section_of(config.generation.engine))
    environment = read_environment(config.environment)
    if (engine is not None and engine.rewards_turns) or (environment is not None and environment.rewards_turns):
        return
    if algorithm.needs_steps and not any(spec.scores_steps and spec.weight for spec in rewards.values()):
        problem = "this algorithm learns from scores of single steps, and no reward with a weight gives any"
        remedy = f"add one, for instance reward=[{','.join([*rewards, 'equations'])}]"
        raise UserError("reward", problem, got=f"[{','.join(rewards)}]", remedy=remedy)


def _text(config: RunConfig, algorithm: Objective) -> None:
    """Text that the algorithm does not use is allowed: its loss is measured, but not trained on."""
    if algorithm.needs_text and config.pretrain.path is None:
        problem = "this algorithm mixes pretraining text in, and none is given"
        remedy = "set pretrain.path=<JSONL with a text a line>, or embedded:arithmetic-text pretrain.given_field=given"
        raise UserError("pretrain.path", problem, got="null", remedy=remedy)


# -- the teacher -------------------------------------------------------------------------------------------------------
TEACHER, TEACHER_ENGINE = "snapshot.teacher", "snapshot.teacher_engine"
TEACHERS_KEYS = {
    "model.path": TEACHER,
    "model.dtype": "snapshot.teacher_dtype",
    "model.quantization": "snapshot.teacher_quantization",
}
"""{key of the base: that of a teacher which is a separate model}."""


def teacher_is_meant() -> AbstractContextManager[None]:
    """Replaces the base's keys by the teacher's in UserErrors raised inside, also in their remedies."""

    def of_teacher(text: str) -> str:
        for base, own in TEACHERS_KEYS.items():
            text = text.replace(base, own)
        return text

    return model_rules.with_keys(of_teacher, of_teacher)


def _teacher(config: RunConfig, algorithm: Objective) -> None:
    snapshot = config.snapshot
    if algorithm.needs_teacher and snapshot.teacher == "none":
        problem = "this algorithm learns from a teacher's log-prob of each token"
        remedy = "give it an adapter's folder or run, a larger model's path, or base with snapshot.teacher_hint"
        raise UserError("snapshot.teacher", problem, got="none", remedy=remedy)
    if snapshot.teacher != "none" and not algorithm.needs_teacher:
        problem = "this algorithm has no use for a teacher"
        remedy = "set snapshot.teacher=none, or algorithm=opd"
        raise UserError("snapshot.teacher", problem, got=snapshot.teacher, remedy=remedy)
    if snapshot.teacher_hint is not None and snapshot.teacher == "none":
        problem = "only a teacher reads it, and snapshot.teacher is none"
        remedy = "set snapshot.teacher=base, or leave it out"
        raise UserError("snapshot.teacher_hint", problem, got=repr(snapshot.teacher_hint), remedy=remedy)
    if snapshot.teacher_hint is not None:
        _hint(snapshot.teacher_hint, has_environment=config.environment is not None)
    if algorithm.needs_teacher and config.generation.temperature != 1:
        problem = "the teacher's log-probs are compared with the student's at temperature 1"
        raise UserError("generation.temperature", problem, got=config.generation.temperature, remedy="use 1.0")
    _teacher_engine(config)
    if (settings := teacher_settings(snapshot, config.model)) is not None:
        with teacher_is_meant():
            model_rules.check_model(settings)
    if algorithm.learns_from_teacher_alone and config.resume is None and _is_the_first_policy(config):
        problem = "is what the policy starts as: the teacher would agree with it on every token, and nothing be learned"
        remedy = "set snapshot.teacher_hint, name another teacher, or set algorithm.reward_coef above 0"
        raise UserError("snapshot.teacher", problem, got=snapshot.teacher, remedy=remedy)


def _hint(hint: str, *, has_environment: bool) -> None:
    key, got = "snapshot.teacher_hint", repr(hint)
    require(hint.strip(), key, "is blank", got=got, remedy="use null for no hint")
    for braces in re.findall(r"\{[^{}]*\}", hint):
        remedy = f"use {ANSWER} for the prompt's answer, or leave the braces out"
        require(braces == ANSWER, key, f"has {braces}, which nothing is put in the place of", got=got, remedy=remedy)
    for brace in (brace for brace in "{}" if brace in hint.replace(ANSWER, "")):
        remedy = f"use {ANSWER} for the prompt's answer, or leave the brace out"
        raise UserError(key, f"has a {brace} without its partner", got=got, remedy=remedy)
    problem = "goes into prompts that are answered in one turn, and the environment has several"
    require(not has_environment, key, problem, got=got, remedy="leave it out, or set environment=null")


def _is_the_first_policy(config: RunConfig) -> bool:
    """Whether the teacher is the network that the policy of a new run starts as, and reads the same prompts."""
    snapshot, model, start = config.snapshot, config.model, start_of(config.lora)
    if snapshot.teacher_hint is not None:
        return False
    if start is not None:
        return snapshot.teacher_adapter is not None and _folder(snapshot.teacher_adapter) == _folder(start)
    if snapshot.teacher_model is None:
        return snapshot.teacher == "base"
    return model.revision is None and _folder(resolve_path(snapshot.teacher_model)) == _folder(resolve_path(model.path))


def _folder(path: str) -> Path:
    """The absolute path with links followed; a hub id becomes a path that no other id becomes."""
    return Path(path).expanduser().resolve()


def _teacher_engine(config: RunConfig) -> None:
    snapshot, key = config.snapshot, "snapshot.teacher_engine"
    what = f"an adapter on the run's base ({snapshot.teacher})" if snapshot.teacher_adapter else snapshot.teacher
    for name in ("teacher_dtype", "teacher_quantization"):
        value = getattr(snapshot, name)
        if value is not None and snapshot.teacher_model is None:
            problem = f"applies only to a teacher that is a separate model, and snapshot.teacher is {what}"
            remedy = "leave it out, or name a model's folder or hub id in snapshot.teacher"
            raise UserError(f"snapshot.{name}", problem, got=value, remedy=remedy)
    engine = config.generation.named(snapshot.teacher_engine)
    if not engine.teaches:
        return
    problem = f"computes a teacher that is a separate model, and snapshot.teacher is {what}"
    remedy = "set it to transformers, or name a model's folder or hub id in snapshot.teacher"
    require(snapshot.teacher_model is not None, key, problem, got=snapshot.teacher_engine, remedy=remedy)
    ranks = config.cluster.ranks
    problem = f"the teacher would be started in each of the {ranks} ranks, and {engine.title} serves one process"
    remedy = "set it to transformers, or cluster.ranks=1"
    require(ranks <= 1, key, problem, got=snapshot.teacher_engine, remedy=remedy)


def missing_engine(config: RunConfig, *, runs_here: bool) -> str | None:
    """A note that a planned run lacks its teacher's engine, or None; refuses that in a run that starts here."""
    name = config.snapshot.teacher_engine
    missing = config.generation.named(name).missing()
    if missing is None:
        return None
    remedy = missing.remedy.replace("generation=transformers", f"{TEACHER_ENGINE}=transformers")
    require(not runs_here, TEACHER_ENGINE, missing.problem, got=name, remedy=remedy)
    return f"{missing.problem} here, and the teacher needs it where the run is: {remedy}"


def check_teacher_engine(config: RunConfig, engine: str, device: str, *, runs_here: bool) -> None:
    """Checks that the teacher's engine can compute it on the trainer's device, next to the engine that samples."""
    snapshot, settings = config.snapshot, teacher_settings(config.snapshot, config.model)
    config.generation.named(snapshot.teacher_engine).check_teacher(
        device=device,
        quantized=settings is not None and settings.quantization is not None,
        share=snapshot.teacher_gpu_memory_utilization,
        samples_here=section_of(engine) == snapshot.teacher_engine and not config.cluster.engines,
        runs_here=runs_here,
    )


def check_teacher(config: RunConfig, tokenizer: RunTokenizer, longest_prompt: int, vocabulary: int) -> dict[str, str]:
    """The fingerprints of the teacher's model; empty if the teacher is not a separate model.

    Args:
        tokenizer: the student's.
        longest_prompt: number of tokens of the longest prompt that the teacher may read.
        vocabulary: number of token ids that the student may sample: the rows of its embedding.
    """
    from rlft.model.backbone import check_weights, load_tokenizer, read_config
    from rlft.plan.identity import fingerprints

    settings = teacher_settings(config.snapshot, config.model)
    if settings is None:
        return {}
    with teacher_is_meant():
        model, teacher_tokenizer = read_config(settings), load_tokenizer(settings)
    check_vocabulary(tokenizer, teacher_tokenizer, settings.path)
    rows = model.get_text_config().vocab_size  # also of ids that its tokenizer does not use
    problem = f"has token ids up to {rows - 1}, and the student may sample ids up to {vocabulary - 1}"
    remedy = "use a teacher whose config.json has a vocab_size as large as the student's"
    require(vocabulary <= rows, TEACHER, problem, got=settings.path, remedy=remedy)
    limit, longest = limit_of(model), longest_prompt + config.generation.max_tokens
    engine = config.generation.named(config.snapshot.teacher_engine)
    and_sampled = f" and the token that is sampled after it by {engine.title}" if engine.teaches else ""
    if limit is not None and longest + bool(and_sampled) > limit.tokens:
        problem = f"the longest row of {counted(longest, 'token')}{and_sampled} exceeds its {limit.words}"
        remedy = "lower prompts.max_tokens or generation.max_tokens, or use another teacher"
        raise UserError(TEACHER, problem, got=settings.path, remedy=remedy)
    with teacher_is_meant():
        check_weights(settings)
        return fingerprints(settings, "teacher")


def check_vocabulary(student: RunTokenizer, teacher: RunTokenizer, path: str) -> None:
    """Refuses a teacher whose vocabulary lacks a token of the student's, has another one, or gives it another id."""
    students, teachers = student.get_vocab(), teacher.get_vocab()
    differing = sorted(t for t in students.keys() | teachers.keys() if students.get(t) != teachers.get(t))
    if differing:
        ids = [str(vocabulary.get(differing[0], "none")) for vocabulary in (students, teachers)]
        example = f"{differing[0]!r} is {ids[0]} here and {ids[1]} there"
        problem = f"has another vocabulary: {counted(len(differing), 'other token')}, e.g. {example}"
        remedy = "use a teacher with the same tokenizer; of another one learn by its samples (rlft sample, rlft sft)"
        raise UserError(TEACHER, problem, got=path, remedy=remedy)


# -- the folders that roles start from ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A folder, the config key that names it, and how the run uses it: as it says here, the policy starts from it."""

    key: str
    path: str
    has_adapter: bool = True  # whether its adapter is used
    has_head: bool = False  # whether its scalar head is used
    # Whether a role of the run starts from its adapter, and so has its rank, alpha and targets; else that is frozen.
    starts_role: bool = True
    of_any_role: bool = False  # whether the adapter may have been saved from any role, not from a policy alone
    words: str = ""  # what the key may say besides a folder, such as "base or reward"; empty for none


def uses(config: RunConfig, rewards: Mapping[str, RewardSpec]) -> list[Use]:
    """The adapter folders that this config names, in the order of its sections."""
    used, snapshot, critic = use_of_policy("lora.path", start_of(config.lora)), config.snapshot, config.critic
    if snapshot.reference not in ("none", "base", "copy", "ema"):
        words = "none, base, copy or ema"
        used.append(Use(key="snapshot.reference", path=snapshot.reference, starts_role=False, words=words))
    if snapshot.teacher_adapter is not None:
        used.append(Use(key="snapshot.teacher", path=snapshot.teacher_adapter, starts_role=False))
    if critic.kind is not CriticKind.none and critic.init not in ("base", "reward"):
        own, words = critic.kind is CriticKind.adapter, "base or reward"
        used.append(
            Use(key="critic.init", path=critic.init, has_adapter=own, has_head=True, starts_role=own, words=words)
        )
    return [*used, *uses_of_rewards(rewards)]


def use_of_policy(key: str, path: str | None) -> list[Use]:
    """The adapter folder that a policy starts from, in a list; an empty one if none is named."""
    return [] if path is None else [Use(key=key, path=path)]


def uses_of_rewards(rewards: Mapping[str, RewardSpec]) -> list[Use]:
    """The adapter folders of learned rewards."""
    return [
        Use(key=f"reward.{spec.name}.path", path=spec.kwargs["path"], has_head=True)
        for spec in rewards.values()
        if spec.runs_in_trainer and spec.kwargs["path"] is not None and is_adapter(spec.kwargs["path"])
    ]


def fingerprints_of(used: Sequence[Use]) -> dict[str, str]:
    """{<key>_fingerprint: fingerprint of the content of the folder that it names}."""
    return {f"{use.key}_fingerprint": content_fingerprint(use.path) for use in used}


def check_folders(used: Sequence[Use], lora: LoraSettings | None) -> None:
    """Checks that each folder has the files that its use needs, and the run's rank if a role starts from it.

    lora: None where all weights are trained, so that no use is of an adapter.
    """
    for use in used:
        _check_exists(use)
        if use.has_adapter:
            assert lora is not None, "plan/roles.py refuses adapters next to all weights"
            _check_fields(lora, use, check_adapter_folder(use.path, use.key))
        if use.has_head:
            check_head(use.path, use.key)
        role = read_record(use.path, use.key).get("role", POLICY)
        if not (use.of_any_role or use.has_head) and role not in (POLICY, OLD, REFERENCE):
            problem = f"holds the adapter of the role {role}, which is not a policy"
            raise UserError(use.key, problem, got=use.path, remedy="point it at the adapter of a policy")


def _check_exists(use: Use) -> None:
    if use.path and Path(use.path).expanduser().is_dir():
        return
    if use.words:
        close = closest(use.path, use.words.replace(" or ", ", ").split(", "))
        problem = f"is neither {use.words} nor an existing folder"
        remedy = f"did you mean {close}?" if close else "use one of these"
    else:
        problem, remedy = "there is no such folder", "point it at a PEFT adapter folder"
    raise UserError(use.key, problem, got=use.path or "nothing", remedy=remedy)


VARIANTS = ("lora_bias", "rank_pattern", "alpha_pattern")
"""Fields of adapter_config.json with which tensors compute a different function from that of a role made by rlft."""


def _check_fields(lora: LoraSettings, use: Use, fields: Mapping[str, Any]) -> None:
    """Compares adapter_config.json with the run's `lora` section."""
    check_shape(fields, use.path, use.key)
    if not use.starts_role:
        return
    for name in VARIANTS:
        problem, remedy = f"adapters with {name} are not supported", "use an adapter without it"
        require(not fields.get(name), use.key, problem, got=use.path, remedy=remedy)
    for name, in_adapter in switches_of(fields).items():  # the `lora` section can set these
        in_run = getattr(lora, name)
        setting = f"{name}={str(in_adapter).lower()}"
        problem = f"the adapter at {use.key} was trained with {setting} and would be another function"
        remedy = f"set lora.{setting}, or another {use.key}"
        require(in_adapter == in_run, f"lora.{name}", problem, got=str(in_run).lower(), remedy=remedy)
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    problem, remedy = f"the adapter at {use.key} has rank {rank}", f"set lora.rank={rank}, or another {use.key}"
    require(rank == lora.rank, "lora.rank", problem, got=lora.rank, remedy=remedy)
    problem = f"the adapter at {use.key} was trained with {alpha} and would be another function"
    remedy = f"set lora.alpha={alpha}, or another {use.key}"
    require(alpha == lora.alpha, "lora.alpha", problem, got=lora.alpha, remedy=remedy)


# -- whether adapters are for this base --------------------------------------------------------------------------------
def check_adapters(
    used: Sequence[Use],
    lora: LoraSettings | None,
    settings: ModelConfig,
    base: Mapping[str, str],
    model: PreTrainedConfig,
) -> None:
    """Checks that each adapter was made for the base of these fingerprints and config; called after `check_folders`."""
    from rlft.model.experts import mixture_of

    names: frozenset[str] = frozenset()
    if lora is not None and (lora.experts or lora.router):
        mixture = mixture_of(model_rules.empty_model(settings, model))
        names = frozenset(mixture.parameters(experts=lora.experts, router=lora.router))
    for use in used:
        # `rlft sample` (adapter=) samples as the run did that trained it.
        changed = differing(read_record(use.path, use.key), base)
        if changed := changed.without(() if use.key == "adapter" else OF_SAMPLES):
            raise _other_base(use, f"its rlft.json says it was made for a base with other {changed.both}")
        if use.has_head:
            _check_head(use, model)
        if lora is not None and use.has_adapter:
            others = _check_tensors(lora, settings, use, model)
            if names and others and names != others:  # which PEFT does not take on one base
                problem = f"adapts other experts or routers ({min(names ^ others)}) than another adapter of this run"
                remedy = "use one that adapts the same (lora.experts and lora.router), or none"
                raise UserError(use.key, problem, got=use.path, remedy=remedy)
            names = names or others


def _check_head(use: Use, model: PreTrainedConfig) -> None:
    shapes = tensor_shapes(use.path, use.key, HEAD)
    for name, shape in {"weight": (1, model.get_text_config().hidden_size), "bias": (1,)}.items():
        if shapes.get(name) != shape:
            actual = f"{name} {shapes[name]}" if name in shapes else f"no {name}"
            raise _other_base(use, f"its head has {actual}, and this base takes {shape}")


def _check_tensors(lora: LoraSettings, settings: ModelConfig, use: Use, model: PreTrainedConfig) -> frozenset[str]:
    """The parameters besides linear layers that this adapter is on, if its tensors are those of its config."""
    from rlft.model.lora_config import linear_layers, modules_of, named_inside, without_adapter
    from rlft.model.text_model import names_of

    empty = model_rules.empty_model(settings, model)
    modules = {name for name, _ in empty.named_modules()}
    names = names_of(empty)
    shapes = names.all_inside(tensor_shapes(use.path, use.key))
    for name in sorted(shapes):
        if ".lora_" not in name:
            problem = f"its tensor {name} is not LoRA's, and would be written into the base, which all roles share"
            remedy = "save it again with PEFT's save_embedding_layers=False if that tensor was not trained; if it was, "
            remedy += "merge the adapter into its base, and set model.path to the result"
            raise UserError(use.key, problem, got=use.path, remedy=remedy)
        if not adapted_modules([name]) <= modules:
            raise _other_base(use, f"this base has no module for its tensor {name}")
    layers = linear_layers(empty).keys() - without_adapter(empty, lora).keys()
    config = _lora_config(lora, use, empty)
    if names.prefixes and not use.starts_role:
        named_inside(config, names, shapes)
    expected = model_rules.fresh_shapes(empty, config)
    for name in sorted(shapes.keys() & expected.keys()):
        if shapes[name] != expected[name]:
            raise _other_base(use, f"its tensor {name} is {shapes[name]}, and this base takes {expected[name]}")
    for name in sorted(shapes.keys() ^ expected.keys()):
        source = "lora.target_modules" if use.starts_role else "its adapter_config.json"
        problem = f"{'it has' if name in shapes else 'it lacks'} the tensor {name}, unlike what {source} says"
        remedy = "save it again"
        if use.starts_role:
            modules = adapted_modules(shapes) - modules_of(config.target_parameters)
            remedy = f"set {override('lora.target_modules', targets_of(modules, layers))}"
        raise UserError(use.key, problem, got=use.path, remedy=remedy)
    return frozenset(config.target_parameters or ())


def _lora_config(lora: LoraSettings, use: Use, empty: PreTrainedModel) -> LoraConfig:
    """The PEFT config of the role that the adapter is loaded into."""
    from rlft.model.lora_config import folder_config, lora_config

    if use.starts_role:
        return lora_config(lora, empty)
    try:
        return folder_config(check_adapter_folder(use.path, use.key), empty)
    except (TypeError, ValueError) as error:
        problem = f"PEFT does not take its adapter_config.json ({str(error).splitlines()[0][:200]})"
        raise UserError(use.key, problem, got=use.path, remedy="save it again") from None


def targets_of(modules: Collection[str], layers: Iterable[str]) -> list[str] | str:
    r"""A lora.target_modules that stands for these modules alone, among these linear layers of a model.

    >>> layers = [f"layers.{n}.{name}" for n in range(3) for name in ("q", "k", "v")]
    >>> targets_of([f"layers.{n}.q" for n in range(3)], layers)
    ['q']
    >>> targets_of(["layers.0.q", "layers.2.q", "layers.0.k", "layers.2.k", "layers.1.v"], layers)
    'layers\\.(0|2)(\\.k|\\.q)|layers\\.(1)(\\.v)'
    """
    ends = sorted({name.rpartition(".")[2] for name in modules})
    if {name for name in layers if name.rpartition(".")[2] in ends} == set(modules):
        return ends
    numbers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in modules:
        before, number, after = re.fullmatch(r"(\D*)(\d*)(.*)", name).groups()  # type: ignore[union-attr]
        numbers[before, after].append(number)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (before, after), found in sorted(numbers.items()):
        alike[before, "|".join(sorted(found, key=lambda n: (len(n), n)))].append(re.escape(after))
    return "|".join(f"{re.escape(before)}({n})({'|'.join(afters)})" for (before, n), afters in sorted(alike.items()))


def _other_base(use: Use, problem: str) -> UserError:
    return UserError(use.key, problem, got=use.path, remedy="use the base it was made for, or an adapter for this one")


def notes_of_adapters(used: Sequence[Use], settings: ModelConfig, base: Mapping[str, str]) -> list[str]:
    """A sentence for each thing that is odd about these folders. base: the fingerprints of the run's base."""
    return [f"{use.key}: {note}" for use in used if use.has_adapter for note in _notes(use, settings, base)]


def _notes(use: Use, settings: ModelConfig, base: Mapping[str, str]) -> Iterator[str]:
    record, fields = read_record(use.path, use.key), check_adapter_folder(use.path, use.key)
    changed = differing(record, base)
    if changed.parts and changed.parts.keys() <= set(OF_SAMPLES):
        yield f"the base of its run had other {changed.both}"
    elif template_in(Path(use.path).expanduser()) not in (None, base.get(name_of("base", "template"))):
        yield f"the {PARTS['template']} in its folder is not that of model.path, which the run uses"
    named = fields.get("base_model_name_or_path")
    if named and not record.get("base_fingerprint") and not _same_name(named, settings.path):
        yield f"its adapter_config.json names the base {named}, and model.path is {settings.path}"
    if not fields.get("use_dora") and not has_head(use.path) and does_nothing(use.path, use.key):
        yield "all of its lora_B are 0, so that it changes nothing of the base"


def _same_name(named: Any, path: str) -> bool:
    """Whether both may name one model: by the last part, as in Qwen/Qwen3-0.6B and models/Qwen3-0.6B."""
    first, second = Path(str(named).removeprefix(EMBEDDED)), Path(resolve_path(path))
    return first.name.lower() == second.name.lower() or (first.exists() and first.resolve() == second.resolve())
