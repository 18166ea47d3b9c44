"""The lines of a recorded run (docs/audit.md): settings, completions, updates; TRL's and verl's files as such lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlft.commands.audit.other_trainers.settings import DEFAULTS, Settings, Trainer
from rlft.config.bounds import NonNegativeInt
from rlft.config.instantiate import from_mapping
from rlft.data.files import Table, tables
from rlft.types import UserError, counted, require

FORM = "docs/audit.md has the form"
Line = TypeVar("Line")
Numbers = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of a step: everything that is sampled and normalised together.

    The lists of tokens have an entry for each position that was recorded: `prompt_entries` of the prompt, then those of
    the completion, then padding. `old_logprobs` is "current" where the trainer took those of the update itself.
    """

    step: NonNegativeInt
    group: int | str
    reward: float | None = None
    rewards: Mapping[str, float | None] | None = None
    advantage: float | None = None
    completion_ids: Sequence[int] | None = None
    length: NonNegativeInt | None = None
    truncated: bool | None = None
    prompt_entries: NonNegativeInt = 0
    mask: Sequence[Literal[0, 1]] | None = None
    tool_mask: Sequence[Literal[0, 1]] | None = None
    logprobs: Numbers | None = None
    old_logprobs: Numbers | Literal["current"] | None = None
    ref_logprobs: Numbers | None = None

    @property
    def num_tokens(self) -> int | None:
        """Of the completion; None: not recorded."""
        return self.length if self.completion_ids is None else len(self.completion_ids)

    def lists(self) -> dict[str, Sequence[float]]:
        """{name: entries} of the recorded lists of tokens."""
        values = {
            name: getattr(self, name) for name in ("mask", "tool_mask", "logprobs", "old_logprobs", "ref_logprobs")
        }
        return {name: entries for name, entries in values.items() if entries is not None and entries != "current"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What was logged of one update on a step's completions.

    `rows` are its micro-batches, each the places of its completions in the step, from 0; None: all in one. `logprobs`
    has a list of tokens for each of these; None: those of the completions.
    """

    step: NonNegativeInt
    loss: float | None = None
    kl: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    rows: Sequence[Sequence[NonNegativeInt]] | None = None
    logprobs: Sequence[Sequence[Numbers]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What verl's file logger wrote of a step."""

    step: NonNegativeInt
    data: Mapping[str, Any]
    elapsed_seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class Recording:
    """The lines of a run, each with its place; `lacking` says why groups are not known, {step: why}."""

    settings: Settings
    completions: list[tuple[str, Completion]] = field(default_factory=list)
    updates: list[tuple[str, Update]] = field(default_factory=list)
    metrics: list[tuple[str, Metrics]] = field(default_factory=list)
    lacking: dict[int, str] = field(default_factory=dict)


def read(path: Path, trainer: Trainer, given: Mapping[str, Any]) -> Recording:
    """The recording in this file or folder. `given`: settings of the command line, which come before those of a file.

    Raises UserError: there is nothing to read, or a line is not of the form.
    """
    files = _files(path)
    rows = [
        (table, table.place(r.number), table.fields(r)) for table in tables(files, "audit") for r in table.records()
    ]
    require(rows, "audit", "has no lines", got=path, remedy=FORM)
    recorded: dict[str, Any] = {}
    for _, place, row in rows:
        if "settings" in row:
            require(len(row) == 1, f"{place}.settings", "stands on a line of its own", remedy=FORM)
            _line(Settings, row["settings"], f"{place}.settings")
            recorded |= row["settings"]
    recording = Recording(settings=_line(Settings, {**DEFAULTS[trainer], **recorded, **given}, ""))
    others = [row for row in rows if "settings" not in row[2]]
    for (_, kind), part in groupby(others, key=lambda row: (id(row[0]), _kind(row[0], row[1], row[2]))):
        kind(recording, [(place, row) for _, place, row in part])
    require(recording.completions, "audit", "has no completions", got=path, remedy=FORM)
    return recording


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    require(path.is_dir(), "audit", "there is no such file or folder", got=path, remedy="name what the run has logged")
    below = path / "completions"
    folder = below if below.is_dir() else path  # TRL's output_dir has its tables there
    found = sorted(file for file in folder.iterdir() if file.suffix in (".jsonl", ".parquet"))
    # verl names files by their step: 10.jsonl comes after 9.jsonl
    found.sort(key=lambda file: int(file.stem) if file.stem.isdigit() else -1)
    require(found, "audit", "has no .jsonl or .parquet files", got=folder, remedy="name what the run has logged")
    return found


def _kind(table: Table, place: str, row: Mapping[str, Any]) -> Any:
    """What reads rows like this one."""
    if table.unit == "row":
        return _trl_table
    if "group" in row:
        return _completions
    if {"input", "output", "score"} <= row.keys():
        return _verl_dump
    if {"step", "data"} <= row.keys():
        return _metrics
    if {field.name for field in fields(Update)} & row.keys() - {"step"}:
        return _updates
    problem = "is neither a completion (group), nor an update (loss), nor settings, nor a line of verl"
    raise UserError(place, problem, got=", ".join(row) or "{}", remedy=FORM)


def _line(cls: type[Line], values: Any, place: str) -> Line:
    """The line as this class. UserError with its place and key."""
    try:
        return from_mapping(cls, values, place)
    except UserError as error:
        remedy = FORM if "--cfg job" in error.remedy else error.remedy  # which lists the keys of a run of rlft
        raise UserError(error.key, error.problem, got=error.got, remedy=remedy) from None


Row = tuple[str, Mapping[str, Any]]
"""A row with its place."""


def _completions(recording: Recording, rows: Iterable[Row]) -> None:
    for place, row in rows:
        line = _line(Completion, row, place)
        size = {name: len(entries) for name, entries in line.lists().items()}
        problem = "must be as long as the line's other lists"
        for name in size:
            require(size[name] == max(size.values()), f"{place}.{name}", problem, got=size[name], remedy=FORM)
        both = None not in (line.length, line.completion_ids) and line.length != line.num_tokens
        require(not both, f"{place}.length", "is not that of completion_ids", got=line.length, remedy=FORM)
        needed = line.prompt_entries + (line.num_tokens or 0)
        for name in size:
            problem = f"has no entry for each of the {needed} tokens of prompt_entries and completion"
            require(size[name] >= needed, f"{place}.{name}", problem, got=size[name], remedy=FORM)
        problem = "is missing, and there are no rewards"
        require(line.reward is not None or line.rewards, f"{place}.reward", problem, remedy=FORM)
        recording.completions.append((place, line))


def _updates(recording: Recording, rows: Iterable[Row]) -> None:
    recording.updates += [(place, _line(Update, row, place)) for place, row in rows]


def _metrics(recording: Recording, rows: Iterable[Row]) -> None:
    recording.metrics += [(place, _line(Metrics, row, place)) for place, row in rows]


# -- TRL's table -------------------------------------------------------------------------------------------------------
def _trl_table(recording: Recording, rows: Iterable[Row]) -> None:
    """A table of log_completions: step, prompt, completion, rewards, other columns of rewards' functions, advantage."""
    rows, settings = list(rows), recording.settings
    place, first = rows[0]
    for name in ("step", "prompt", "advantage"):
        require(name in first, f"{place}.{name}", "is missing in the table", remedy="name a table of log_completions")
    columns = settings.reward_columns or [
        name
        for name in first
        if name not in ("step", "prompt", "completion", "advantage")
        and all(type(row[name]) in (int, float, type(None)) for _, row in rows)
        and any(row[name] is not None for _, row in rows)
    ]
    for name in columns:
        problem = f"the table has no such column, only {', '.join(first)}"
        require(name in first, "reward_columns", problem, got=name, remedy="name those of the rewards")
    require(columns, f"{place}", "has no column with rewards", got=", ".join(first), remedy="name a table of rewards")
    for step, part in groupby(rows, key=lambda row: row[1]["step"]):
        _step_of_table(recording, step, list(part), columns)


def _step_of_table(recording: Recording, step: Any, rows: Sequence[Row], columns: Sequence[str]) -> None:
    runs = [len(list(run)) for _, run in groupby(rows, key=lambda row: row[1]["prompt"])]
    size = recording.settings.num_generations
    if size is None and len(set(runs)) > 1:
        why = f"as a prompt has {min(runs)} to {counted(max(runs), 'row')} in a row; give num_generations"
        recording.lacking[step] = f"{rows[0][0]}: its groups are not known, {why}"
    size = size or runs[0]
    problem = f"does not divide the {counted(len(rows), 'row')} of step {step}"
    divides = step in recording.lacking or not len(rows) % size
    require(divides, "num_generations", problem, got=size, remedy="give the run's own")
    for index, (place, row) in enumerate(rows):
        problem = f"{place}: has another prompt than the rows before it, of whose group it would be"
        same = step in recording.lacking or row["prompt"] == rows[index - index % size][1]["prompt"]
        require(same, "num_generations", problem, got=size, remedy="give the run's own")
        line = {
            "step": row["step"],
            "group": index // size,
            "rewards": {name: _none_if_nan(row[name]) for name in columns},
            "advantage": row["advantage"],
        }
        recording.completions.append((place, _line(Completion, line, place)))


def _none_if_nan(value: float | None) -> float | None:
    return None if value is None or value != value else float(value)


# -- verl's dump -------------------------------------------------------------------------------------------------------
def _verl_dump(recording: Recording, rows: Iterable[Row]) -> None:
    """A dump of trainer.rollout_data_dir: input, output, score, step; completions of one input are a group."""
    sizes: dict[int, Counter[str]] = {}
    places: dict[int, str] = {}
    for place, row in rows:
        line = {"step": row.get("step"), "group": str(row.get("uid", row["input"])), "reward": row["score"]}
        completion = _line(Completion, line, place)
        sizes.setdefault(completion.step, Counter())[str(completion.group)] += 1
        places.setdefault(completion.step, place)
        recording.completions.append((place, completion))
    for step, numbers in sizes.items():
        least, most = min(numbers.values()), max(numbers.values())
        if least != most:
            why = f"as an input has {least} to {counted(most, 'output')}: some prompts are equal"
            recording.lacking[step] = f"{places[step]}: its groups are not known, {why}"
