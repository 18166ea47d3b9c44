"""What makes trials comparable: a number of the last evaluation, which is measured alike in all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlft.algorithm.ops.aggregate import pass_sizes
from rlft.config import command as commands
from rlft.config.choices import choice_remedy
from rlft.config.instantiate import locate
from rlft.config.trainer import NEVER
from rlft.logger.jsonl import EVALUATIONS, read_lines, silent
from rlft.logger.loggers import is_declared
from rlft.plan.run_plan import Plan
from rlft.types import UserError, require

REWARDS = "eval/reward/"
"""The beginning of metrics that are a reward's mean, whatever its name."""
IN_UNITS_OF_THE_LOSS = ("eval/loss", "eval/margin")
"""Metrics of `rlft dpo` that another loss, another beta or another reference measures in another unit."""
TEXT_OF_PRETRAINING = ("path", "field", "given_field", "max_tokens", "held_out")
"""Keys of `pretrain` that decide which text eval/pretrain_loss is measured on."""
OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "include_stop_str_in_output")
"""Keys of `generation` that say how a policy is sampled when it is evaluated, and where its text ends.

`max_tokens` is not among them: it is part of what a run learns with, like the limits of its environment."""
PROMPTS = "held_out_fingerprint"
"""The key of a fingerprint of all held-out prompts and their tokens. Trials need only the same first prompts, whose
tokens may differ."""


def measured_by(plain: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """{key: value} of what decides how a run is measured, which is the same in all trials of a study."""
    evaluation = plain.get("eval") or {}
    values = {f"eval.{name}": value for name, value in evaluation.items()}
    rewards = plain.get("reward") or {}
    if rewards:
        first = next(iter(rewards))
        values["reward"] = first
        for name in (name for name in rewards if name in (first, metric.removeprefix(REWARDS))):
            values[f"reward.{name}"] = {key: value for key, value in rewards[name].items() if key != "weight"}
    if plain.get("command") == "dpo" and metric in IN_UNITS_OF_THE_LOSS:
        loss = dict(plain["loss"])
        needs_reference = locate(loss["_target_"], "loss._target_").needs_reference
        values |= {"loss": loss.pop("_target_"), **{f"loss.{name}": value for name, value in loss.items()}}
        values["snapshot.reference"] = reference = plain["snapshot"]["reference"]
        if needs_reference and reference in ("auto", "copy"):  # the policy as it begins
            values["lora.path"] = (plain["lora"] or {}).get("path")
    if metric == "eval/pretrain_loss":
        values |= {f"pretrain.{name}": plain["pretrain"].get(name) for name in TEXT_OF_PRETRAINING}
    if "generation" in plain:
        sampling = [name for name in OF_SAMPLING if name != "temperature" or evaluation.get(name) is None]
        values |= {f"generation.{name}": plain["generation"].get(name) for name in sampling}
    if "scoring" in plain:
        values["scoring.on_error"] = plain["scoring"].get("on_error")
    return values


def check_measured_alike(first: Mapping[str, Any], other: Mapping[str, Any], metric: str) -> None:
    """Refuses plain configs of which trials would be measured differently by this metric."""
    before, after = measured_by(first, metric), measured_by(other, metric)
    for key in (key for key in {**before, **after} if before.get(key) != after.get(key)):
        problem = "decides how a run is measured, so that trials could not be compared"
        remedy = "give it one value"
        if key == "generation.temperature":
            remedy = "give it one value, or evaluate all alike, with eval.temperature=1"
        raise UserError(key, problem, got=f"{before.get(key)} and {after.get(key)}", remedy=remedy)


WITHOUT_SAMPLES = {
    "sft": ("eval/loss",),
    "rm": ("accuracy", "eval/loss"),
    "dpo": ("accuracy", "eval/loss", "eval/margin", "eval/chosen_logprob"),
}
"""What evaluations of these commands have, whatever is sampled besides."""


def check_evaluates(command: str) -> None:
    """Refuses a command whose runs have no evaluations."""
    evaluates = "eval" in {field.name for field in fields(commands.named(command).root)}
    problem = f"trials are compared by what evaluations measure, and rlft {command} has none"
    require(evaluates, "sweep", problem, got="optuna", remedy="leave every sweep key out to try all values")


def check_metric(metric: str, plain: Mapping[str, Any]) -> None:
    """Refuses a metric that evaluations of this run will not have.

    Commands from outside the tree say only when they run what they measure: theirs are not checked.
    """
    every, problem = (plain.get("eval") or {}).get("every"), "trials are compared by what evaluations measure"
    got = "null" if every is None else every
    require(every, "eval.every", f"{problem}, and there is none", got=got, remedy="set it to a number of steps")
    when, problem = (plain.get("stop") or {}).get("when", NEVER), "ends runs, and trials are compared at the same steps"
    require(when == NEVER, "stop.when", problem, got=when, remedy="leave it out: sweep.pruner ends what is no use")
    known = metrics_of(plain) if plain["command"] in commands.OWN else [metric]
    remedy = choice_remedy(metric, known)
    require(metric in known, "sweep.metric", "no evaluation has it", got=metric, remedy=remedy)


def check_loggers(plain: Mapping[str, Any]) -> None:
    """Refuses loggers of which none writes what trials are compared by."""
    loggers = plain.get("logger") or {}
    writes, got = is_declared(loggers, "writes_metrics"), ", ".join(loggers) or "null"
    problem = "trials are compared by eval.jsonl, which none of these writes"
    require(writes, "logger", problem, got=got, remedy="add jsonl")


def metrics_of(plain: Mapping[str, Any]) -> list[str]:
    """The names of numbers in eval.jsonl that a study can compare runs of this config by."""
    command, settings, rewards = plain["command"], plain["eval"], plain.get("reward") or {}
    known = list(WITHOUT_SAMPLES.get(command, ()))
    if command == "train" or (command == "sft" and plain.get("data")):
        known = ["accuracy", *(f"eval/pass@{size}" for size in pass_sizes(settings["num_samples"])), *known]
        known += [f"{REWARDS}{name}" for name in rewards]
        known += ["eval/kl_base"] if settings.get("kl_base") else []
    if (plain.get("pretrain") or {}).get("path"):
        known.append("eval/pretrain_loss")
    return known


def lower_is_better(metric: str, direction: str = "auto") -> bool:
    """Whether a study looks for a small value of this metric.

    Args:
        metric: its name in eval.jsonl.
        direction: sweep.direction; auto: of losses and divergences, and never of a reward.
    """
    if direction != "auto":
        return direction == "min"
    return metric.endswith(("loss", "/kl_base")) and not metric.startswith(REWARDS)


def check_same_questions(key: str, first: Plan, other: Plan) -> None:
    """Refuses plans that evaluate different held-out prompts, demonstrations or preferences.

    key: of the value that makes the difference.
    """
    before, after = _questions(first), _questions(other)
    if before != after:
        got = f"{len(before)} and {len(after)} prompts"
        if len(before) == len(after):
            different = sum(one != other for one, other in zip(before, after, strict=True))
            got = f"{different} of {len(before)} other prompts"
        problem = "decides which prompts are held out, so that trials could not be compared"
        raise UserError(key, problem, got=got, remedy="give it one value")
    texts, others = (
        {name: value for name, value in plan.fingerprints.items() if name.startswith("held_out_") and name != PROMPTS}
        for plan in (first, other)
    )
    for name in (name for name in texts if texts[name] != others.get(name)):
        what = name.removesuffix("_fingerprint").removeprefix("held_out_")
        problem = f"decides which {what} are held out, or their tokens, so that trials could not be compared"
        got = f"{what} with the fingerprints {texts[name][:12]} and {str(others.get(name))[:12]}"
        raise UserError(key, problem, got=got, remedy="give it one value")


def check_same_steps(key: str, first: int, other: int) -> None:
    """Refuses runs of different lengths. key: of the value that makes the difference."""
    problem = "decides how many steps a run has, and trials are compared at the same steps"
    require(first == other, key, problem, got=f"{first} and {other} steps", remedy="set steps")


def _questions(plan: Plan) -> list[tuple[Any, ...]]:
    held_out = getattr(plan, "held_out", None)
    number = getattr(getattr(plan.config, "eval", None), "num_prompts", None)
    if held_out is None or number is None:
        return []
    return [(prompt.messages, prompt.answer) for prompt in held_out.prompts[:number]]


def curve(run: Path, metric: str) -> dict[int, float]:
    """{step: the metric} of the evaluations that a run has written, without that before its first step.

    A value that is missing or not finite is NaN.
    """
    lines = read_lines(run / EVALUATIONS, silent)
    values = {line["step"]: line.get(metric) for line in lines if line["step"] > 0}
    return {step: math.nan if value is None else float(value) for step, value in values.items()}
