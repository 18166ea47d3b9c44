"""What is refused of a sweep before its first run: a job, or a study at any value and end of an interval.

Trials are compared by a number of the last evaluation, which is measured alike in all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlft.commands.launch import import_libraries, settled
from rlft.commands.sweep import space as spaces
from rlft.config import command as commands
from rlft.config.choices import choice_remedy
from rlft.config.compose import compose
from rlft.config.instantiate import locate
from rlft.config.overrides import Arguments, key_of
from rlft.config.resolved import Resolved, resolve
from rlft.config.trainer import NEVER, ClusterConfig
from rlft.loop.evaluations import compared
from rlft.plan.rules import check_acts, models_of
from rlft.plan.run_plan import Plan
from rlft.runs import run_folder, run_status
from rlft.runs.lines import EVALUATIONS, read_lines, silent
from rlft.system.process.placement import visible_gpus
from rlft.system.terminal import override, say
from rlft.tokens.text import AUTO_DATE, today
from rlft.types import Mistakes, UserError, counted, require

NOT_OF_THE_FILES = ("seed", "name", "trainer", "algorithm", "minibatches", "logger", "console", "rollouts",
                    "checkpoint")  # fmt: skip
"""Keys that no file of data, model or adapters is read by: configs that differ only in these are planned once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A sweep of which every value has been checked as a run's."""

    command: str
    parsed: Arguments  # its words, with the date on which it was begun
    space: spaces.Space
    configs: Sequence[Resolved]  # those of its jobs; of a study those of its corners
    cluster: ClusterConfig | None
    on_gpus: bool  # whether runs side by side have a GPU each
    plans: Mapping[int, Plan]  # {job or corner: its plan} of the first one and of those that read other files
    keys: spaces.StudyConfig | None = None  # how a study draws values and compares trials; None: a plain sweep

    @property
    def plains(self) -> list[Mapping[str, Any]]:
        return [one.plain for one in self.configs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Words of a run that are checked before the first. label: for refusals; key: of a study, whose value is tried."""

    words: Sequence[str]
    label: str
    key: str = ""


def check(command: str, parsed: Arguments, folder: Path | None) -> Checked:
    """Refuses a sweep for its words, or for what they mean in any of its runs; loads no weights.

    `folder` is that of the sweep, if its words name it; there may be one that is resumed.
    """
    keys = None
    if own := [word for word in parsed.overrides if spaces.is_own(word)]:
        keys = spaces.read_config(own, command)
        evaluates = "eval" in {field.name for field in fields(commands.named(command).root)}
        problem = f"trials are compared by what evaluations measure, and rlft {command} has none"
        require(evaluates, "sweep", problem, got="optuna", remedy="leave every sweep key out to try all values")
        spaces.check_installed()
        space = spaces.read_space(
            [word for word in parsed.overrides if not spaces.is_own(word)], command, is_study=True
        )
        spaces.number_of_trials(keys, space)
    else:
        space = spaces.read_space(parsed.overrides, command, is_study=False)
    tried = jobs_of(space) if keys is None else corners_of(space)
    resolved = checked_configs(tried, space, parsed.config_dir, command, keys and keys.metric)
    plains = [one.plain for one in resolved]
    if (word := date_word(plains, folder)) is not None:
        space, parsed = replace(space, fixed=(*space.fixed, word)), replace(parsed, overrides=(*parsed.overrides, word))
        resolved = [dated(one, word) for one in resolved]
    cluster = cluster_of(resolved)
    models = {model: None for one in resolved for model in models_of(one.config)}
    import_libraries(f"rlft {command} -m: the configs are valid", models)
    on_gpus = cluster is not None and cluster.jobs > 1 and are_on_gpus(plains)
    if cluster is not None and on_gpus:
        gpus_of(cluster)  # refuses jobs for which there are too few
    plans = planned(tried, resolved, folder if keys is None else None)
    if keys is not None:
        every, steps = resolved[0].config.eval.every, plans[0].num_steps
        prunes = keys.pruner == "none" or keys.seeds > 1 or every < steps
        problem = f"never prunes a trial: its run is not evaluated before the last step, {steps}"
        remedy = f"set eval.every below {steps}, or leave sweep.pruner out"
        require(prunes, "sweep.pruner", problem, got=keys.pruner, remedy=remedy)
    return Checked(
        command=command,
        parsed=parsed,
        space=space,
        configs=resolved,
        cluster=cluster,
        on_gpus=on_gpus,
        keys=keys,
        plans=plans,
    )


def jobs_of(space: spaces.Space) -> list[Tried]:
    jobs = enumerate(map(space.words, space.combinations()))
    return [Tried(words=words, label=f"job {number}: {' '.join(words)}") for number, words in jobs]


def corners_of(space: spaces.Space) -> list[Tried]:
    corners = [(word, space.words(params)) for word, params in space.corners()]
    return [Tried(words=words, label=f"tried with {word}", key=key_of(word)) for word, words in corners]


def resolve_words(words: Sequence[str], config_dir: Path | None, command: str) -> Resolved:
    return resolve(settled(compose(words, config_dir, command)), command)


def checked_configs(
    tried: Sequence[Tried], space: spaces.Space, config_dir: Path | None, command: str, metric: str | None
) -> list[Resolved]:
    """The configs, once each has been checked; metric: by which they are to be comparable, if they are."""
    configs: list[Resolved] = []
    for one in tried:
        with _blamed_on(one, space):
            configs.append(resolve_words(one.words, config_dir, command))
            if len(configs) == 1:  # what is wrong in all of them is refused before
                say(f"rlft {command} -m: {counted(len(tried), 'config')} to check ..")
            first, plain = configs[0].plain, configs[-1].plain
            if metric is not None and len(configs) > 1:
                check_measured_alike(first, plain, metric)
        if metric is not None and len(configs) == 1:
            spaces.check_changes_numbers(space, first)
            check_metric(metric, first)
    for one in space.varied:
        if (key := key_of(one.key)).startswith("algorithm.") and command == "train":
            check_acts(key, ", ".join(map(str, one.extremes)), [resolved.config for resolved in configs])
    return configs


def planned(tried: Sequence[Tried], resolved: Sequence[Resolved], folder: Path | None = None) -> dict[int, Plan]:
    """{number: plan} of the first config and of those that read other files, which are read once.

    Those of a study must hold out the same prompts for the same steps. `folder` is that of a plain sweep that is
    repeated, whose finished jobs are left out.
    """
    planned_files: list[Any] = []
    plans: dict[int, Plan] = {}
    for number, (one, config) in enumerate(zip(tried, resolved, strict=True)):
        with _blamed_on(one):
            is_done = folder is not None and is_finished(config.plain, folder / str(number))
            if is_done or (files := of_the_files(config.plain)) in planned_files:
                continue
            plan = plans[number] = config.plan()
            planned_files.append(files)
            if one.key:
                check_same_questions(one.key, plans[0], plan)
                first, other = plans[0].num_steps, plan.num_steps
                problem = "decides how many steps a run has, and trials are compared at the same steps"
                got = f"{first} and {other} steps"
                require(first == other, one.key, problem, got=got, remedy="set steps")
    return plans


def of_the_files(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config a plan depends on besides the config's own checks: configs that agree in it are planned once."""
    of_a_teacher = plain.get("snapshot", {}).get("teacher", "none") != "none"  # whose tokens an algorithm asks for
    left_out = [key for key in NOT_OF_THE_FILES if key != "algorithm" or not of_a_teacher]
    return {key: value for key, value in plain.items() if key not in left_out}


def is_finished(plain: Mapping[str, Any], folder: Path) -> bool:
    """Whether the folder has a finished run of this very config; a run of another config is refused."""
    if not run_folder.config_file(folder).exists():
        return False
    now = run_folder.with_kept_values(plain, folder)
    run_folder.check_same_config(folder, now)
    ignored = dict.fromkeys((run_folder.ORIGIN, "resume"))
    is_same = {**run_folder.read(folder), **ignored} == {**now, **ignored}
    return is_same and run_status.read(folder)[0] is run_status.Status.finished


def cluster_of(resolved: Sequence[Resolved]) -> ClusterConfig | None:
    """The `cluster` section, one for all jobs of a sweep, of which none is spread; None where its command has none."""
    first = getattr(resolved[0].config, "cluster", None)
    if first is None:
        return None
    for key in ("kind", "address", "jobs", "timeout"):
        values = sorted({json.dumps(one.plain["cluster"][key]) for one in resolved})
        problem = "is one for all jobs of a sweep"
        require(len(values) == 1, f"cluster.{key}", problem, got=", ".join(values), remedy="give one value")
    several = {"engines": first.engines > 0, "ranks": first.ranks > 1, "scoring": first.scoring}
    for name in (name for name, is_so in several.items() if is_so and first.jobs > 1):
        problem = f"a job that runs concurrently with others (cluster.jobs={first.jobs}) is one process"
        remedy = "leave it out, or set cluster.jobs=1"
        raise UserError(f"cluster.{name}", problem, got=getattr(first, name), remedy=remedy)
    return first


def are_on_gpus(plains: Sequence[Mapping[str, Any]]) -> bool:
    from rlft.system.device import resolve_device

    return any(resolve_device(plain["model"]["device"]).type == "cuda" for plain in plains)


def gpus_of(config: ClusterConfig) -> list[str]:
    """This machine's GPUs (CUDA_VISIBLE_DEVICES), at least one for each job at a time; none if a cluster is joined."""
    if config.is_joined:
        return []
    gpus = visible_gpus()
    problem = f"each job that runs at a time has a GPU of its own, and there are {len(gpus)} here"
    remedy = f"use cluster.jobs={max(1, len(gpus))}"
    require(len(gpus) >= config.jobs, "cluster.jobs", problem, got=config.jobs, remedy=remedy)
    return gpus


def date_word(plains: Sequence[Mapping[str, Any]], folder: Path | None) -> str | None:
    """The override by which all runs have the date on which the sweep was begun; None if their configs name dates.

    Of a sweep that is resumed in `folder`, the record or the first job with a date says which.
    """
    if any(plain.get("model", {}).get("date") != AUTO_DATE for plain in plains):
        return None
    dates: list[str] = []
    if folder is not None and spaces.is_study(folder):
        dates = [word.partition("=")[2] for word in spaces.read_record(folder).words if key_of(word) == spaces.DATE]
    elif folder is not None:
        runs = sorted(file.parent for file in folder.glob("*/config.yaml"))
        dates = [run_folder.read(run)["model"].get("date", AUTO_DATE) for run in runs]
    return override(spaces.DATE, dates[0] if dates else today())


def dated(resolved: Resolved, word: str) -> Resolved:
    plain, config, date = resolved.plain, resolved.config, word.partition("=")[2]
    plain = {**plain, "model": {**plain["model"], "date": date}}
    return replace(resolved, plain=plain, config=replace(config, model=replace(config.model, date=date)))


def check_possible(space: spaces.Space, config_dir: Path | None, command: str) -> None:
    """Refuses a study whose first corner, which was accepted when it began, is refused by now.

    A base that has been moved away, or data that are gone, refuse every trial alike: no trial's values are to blame.
    """
    _, corner = next(space.corners())
    resolve_words(space.words(corner), config_dir, command).plan()


@contextmanager
def _blamed_on(tried: Tried, space: spaces.Space | None = None) -> Iterator[None]:
    """Adds what was tried to a refusal inside. space: where a number may be drawn that is not whole."""
    try:
        yield
    except UserError as refused:
        drawn = (
            [key_of(one.key) for one in space.varied if isinstance(one, spaces.Interval)] if space is not None else []
        )
        mistakes = Mistakes()
        for error in (refused, *refused.more):
            problem, remedy = f"{error.problem} ({tried.label})", error.remedy
            if error.problem.startswith("must be a whole number") and error.key in drawn:
                remedy = f"write {error.key}=int(interval(..)) to draw whole numbers"
            with mistakes:
                raise UserError(error.key, problem, got=error.got, remedy=remedy) from None
        mistakes.refuse()


# -- what makes trials comparable --------------------------------------------------------------------------------------
REWARDS = "eval/reward/"  # the beginning of metrics that are a reward's mean, whatever its name
IN_UNITS_OF_THE_LOSS = ("eval/loss", "eval/margin")
"""Metrics of `rlft dpo` that another loss, another beta or another reference measures in another unit."""
TEXT_OF_PRETRAINING = ("path", "field", "given_field", "max_tokens", "held_out")
"""Keys of `pretrain` that decide which text eval/pretrain_loss is measured on."""
OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "include_stop_str_in_output")
"""Keys of `generation` that say how a policy is sampled when it is evaluated, and where its text ends.

`max_tokens` is not among them: it is part of what a run learns with, like the limits of its environment."""
PROMPTS = "held_out_fingerprint"
"""The key of a fingerprint of all held-out prompts and their tokens. Trials need only the same first prompts."""


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


def check_metric(metric: str, plain: Mapping[str, Any]) -> None:
    """Refuses a metric that evaluations of this run will not have, unless its command is from outside the tree."""
    every, problem = (plain.get("eval") or {}).get("every"), "trials are compared by what evaluations measure"
    got = "null" if every is None else every
    require(every, "eval.every", f"{problem}, and there is none", got=got, remedy="set it to a number of steps")
    when, problem = (plain.get("stop") or {}).get("when", NEVER), "ends runs, and trials are compared at the same steps"
    require(when == NEVER, "stop.when", problem, got=when, remedy="leave it out: sweep.pruner ends what is no use")
    known = compared(plain) if plain["command"] in commands.OWN else [metric]
    remedy = choice_remedy(metric, known)
    require(metric in known, "sweep.metric", "no evaluation has it", got=metric, remedy=remedy)


def lower_is_better(metric: str, direction: str = "auto") -> bool:
    """Whether a study looks for a small value of this metric; auto: of losses and divergences, never of a reward."""
    if direction != "auto":
        return direction == "min"
    return metric.endswith(("loss", "/kl_base")) and not metric.startswith(REWARDS)


def check_same_questions(key: str, first: Plan, other: Plan) -> None:
    """Refuses plans that evaluate different held-out prompts, demonstrations or preferences, because of this key."""
    before, after = _held_out(first), _held_out(other)
    for what in (what for what in before if before[what] != after.get(what)):
        problem = f"decides which {what} are held out, or their tokens, so that trials could not be compared"
        number, other_number = len(before[what]), len(after.get(what, ()))  # fingerprints are of one length
        got = f"other {what}" if number == other_number else f"{number} and {other_number} {what}"
        raise UserError(key, problem, got=got, remedy="give it one value")


def _held_out(plan: Plan) -> dict[str, Any]:
    """{what: the prompts that are evaluated, whose tokens may differ; a fingerprint of demonstrations or rankings}."""
    held_out = getattr(plan, "held_out", None)
    number = getattr(getattr(plan.config, "eval", None), "num_prompts", None)
    prompts = () if held_out is None or number is None else held_out.prompts[:number]
    texts = {
        name.removesuffix("_fingerprint").removeprefix("held_out_"): value
        for name, value in plan.fingerprints.items()
        if name.startswith("held_out_") and name != PROMPTS
    }
    return {"prompts": [(prompt.messages, prompt.answer) for prompt in prompts], **texts}


def curve(run: Path, metric: str) -> dict[int, float]:
    """{step: the metric, NaN where it is missing or not finite} of a run's evaluations after its first step."""
    lines = read_lines(run / EVALUATIONS, silent)
    values = {line["step"]: line.get(metric) for line in lines if line["step"] > 0}
    return {step: math.nan if value is None else float(value) for step, value in values.items()}
