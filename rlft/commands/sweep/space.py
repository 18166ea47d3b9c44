"""What a sweep is by its words: its keys `sweep.*`, the space of its runs, and the record that resumes a study."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from rlft.config import catalog, command as commands
from rlft.config.bounds import PositiveInt, Seed
from rlft.config.instantiate import from_mapping
from rlft.config.keys import ABSENT, Key, flatten, is_path_key, keys_of, known
from rlft.config.overrides import CONFIG_DIR, Arguments, key_of, parse_overrides
from rlft.config.schema import RunConfig
from rlft.runs import run_folder
from rlft.runs.find import setting_name
from rlft.runs.run_folder import same_path
from rlft.system.files import write_atomically
from rlft.system.terminal import pip_install, resuming
from rlft.types import UserError, counted, require

SECTION, SWEEPER = "sweep", "optuna"
NEEDED = ("optuna", "matplotlib")
USUAL_TRIALS = 20
DATE = "model.date"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """The keys of configs/base/sweep.yaml, which has their meanings and defaults."""

    trials: Annotated[PositiveInt | Literal["auto"], Key(free=True)]
    sampler: Literal["tpe", "random", "grid"]
    seeds: PositiveInt
    metric: str
    direction: Literal["auto", "max", "min"]
    pruner: Literal["none", "median", "hyperband"]
    startup: PositiveInt
    seed: Seed


def is_own(word: str) -> bool:
    """Whether an override is of the sweep itself, not of its runs."""
    return key_of(word).partition(".")[0] == SECTION


def read_config(words: Sequence[str], command: str) -> StudyConfig:
    """The keys from words such as sweep.trials=20, and else from configs/base/sweep.yaml."""
    file = catalog.config_folder() / "base" / f"{SECTION}.yaml"
    values = yaml.safe_load(file.read_text())[SECTION]
    sweeper = None
    for parsed in parse_overrides(words, command):
        key = parsed.key_or_group
        line, remedy = parsed.input_line, f"write {parsed.input_line.lstrip('+~')}, or leave it out"
        require(not line.startswith(("+", "~")), key, "takes no sign", got=line, remedy=remedy)
        is_one = not parsed.is_sweep_override()
        require(is_one, key, "is one for the whole sweep", got=line, remedy="give one value")
        if key == SECTION:
            sweeper = parsed.value()
        else:
            values[key.partition(".")[2]] = parsed.value()
    remedy = f"write {SECTION}={SWEEPER}, or leave every {SECTION} key out to try all values"
    require(sweeper is not None, SECTION, "no sampler is chosen", got="nothing", remedy=remedy)
    problem = "names who chooses the values, and this is not one of its choices"
    require(sweeper == SWEEPER, SECTION, problem, got=sweeper, remedy=remedy)
    try:
        return from_mapping(StudyConfig, values, SECTION, command)
    except UserError as error:
        entry = catalog.entries(file).get(error.key)
        if entry is None or error.remedy.startswith("use "):
            raise
        remedy = f"for instance {entry.default} ({entry.comment})"
        raise UserError(error.key, error.problem, got=error.got, remedy=remedy) from None


def check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    problem = f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
    require(not missing, SECTION, problem, got=SWEEPER, remedy=pip_install("rlft[sweep]"))


WIDE = 10.0  # an interval of positive numbers whose end is at least so many times its start is sampled on a log scale
ENDS = re.compile(r"interval\(\s*(?:start\s*=\s*)?(?P<low>[^,\s]+)\s*,\s*(?:end\s*=\s*)?(?P<high>[^)\s]+)\s*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A key with several values, as they are typed."""

    key: str
    values: tuple[str, ...]

    @property
    def extremes(self) -> tuple[str, ...]:
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A key with all numbers from `low` to `high`; whole ones alone if `whole`, sampled on a log scale if `log`."""

    key: str
    low: float
    high: float
    whole: bool
    log: bool

    @property
    def extremes(self) -> tuple[float, ...]:
        return (self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The words of a sweep's runs: `fixed` ones as they are typed, and the keys whose values are chosen."""

    fixed: tuple[str, ...]
    varied: tuple[Choice | Interval, ...]

    @property
    def size(self) -> int | None:
        """The number of combinations; None with an interval."""
        counts = [len(one.values) for one in self.varied if isinstance(one, Choice)]
        return math.prod(counts) if len(counts) == len(self.varied) else None

    def combinations(self) -> Iterator[dict[str, str]]:
        """{key: value} of each combination; the last key's values change first."""
        choices = [one for one in self.varied if isinstance(one, Choice)]
        for values in itertools.product(*(one.values for one in choices)):
            yield {one.key: value for one, value in zip(choices, values, strict=True)}

    def words(self, params: Mapping[str, Any]) -> list[str]:
        """The overrides of a run with these values, {key: value}."""
        return [*self.fixed, *self.chosen(params)]

    def chosen(self, params: Mapping[str, Any]) -> list[str]:
        return [f"{one.key}={params[one.key]}" for one in self.varied]

    def named(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """{key without its sign: value} by which a run is told from the others; all its words if it is the only one."""
        if not self.varied:
            typed = [word for word in self.fixed if key_of(word) != DATE]  # which the sweep adds
            return {key_of(word): word.partition("=")[2] for word in typed}
        return {key_of(one.key): params[one.key] for one in self.varied}

    def name(self, params: Mapping[str, Any]) -> str:
        """What a run with these values is called, also by `rlft runs` and `rlft report`."""
        return setting_name(self.named(params))

    def setting(self, params: Mapping[str, Any]) -> str:
        """What the runs with these values are called that differ only in their seeds."""
        values = {key: value for key, value in self.named(params).items() if key != "seed"}
        return setting_name(values or replace(self, varied=()).named({}))

    def corners(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(the word that is tried, {key: value}): each value and end of an interval once, the others at their first.

        So many configs as there are values are checked before the first run, not their product.
        """
        first = {one.key: one.extremes[0] for one in self.varied}
        yield " ".join(self.chosen(first)), first
        for one in self.varied:
            for value in one.extremes[1:]:
                yield f"{one.key}={value}", {**first, one.key: value}


KEYS_OF_FOLDERS = ("resume", "hydra.sweep.dir")  # where runs are, which is the sweep's to say


def read_space(words: Sequence[str], command: str, *, is_study: bool) -> Space:
    """The space of a study, or that whose combinations a plain sweep goes through in the same order each time.

    Refuses glob(..), which rlft does not expand, and shuffle(..), whose order is another one at each reading.
    """
    fixed, varied = list[str](), list[Choice | Interval]()
    for word, parsed in zip(words, parse_overrides(words, command), strict=True):
        key, got, value = key_of(word), word.partition("=")[2], parsed.value()
        remedy = "repeat the sweep with hydra.sweep.dir=<its folder>: finished jobs are skipped"
        remedy = "resume a sweep with rlft resume <its folder>" if is_study else remedy
        is_new = key != "resume" or got == "null"
        require(is_new, key, "cannot be used in a sweep", got=got, remedy=remedy)
        if not parsed.is_sweep_override():
            fixed += [word] if key not in KEYS_OF_FOLDERS else []
            continue
        if parsed.value_type.name == "GLOB_CHOICE_SWEEP":
            choices = value.filter(catalog.choices(key, command))
            remedy = f"write {key}={','.join(choices)}" if choices else f"give {key} values with commas between them"
            raise UserError(key, "a pattern does not say which values there are", got=got, remedy=remedy)
        problem = "shuffle(..) gives another order each time that a sweep is resumed, and jobs go by their numbers"
        require(not getattr(value, "shuffle", False), key, problem, got=got, remedy="leave shuffle(..) out")
        (_check_of_study if is_study else _check_of_grid)(key, got, parsed)
        if parsed.is_interval_sweep():
            varied.append(_interval(parsed.get_key_element(), value, got))
            continue
        values = tuple(parsed.sweep_string_iterator())  # in which Hydra escapes colons, as Optuna's records have them
        values = values if is_study else tuple(text.replace("\\:", ":") for text in values)
        for text in values:
            require(values.count(text) == 1, key, "has a value twice", got=text, remedy="give every value once")
        if len(values) == 1:
            fixed.append(f"{parsed.get_key_element()}={values[0]}")
        elif values:
            varied.append(Choice(key=parsed.get_key_element(), values=values))
    problem = "has nothing to choose: no key has an interval or several values"
    remedy = "give one, such as 'trainer.lr=interval(1e-5,1e-3)' or lora.rank=4,16"
    require(varied or not is_study, "sweep", problem, got="optuna", remedy=remedy)
    return Space(fixed=tuple(fixed), varied=tuple(varied))


def _check_of_study(key: str, got: str, parsed: Any) -> None:
    remedy = "write sweep.seeds=3 for three runs of each trial" if key == "seed" else "give it one value"
    require(key not in OF_THE_COMPARISON, key, OF_THE_COMPARISON.get(key, ""), got=got, remedy=remedy)


def _check_of_grid(key: str, got: str, parsed: Any) -> None:
    problem = "an interval has no values to go through one by one"
    remedy = "add sweep=optuna, which draws from it, or give values with commas between them"
    require(not parsed.is_interval_sweep(), key, problem, got=got, remedy=remedy)
    problem, remedy = "cannot be swept: each job has its own folder", "leave it out of the sweep"
    require(key not in KEYS_OF_FOLDERS, key, problem, got=got, remedy=remedy)


def number_of_trials(keys: StudyConfig, space: Space) -> int:
    """How many trials there are to be. Raises UserError: a grid has an interval, or another number of combinations."""
    if keys.sampler != "grid":
        most = USUAL_TRIALS if keys.trials == "auto" else keys.trials
        return most if space.size is None else min(most, space.size)
    if space.size is None:
        intervals = [one.key for one in space.varied if isinstance(one, Interval)]
        problem = f"a grid goes through values one by one, and {intervals[0]} has an interval"
        remedy = f"give {intervals[0]} values with commas between them, or use sweep.sampler=tpe"
        raise UserError("sweep.sampler", problem, got="grid", remedy=remedy)
    fits = keys.trials in ("auto", space.size)
    problem = f"a grid tries each of its {counted(space.size, 'combination')} once"
    remedy = "leave it out, or use sweep.sampler=tpe or random"
    require(fits, "sweep.trials", problem, got=keys.trials, remedy=remedy)
    return space.size


def tries_each(keys: StudyConfig, space: Space) -> bool:
    """Whether each combination is tried once: of a grid, and where there are no more combinations than trials."""
    return keys.sampler == "grid" or number_of_trials(keys, space) == space.size


def changes_no_number(key: str, plain: Mapping[str, Any]) -> bool:
    """Whether what a run measures does not depend on a key of its plain config.

    Paths are not among them: a resume may name where the same file is now, and a trial another file.
    """
    measured = known(commands.named(plain["command"]).root, key).measured
    return not measured if measured is not None else run_folder.may_change(key, plain) and not is_path_key(key)


def check_changes_numbers(space: Space, plain: Mapping[str, Any]) -> None:
    """Refuses keys that no measurement depends on. plain: the config of a corner."""
    for one in space.varied:
        key, got = key_of(one.key), ", ".join(map(str, one.extremes))
        problem = "cannot be swept: it does not change what a run measures"
        require(not changes_no_number(key, plain), key, problem, got=got, remedy="give it one value")


OF_THE_COMPARISON = {
    "seed": "cannot be swept by sweep=optuna: the best seed would only be a lucky one",
    "data.seed": "is the seed of the data: trials on other data cannot be compared",
    "steps": "is one for all trials, which are compared at the same steps",
    "hydra.sweep.dir": "is one for the whole sweep",
}
"""{key that is no setting of a run, but of the comparison: why a study cannot choose it}."""


def _interval(key: str, value: Any, got: str) -> Interval:
    """The interval of Hydra's `value`, with its tag or without."""
    name, low, high = key.lstrip("+"), value.start, value.end
    tags = sorted(value.tags)
    is_known, problem = not tags or tags in (["log"], ["linear"]), "an interval is tagged log, linear or not at all"
    remedy = "write tag(log,interval(..)), tag(linear,interval(..)) or interval(..)"
    require(is_known, name, problem, got=got, remedy=remedy)
    whole = isinstance(low, int) and isinstance(high, int)
    if whole and (ends := ENDS.search(got)) and not all(float(end).is_integer() for end in ends.group("low", "high")):
        remedy = "round them, or leave int(..) out"
        raise UserError(name, "an interval of whole numbers has ends that are not whole", got=got, remedy=remedy)
    is_finite = math.isfinite(low) and math.isfinite(high)
    require(is_finite, name, "an interval has two finite ends", got=got, remedy="give finite ends")
    remedy = "swap its ends" if low > high else f"write {name}={low}"
    require(low < high, name, "an interval goes from a number to a larger one", got=got, remedy=remedy)
    has_logarithms, remedy = tags != ["log"] or low > 0, "begin above 0, or leave log out"
    require(has_logarithms, name, "only positive numbers have logarithms", got=got, remedy=remedy)
    log = tags == ["log"] or (not tags and low > 0 and high >= WIDE * low)
    return Interval(key=key, low=low, high=high, whole=whole, log=log)


RECORD = "sweep.yaml"  # the file in a sweep's folder with the record
MAY_CHANGE = ("hydra.sweep.dir", *(f"{SECTION}.{key}" for key, of in keys_of(StudyConfig).items() if of.free),
              "cluster", *(key for key, of in keys_of(RunConfig).items() if of.free_in_sweep))  # fmt: skip
"""Keys that may differ when a study is resumed: none of them changes a trial that was drawn. `cluster` is the choice of
a YAML; what else than these keys it changes, such as cluster.lanes, is seen in the configs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """How a study was begun."""

    command: str
    options: Sequence[str]  # words such as -m and --config-dir
    words: Sequence[str]
    start: str  # the directory that relative paths in them are read from
    configs: Sequence[Mapping[str, Any]]  # of its corners, by full keys: the first, and how each other differs from it
    fingerprints: Sequence[Mapping[str, str]]  # of what each of the corners reads that are planned

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
    configs = [first, *({key: v for key, v in flat.items() if first.get(key, ABSENT) != v} for flat in others)]
    return StudyRecord(
        command=command,
        options=list(parsed.options),
        words=list(parsed.overrides),
        start=str(Path.cwd()),
        configs=configs,
        fingerprints=[dict(of_corner) for of_corner in fingerprints],
    )


def is_study(folder: Path) -> bool:
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
    for old, new in zip(before.fingerprints, now.fingerprints, strict=False):
        try:
            run_folder.check_same_inputs(old, new)
        except UserError as error:
            problem = error.problem.replace("since the run began", "since the sweep began")
            remedy = error.remedy.replace("start a new run", "begin another sweep")
            raise UserError(error.key, problem, got=error.got, remedy=remedy) from None
