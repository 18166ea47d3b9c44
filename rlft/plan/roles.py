"""Rules for the roles beside the policy and for what trains them: snapshots, critic, learned rewards, pretraining text.

They read no file; `rlft.plan.adapters` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rlft.algorithm.objective import Objective
from rlft.config.model import ANSWER, CriticKind, is_adapter, resolve_path, teacher_settings
from rlft.config.schema import RunConfig, section_of
from rlft.plan.environments import environment_of
from rlft.plan.rules import check_model
from rlft.plan.teachers import teacher_is_meant
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.types import UserError


def check_roles(
    config: RunConfig, algorithm: Objective, rewards: Mapping[str, RewardSpec], *, trains: bool = True
) -> None:
    """Checks that the config has all roles that the algorithm needs, and no role that it does not use.

    Args:
        config: the typed config.
        algorithm: the config's algorithm.
        rewards: the config's rewards.
        trains: False if the policy is only evaluated, which needs no teacher.

    Raises:
        UserError: with the key, what is wrong and what to do.
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
        raise UserError(
            "snapshot.reference",
            "algorithm.kl_coef is above 0, which needs a reference policy",
            got="none",
            remedy="set snapshot.reference=base, copy, ema or an adapter folder, or algorithm.kl_coef=0",
        )
    if snapshot.refresh_every and snapshot.reference != "copy":
        raise UserError(
            "snapshot.refresh_every",
            f"only a `copy` reference is refreshed, and snapshot.reference is {snapshot.reference}",
            got=snapshot.refresh_every,
            remedy="set snapshot.reference=copy, or snapshot.refresh_every=0",
        )
    if snapshot.reference == "ema" and snapshot.ema_decay is None:
        raise UserError(
            "snapshot.ema_decay",
            "an `ema` reference needs the share of it that stays, per step",
            got="null",
            remedy="use for instance 0.99, which follows the policy in about 100 steps",
        )
    if snapshot.ema_decay is not None and snapshot.reference != "ema":
        raise UserError(
            "snapshot.ema_decay",
            f"only an `ema` reference follows the policy, and snapshot.reference is {snapshot.reference}",
            got=snapshot.ema_decay,
            remedy="set snapshot.reference=ema, or snapshot.ema_decay=null",
        )
    if snapshot.ema_decay == 1:
        raise UserError(
            "snapshot.ema_decay",
            "all of the reference stays, so it never moves",
            got=snapshot.ema_decay,
            remedy="use for instance 0.99, or snapshot.reference=copy for one that stays where the run began",
        )


def _teacher(config: RunConfig, algorithm: Objective) -> None:
    snapshot = config.snapshot
    if algorithm.needs_teacher and snapshot.teacher == "none":
        raise UserError(
            "snapshot.teacher",
            "this algorithm learns from a teacher's log-prob of each token",
            got="none",
            remedy="give it an adapter's folder or run, a larger model's path, or base with snapshot.teacher_hint",
        )
    if snapshot.teacher != "none" and not algorithm.needs_teacher:
        raise UserError(
            "snapshot.teacher",
            "this algorithm has no use for a teacher",
            got=snapshot.teacher,
            remedy="set snapshot.teacher=none, or algorithm=opd",
        )
    if snapshot.teacher_hint is not None and snapshot.teacher == "none":
        raise UserError(
            "snapshot.teacher_hint",
            "only a teacher reads it, and snapshot.teacher is none",
            got=repr(snapshot.teacher_hint),
            remedy="set snapshot.teacher=base, or leave it out",
        )
    if snapshot.teacher_hint is not None and not snapshot.teacher_hint.strip():
        raise UserError(
            "snapshot.teacher_hint", "is blank", got=repr(snapshot.teacher_hint), remedy="use null for no hint"
        )
    odd = [braces for braces in re.findall(r"\{[^{}]*\}", snapshot.teacher_hint or "") if braces != ANSWER]
    if odd:
        raise UserError(
            "snapshot.teacher_hint",
            f"has {odd[0]}, which nothing is put in the place of",
            got=repr(snapshot.teacher_hint),
            remedy=f"use {ANSWER} for the prompt's answer, or leave the braces out",
        )
    lone = [brace for brace in "{}" if brace in re.sub(r"\{[^{}]*\}", "", snapshot.teacher_hint or "")]
    if lone:
        raise UserError(
            "snapshot.teacher_hint",
            f"has a {lone[0]} without its partner",
            got=repr(snapshot.teacher_hint),
            remedy=f"use {ANSWER} for the prompt's answer, or leave the brace out",
        )
    if snapshot.teacher_hint is not None and config.environment is not None:
        raise UserError(
            "snapshot.teacher_hint",
            "goes into prompts that are answered in one turn, and the environment has several",
            got=repr(snapshot.teacher_hint),
            remedy="leave it out, or set environment=null",
        )
    if algorithm.needs_teacher and config.generation.temperature != 1:
        raise UserError(
            "generation.temperature",
            "the teacher's log-probs are compared with the student's at temperature 1",
            got=config.generation.temperature,
            remedy="use 1.0",
        )
    _teacher_engine(config)
    if (settings := teacher_settings(snapshot, config.model)) is not None:
        with teacher_is_meant():
            check_model(settings)
    if algorithm.learns_from_teacher_alone and config.resume is None and _is_the_first_policy(config):
        raise UserError(
            "snapshot.teacher",
            "is what the policy starts as: the teacher would agree with it on every token, and nothing be learned",
            got=snapshot.teacher,
            remedy="set snapshot.teacher_hint, name another teacher, or set algorithm.reward_coef above 0",
        )


def _is_the_first_policy(config: RunConfig) -> bool:
    """Whether the teacher is the network that the policy of a new run starts as, and reads the same prompts."""
    snapshot, model, start = config.snapshot, config.model, config.lora.path
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
    if snapshot.teacher_model is None:
        raise UserError(
            key,
            f"computes a teacher that is a separate model, and snapshot.teacher is {what}",
            got=snapshot.teacher_engine,
            remedy="set it to transformers, or name a model's folder or hub id in snapshot.teacher",
        )
    if config.cluster.ranks > 1:
        raise UserError(
            key,
            f"the teacher would be started in each of the {config.cluster.ranks} ranks, and vLLM serves one process",
            got=snapshot.teacher_engine,
            remedy="set it to transformers, or cluster.ranks=1",
        )


def _steps(config: RunConfig, algorithm: Objective, rewards: Mapping[str, RewardSpec]) -> None:
    engine = config.generation.engines.get(section_of(config.generation.engine))
    environment = environment_of(config)
    if (engine is not None and engine.rewards_turns) or (environment is not None and environment.rewards_turns):
        return
    if algorithm.needs_steps and not any(spec.scores_steps and spec.weight for spec in rewards.values()):
        raise UserError(
            "reward",
            "this algorithm learns from scores of single steps, and no reward with a weight gives any",
            got=f"[{','.join(rewards)}]",
            remedy=f"add one, for instance reward=[{','.join([*rewards, 'equations'])}]",
        )


def _text(config: RunConfig, algorithm: Objective) -> None:
    """Text that the algorithm does not use is allowed: its loss is measured, but not trained on."""
    if algorithm.needs_text and config.pretrain.path is None:
        raise UserError(
            "pretrain.path",
            "this algorithm mixes pretraining text in, and none is given",
            got="null",
            remedy="set pretrain.path=<JSONL with a text a line>, "
            "or embedded:arithmetic-text pretrain.given_field=given",
        )


def _critic(config: RunConfig, algorithm: Objective) -> None:
    critic = config.critic
    if algorithm.needs_values and critic.kind is CriticKind.none:
        raise UserError(
            "critic.kind",
            "this algorithm needs values, and only a critic gives them",
            got="none",
            remedy="set critic.kind=adapter (its own LoRA), or shared (a value head on the policy's features)",
        )
    if critic.kind is not CriticKind.none and not algorithm.needs_values:
        raise UserError(
            "critic.kind",
            "this algorithm has no use for a critic's values",
            got=critic.kind,
            remedy="set critic.kind=none, or algorithm=ppo or a2c",
        )
    if critic.kind is CriticKind.none:
        unused = {"init": "base", "warmup_steps": 0, "normalize_values": False}
        for name in (name for name, unset in unused.items() if getattr(critic, name) != unset):
            got = str(getattr(critic, name)).lower() if name == "normalize_values" else getattr(critic, name)
            problem = "has no effect with critic.kind=none"
            raise UserError(
                f"critic.{name}", problem, got=got, remedy="set critic.kind=adapter or shared, or leave it out"
            )
    elif critic.warmup_steps >= config.steps:
        raise UserError(
            "critic.warmup_steps",
            f"the policy would never learn, the run has steps={config.steps}",
            got=critic.warmup_steps,
            remedy="use fewer, or more steps",
        )


def _critic_init(config: RunConfig, learned: Mapping[str, RewardSpec]) -> None:
    if config.critic.init != "reward":
        return
    if len(learned) != 1:
        raise UserError(
            "critic.init",
            f"`reward` is the adapter of the one learned reward, and there are {len(learned)}",
            got="reward",
            remedy="set reward=[...,learned] reward.learned.path=<folder>, or critic.init=<that folder>",
        )
    [(name, spec)] = learned.items()
    path = spec.kwargs["path"]
    if path is None or not is_adapter(path):
        raise UserError(
            "critic.init",
            f"`reward` is an adapter's folder, and reward.{name}.path={'null' if path is None else path} is none",
            got="reward",
            remedy=f"set reward.{name}.path=<folder of a reward adapter>, or critic.init=base",
        )


def _reward_model(config: RunConfig, rewards: Mapping[str, RewardSpec], learned: Mapping[str, RewardSpec]) -> None:
    """A learned reward that the run trains must be an adapter with labels; a new one must be trained."""
    refresh_every, labels = config.reward_model.refresh_every, config.reward_model.labels
    if not refresh_every:
        for name in (name for name, spec in learned.items() if spec.kwargs["path"] is None):
            raise UserError(
                f"reward.{name}.path",
                "an untrained head scores every completion 0, and reward_model.refresh_every=0 never trains it",
                got="null",
                remedy="give it a folder, or set for instance reward_model.refresh_every=10 "
                "reward_model.labels=<a rule reward>",
            )
        return
    if not learned:
        return  # a recipe may say how a learned reward would be trained, if the command line adds one
    if len(learned) > 1:
        raise UserError(
            "reward_model.refresh_every",
            f"trains the one learned reward, and there are {len(learned)}",
            got=refresh_every,
            remedy="leave all but one out, or set reward_model.refresh_every=0",
        )
    [(name, spec)] = learned.items()
    if not is_adapter(spec.kwargs["path"]):
        raise UserError(
            "reward_model.refresh_every",
            f"only an adapter is trained, and reward.{name}.path={spec.kwargs['path']} is a network of its own",
            got=refresh_every,
            remedy=f"set reward.{name}.path=null or the folder of a reward adapter, or reward_model.refresh_every=0",
        )
    rules = [other for other in rewards if other not in learned]
    if labels not in rules:
        raise UserError(
            "reward_model.labels",
            "must name the rule reward that says which of two siblings is better",
            got="null" if labels is None else labels,
            remedy=f"use {' or '.join(rules)}" if rules else "put one in: reward=[exact_match,...]",
        )
    if config.group_size == 1:
        raise UserError(
            "reward_model.refresh_every",
            "learns from pairs of siblings, and group_size=1 has none",
            got=refresh_every,
            remedy="set group_size=8, or reward_model.refresh_every=0",
        )
