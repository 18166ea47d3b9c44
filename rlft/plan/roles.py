"""Rules for the roles beside the policy and for what trains them: snapshots, critic, learned rewards, pretraining text.

A teacher that is a separate model has rules about its config and tokenizer, too; its weights are never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlft.algorithm.objective import Objective
from rlft.config.model import ANSWER, CriticKind, is_adapter, resolve_path, teacher_settings
from rlft.config.schema import RunConfig, section_of
from rlft.generation.vllm.engine import NO_BITSANDBYTES, obstacle, reads_bitsandbytes, why_not_invariant
from rlft.model.positions import limit_of
from rlft.plan.learner_rules import start_of
from rlft.plan.model_rules import check_machine, check_model
from rlft.plan.scoring_rules import read_environment
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.system.terminal import pip_install
from rlft.types import UserError, counted, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_roles(
    config: RunConfig, algorithm: Objective, rewards: Mapping[str, RewardSpec], *, trains: bool = True
) -> None:
    """Checks that the config has all roles that the algorithm needs, and no role that it does not use; reads no file.

    trains: False if the policy is only evaluated, which needs no teacher.
    """
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
            check_model(settings)
    if algorithm.learns_from_teacher_alone and config.resume is None and _is_the_first_policy(config):
        problem = "is what the policy starts as: the teacher would agree with it on every token, and nothing be learned"
        remedy = "set snapshot.teacher_hint, name another teacher, or set algorithm.reward_coef above 0"
        raise UserError("snapshot.teacher", problem, got=snapshot.teacher, remedy=remedy)


def _hint(hint: str, *, has_environment: bool) -> None:
    key, got = "snapshot.teacher_hint", repr(hint)
    require(hint.strip(), key, "is blank", got=got, remedy="use null for no hint")
    for braces in (braces for braces in re.findall(r"\{[^{}]*\}", hint) if braces != ANSWER):
        remedy = f"use {ANSWER} for the prompt's answer, or leave the braces out"
        raise UserError(key, f"has {braces}, which nothing is put in the place of", got=got, remedy=remedy)
    for brace in (brace for brace in "{}" if brace in re.sub(r"\{[^{}]*\}", "", hint)):
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
    if snapshot.teacher_engine == "transformers":
        return
    problem = f"computes a teacher that is a separate model, and snapshot.teacher is {what}"
    remedy = "set it to transformers, or name a model's folder or hub id in snapshot.teacher"
    require(snapshot.teacher_model is not None, key, problem, got=snapshot.teacher_engine, remedy=remedy)
    problem = f"the teacher would be started in each of the {config.cluster.ranks} ranks, and vLLM serves one process"
    remedy = "set it to transformers, or cluster.ranks=1"
    require(config.cluster.ranks <= 1, key, problem, got=snapshot.teacher_engine, remedy=remedy)


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
    if path is None or not is_adapter(path):
        problem = f"`reward` is an adapter's folder, and reward.{name}.path={'null' if path is None else path} is none"
        remedy = f"set reward.{name}.path=<folder of a reward adapter>, or critic.init=base"
        raise UserError("critic.init", problem, got="reward", remedy=remedy)


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
    if not is_adapter(spec.kwargs["path"]):
        problem = f"only an adapter is trained, and reward.{name}.path={spec.kwargs['path']} is a network of its own"
        remedy = f"set reward.{name}.path=null or the folder of a reward adapter, or reward_model.refresh_every=0"
        raise UserError("reward_model.refresh_every", problem, got=refresh_every, remedy=remedy)
    rules = [other for other in rewards if other not in learned]
    if labels not in rules:
        problem = "must name the rule reward that says which of two siblings is better"
        remedy = f"use {' or '.join(rules)}" if rules else "put one in: reward=[exact_match,...]"
        raise UserError("reward_model.labels", problem, got="null" if labels is None else labels, remedy=remedy)
    problem = "learns from pairs of siblings, and group_size=1 has none"
    remedy = "set group_size=8, or reward_model.refresh_every=0"
    require(config.group_size != 1, "reward_model.refresh_every", problem, got=refresh_every, remedy=remedy)


TEACHER, TEACHER_ENGINE = "snapshot.teacher", "snapshot.teacher_engine"
TEACHERS_KEYS = {
    "model.path": TEACHER,
    "model.dtype": "snapshot.teacher_dtype",
    "model.quantization": "snapshot.teacher_quantization",
}
"""{key of the base: that of a teacher which is a separate model}."""


@contextmanager
def teacher_is_meant() -> Iterator[None]:
    """Replaces the base's keys by the teacher's in UserErrors raised inside, also in their remedies."""
    try:
        yield
    except UserError as error:
        key, remedy = error.key, error.remedy
        for base, own in TEACHERS_KEYS.items():
            key, remedy = key.replace(base, own), remedy.replace(base, own)
        raise UserError(key, error.problem, got=error.got, remedy=remedy) from None


def check_top_k(top_k: int, vocabulary: int) -> None:
    """Refuses more tokens of the teacher than the student's vocabulary has; a teacher never has fewer (see below)."""
    problem = f"is more than the model's vocabulary of {vocabulary} tokens"
    require(top_k <= vocabulary, "algorithm.top_k", problem, got=top_k, remedy="use for instance 16")


def missing_engine(config: RunConfig, *, runs_here: bool) -> str | None:
    """A note that a planned run lacks its teacher's engine, or None; refuses that in a run that starts here."""
    missing = obstacle() if config.snapshot.teacher_engine == "vllm" else None
    if missing is None:
        return None
    remedy = missing.remedy.replace("generation=transformers", f"{TEACHER_ENGINE}=transformers")
    require(not runs_here, TEACHER_ENGINE, missing.problem, got="vllm", remedy=remedy)
    return f"{missing.problem} here, and the teacher needs it where the run is: {remedy}"


def check_teachers_machine(config: RunConfig, *, runs_here: bool) -> None:
    """Checks that this machine can hold the weights of a teacher that is a separate model, as `check_machine`."""
    settings = teacher_settings(config.snapshot, config.model)
    if settings is not None:
        with teacher_is_meant():
            check_machine(settings, runs_here=runs_here)


def check_teacher_engine(config: RunConfig, engine: str, device: str, *, runs_here: bool) -> None:
    """Checks that the trainer's device can compute as vLLM does for a teacher, beside the engine that samples."""
    snapshot, vllm = config.snapshot, config.generation.engines["vllm"]
    if snapshot.teacher_engine != "vllm":
        return
    settings = teacher_settings(snapshot, config.model)
    quantized = settings is not None and settings.quantization is not None
    if runs_here and quantized and not reads_bitsandbytes():
        remedy = f"use transformers, or snapshot.teacher_quantization=none, or {pip_install('vllm<0.30')}"
        raise UserError("snapshot.teacher_engine", NO_BITSANDBYTES, got="vllm", remedy=remedy)
    if vllm.batch_invariant and runs_here and (why := why_not_invariant(device)) is not None:
        raise UserError("generation.vllm.batch_invariant", why, got="true", remedy="set it to false")
    shares = snapshot.teacher_gpu_memory_utilization + vllm.gpu_memory_utilization
    if device.startswith("cuda") and section_of(engine) == "vllm" and not config.cluster.engines and shares > 1:
        key, got = "snapshot.teacher_gpu_memory_utilization", snapshot.teacher_gpu_memory_utilization
        policys = f"generation.vllm.gpu_memory_utilization={vllm.gpu_memory_utilization:g}"
        remedy = "lower both, so that the trainer has room beside them"
        raise UserError(key, f"with {policys} it is more than a device has", got=got, remedy=remedy)


def check_teacher(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, longest_prompt: int, vocabulary: int
) -> dict[str, str]:
    """The fingerprints of the teacher's model; empty if the teacher is not a separate model.

    Args:
        config: the typed config.
        tokenizer: the student's.
        longest_prompt: number of tokens of the longest prompt that the teacher may read.
        vocabulary: number of token ids that the student may sample: the rows of its embedding.
    """
    from rlft.model.backbone import check_weights, load_tokenizer, read_config
    from rlft.model.identity import fingerprints

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
    and_sampled = " and the token that vLLM samples after it" if config.snapshot.teacher_engine == "vllm" else ""
    if limit is not None and longest + bool(and_sampled) > limit.tokens:
        problem = f"the longest row of {counted(longest, 'token')}{and_sampled} exceeds its {limit.words}"
        remedy = "lower prompts.max_tokens or generation.max_tokens, or use another teacher"
        raise UserError(TEACHER, problem, got=settings.path, remedy=remedy)
    with teacher_is_meant():
        check_weights(settings)
        return fingerprints(settings, "teacher")


def check_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, path: str) -> None:
    """Refuses a teacher whose vocabulary lacks a token of the student's, has another one, or gives it another id."""
    students, teachers = student.get_vocab(), teacher.get_vocab()
    differing = sorted(t for t in students.keys() | teachers.keys() if students.get(t) != teachers.get(t))
    if differing:
        ids = [str(vocabulary.get(differing[0], "none")) for vocabulary in (students, teachers)]
        example = f"{differing[0]!r} is {ids[0]} here and {ids[1]} there"
        problem = f"has another vocabulary: {counted(len(differing), 'other token')}, e.g. {example}"
        remedy = "use a teacher with the same tokenizer; of another one learn by its samples (rlft sample, rlft sft)"
        raise UserError(TEACHER, problem, got=path, remedy=remedy)
