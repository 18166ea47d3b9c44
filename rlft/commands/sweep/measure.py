"""What makes trials comparable: a number of the last evaluation, measured alike in all of them, and the study's record.

The record says how the study was begun: its words and what they meant then. Whoever resumes it has the same study.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from rlft.algorithm.ops.aggregate import pass_sizes
from rlft.commands.sweep.space import SECTION, StudyConfig, changes_no_number, key_of
from rlft.config import command as commands
from rlft.config.choices import choice_remedy
from rlft.config.instantiate import locate
from rlft.config.keys import flatten, keys_of
from rlft.config.overrides import CONFIG_DIR, Arguments
from rlft.config.schema import RunConfig
from rlft.config.trainer import NEVER
from rlft.logger.jsonl import EVALUATIONS, read_lines, silent
from rlft.logger.loggers import is_declared
from rlft.plan.run_plan import Plan
from rlft.runs import run_folder
from rlft.runs.config_file import is_path_key, same_path
from rlft.system.files import write_atomically
from rlft.system.terminal import resuming
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
RECORD = "sweep.yaml"
"""The file in a sweep's folder with the record."""
MAY_CHANGE = ("hydra.sweep.dir", *(f"{SECTION}.{key}" for key, of in keys_of(StudyConfig).items() if of.free),
              "cluster", *(key for key, of in keys_of(RunConfig).items() if of.free_in_sweep))  # fmt: skip
"""Keys that may differ when a study is resumed: none of them changes a trial that was drawn. `cluster` is the choice of
a YAML; what else than these keys it changes, such as cluster.lanes, is seen in the configs."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """How a study was begun.

    Attributes:
        options: words such as -m and --config-dir.
        start: the directory that relative paths in them are read from.
        configs: the configs of its corners with full keys: that of the first, and of each other what differs from it.
        fingerprints: of what each of the corners reads that are planned.
    """

    command: str
    options: Sequence[str]
    words: Sequence[str]
    start: str
    configs: Sequence[Mapping[str, Any]]
    fingerprints: Sequence[Mapping[str, str]]

    @property
    def config_dir(self) -> str | None:
        """The user's folder with more YAML, as it was typed."""
        options = [part for option in self.options for part in option.split("=", 1)]
        return next((value for name, value in itertools.pairwise(options) if name in CONFIG_DIR), None)


def record_of(
    command: str, parsed: Arguments, plains: Sequence[Mapping[str, Any]], fingerprints: Sequence[Mapping[str, str]]
) -> StudyRecord:
    """The record of a study that is begun now, with the plain configs of its corners."""
    first, *others = [flatten(plain) for plain in plains]
    configs = [first, *({key: v for key, v in flat.items() if first.get(key, _ABSENT) != v} for flat in others)]
    return StudyRecord(
        command=command,
        options=list(parsed.options),
        words=list(parsed.overrides),
        start=str(Path.cwd()),
        configs=configs,
        fingerprints=[dict(of_corner) for of_corner in fingerprints],
    )


def is_study(folder: Path) -> bool:
    """Whether the folder is that of a sweep whose values Optuna chooses."""
    return (folder / RECORD).is_file()


def read_record(folder: Path) -> StudyRecord:
    """The record of the study in this folder; raises UserError if it is damaged."""
    try:
        return StudyRecord(**yaml.safe_load((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        problem = f"{RECORD} in that folder cannot be read ({type(error).__name__})"
        raise UserError("resume", problem, got=folder, remedy="restore it from a copy, or begin another") from None


def write_record(folder: Path, now: StudyRecord) -> None:
    write_atomically(folder / RECORD, yaml.safe_dump(asdict(now), sort_keys=False, allow_unicode=True))


def check_same_study(folder: Path, now: StudyRecord) -> None:
    """Refuses another study than the one in this folder, if there is one, or one whose YAML, data or base changed."""
    if is_study(folder):
        before = read_record(folder)
        _check_same_words(folder, before, now)
        _check_same_configs(folder, before, now)
        _check_same_inputs(before, now)


def _check_same_words(folder: Path, before: StudyRecord, now: StudyRecord) -> None:
    remedy = f"resume that one with {resuming(folder)}, or name another hydra.sweep.dir"
    is_its_command, problem = before.command == now.command, f"there is a sweep of rlft {before.command}"
    require(is_its_command, "hydra.sweep.dir", problem, got=folder, remedy=remedy)
    both = ({key_of(w): w.partition("=")[2] for w in of.words} | {CONFIG_DIR[0]: of.config_dir} for of in (before, now))
    old, new = ({key: value for key, value in of.items() if key not in MAY_CHANGE} for of in both)
    for key in (key for key in {**old, **new} if old.get(key) != new.get(key)):
        if not (key == CONFIG_DIR[0] and same_path(old[key], new[key])):
            problem = f"differs from that of the sweep in {folder}, {old.get(key) or 'left out'}"
            raise UserError(key, problem, got=new.get(key) or "nothing", remedy=remedy)


def _check_same_configs(folder: Path, before: StudyRecord, now: StudyRecord) -> None:
    """Refuses other configs from the same words: a recipe, or other YAML, was changed in between."""
    for old, new in zip(before.configs, now.configs, strict=False):
        for key in {**old, **new}:
            section = key.partition(".")[0]
            is_free = section != "cluster" and changes_no_number(key, {"command": before.command})
            is_same = old.get(key) == new.get(key) or same_path(old.get(key), new.get(key))
            if key in MAY_CHANGE or is_free or is_same:
                continue
            problem = f"was {old.get(key, 'left out')} when the sweep in {folder} began, and its trials would differ"
            remedy = "put the YAML back as it was, or begin another sweep"
            if is_path_key(key):  # the words named a run, whose newest checkpoint is another one by now
                remedy = "begin another sweep, and name a checkpoint's folder in it, which does not change with its run"
            raise UserError(key, problem, got=new.get(key, "nothing"), remedy=remedy)


def _check_same_inputs(before: StudyRecord, now: StudyRecord) -> None:
    """Refuses data, a base or adapters that have changed, of any corner."""
    for old, new in zip(before.fingerprints, now.fingerprints, strict=False):
        try:
            run_folder.check_same_inputs(old, new)
        except UserError as error:
            problem = error.problem.replace("since the run began", "since the sweep began")
            remedy = error.remedy.replace("start a new run", "begin another sweep")
            raise UserError(error.key, problem, got=error.got, remedy=remedy) from None


_ABSENT = object()
