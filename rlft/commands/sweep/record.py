"""A study's record: its words, and what they meant when it began. Whoever resumes it has the same study."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rlft.commands.sweep.space import SECTION, StudyConfig, changes_no_number
from rlft.config.keys import ABSENT, flatten, is_path_key, keys_of
from rlft.config.overrides import CONFIG_DIR, Arguments, key_of
from rlft.config.schema import RunConfig
from rlft.runs import run_folder
from rlft.runs.config_file import same_path
from rlft.system.files import write_atomically
from rlft.system.terminal import resuming
from rlft.types import UserError, require

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
