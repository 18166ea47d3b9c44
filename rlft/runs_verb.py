"""`rlft runs`: every run below a folder in a table, how it stands and how far it is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from rlft import run_status
from rlft.logger.console import open_terminal
from rlft.logger.jsonl import ALARMS, EVALUATIONS, METRICS, read_lines
from rlft.logger.text import visible
from rlft.run.naming import named_folder, run_folders
from rlft.run_status import Status
from rlft.runfolder import CONFIG, whole_config
from rlft.types import UserError
from rlft.words import read_words
from rlft.work import say

USAGE = """\
usage: rlft runs [<folder>] [status=<status>] [name=<text>] [verb=<verb>] [sort=<column>] [--json]

Every run below the folder (runs, if none is named), one line each, the newest last: whether it is running, finished,
interrupted, stopped by itself (and why) or killed; its step; the last reward, or the last loss of a supervised run;
held-out accuracy, age and size. A narrow terminal gets fewer columns; in a pipe or a file the columns are all there,
separated by tabs.

  status, name, verb   show only those; name: part of the run's name or folder
  sort                 age, name, status, step, reward, loss, accuracy or size
  --json               the same as JSON, sizes in bytes and ages in seconds

  rlft runs
  rlft runs runs/grpo_arithmetic status=killed
  rlft runs | grep finished | cut -f1"""

WORDS = ("status", "name", "verb", "sort")
COLUMNS = ("age", "name", "status", "step", "reward", "loss", "accuracy", "size")
TITLES = ("run", "verb", "status", "step", "reward", "loss", "accuracy", "age", "size")
LEFT_OUT_FIRST = ("size", "verb", "age")
"""Columns that make room, in this order, for folders in full length."""

LEFT_OUT_LAST = ("accuracy", "step")
"""Columns that make room for LEAST_ROOM characters of a folder, its end."""

LEAST_ROOM = 12
GAP = 2
DAMAGED = "damaged"
"""The status of a run whose config or metrics cannot be read."""
WRITTEN_BY_RUNS = ("status.json", METRICS, EVALUATIONS, "checkpoints", "rollouts", "progress.json")
"""What lies beside the config.yaml of a run, by which a damaged one is told from a file of that name."""

REPORT = "report.html"
PROGRESS = "progress.json"  # as rlft.sampling_verb names it, which stands on torch


def command(arguments: Sequence[str]) -> None:
    """Prints the table, or the JSON, that the words of a command line ask for."""
    words = read_words("runs", arguments, WORDS, has_json=True)
    if len(words.places) > 1:
        raise UserError("runs", "takes one folder", got=" ".join(words.places), remedy="name the one above them")
    root = named_folder(*(words.places or ("runs",)), "runs", say)
    found = rows(root, words.given)
    if words.as_json:
        print(json.dumps(as_json(found), indent=1))
    else:
        print_rows(found, root)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is shown of a run. reward: reward/mean of the last step; loss: of a run without rewards its last loss. age:
    seconds since anything was written. size: bytes of the whole folder. steps: None where it is not known before the
    run begins."""

    folder: str
    name: str
    verb: str
    status: str
    reason: str
    step: int
    steps: int | None
    reward: float | None
    loss: float | None
    accuracy: float | None
    age: float
    size: int


def rows(root: Path, words: Mapping[str, str]) -> list[Row]:
    """The runs below the folder that the words ask for, sorted.

    Raises:
        UserError: no such folder, a status or a column that there is not.
    """
    if not root.is_dir():
        raise UserError("runs", "there is no such folder", got=root, remedy="name one that holds runs, or train one")
    _check("status", words.get("status"), [*map(str, Status), DAMAGED])
    _check("sort", words.get("sort"), COLUMNS)
    found = [row for folder in run_folders(root) if (row := read(folder)) is not None and _wanted(row, words)]
    column = words.get("sort", "age")
    found.sort(key=lambda row: _place(row, column))
    return found


def read(folder: Path) -> Row | None:
    """None where the config.yaml there is not one of a run. A run that cannot be read is told as damaged, and why."""
    try:
        return _read(folder)
    except (OSError, ValueError, UserError) as error:
        if not any((folder / name).exists() for name in WRITTEN_BY_RUNS):
            return None
        what = error.problem if isinstance(error, UserError) else str(error)
        reason = f"{error.key} {what}" if isinstance(error, UserError) else f"{CONFIG} is damaged: {what}"
        newest, size = _newest_and_size(folder)
        return Row(
            folder=str(folder),
            name="",
            verb="",
            status=DAMAGED,
            reason=reason,
            step=0,
            steps=None,
            reward=None,
            loss=None,
            accuracy=None,
            age=max(0.0, time.time() - newest),
            size=size,
        )


def _read(folder: Path) -> Row:
    config = whole_config(folder)
    status, reason = run_status.read(folder)
    metrics, evaluations, _ = (read_lines(folder / name) for name in (METRICS, EVALUATIONS, ALARMS))
    last = metrics[-1] if metrics else {}
    accuracy = next((line["accuracy"] for line in reversed(evaluations) if line.get("accuracy") is not None), None)
    newest, size = _newest_and_size(folder)
    return Row(
        folder=str(folder),
        name=str(config.get("name", "")),
        verb=str(config["verb"]),
        status=str(status),
        reason=reason,
        step=int(last.get("step", sampled_steps(folder))),
        steps=run_status.num_steps(folder) or config.get("steps"),
        reward=last.get("reward/mean"),
        loss=None if "reward/mean" in last else last.get("loss/total"),
        accuracy=accuracy,
        age=max(0.0, time.time() - newest),
        size=size,
    )


def sampled_steps(folder: Path) -> int:
    """Those of `rlft sample`, which counts them in a file of its own; 0 for other runs."""
    try:
        return int(json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["step"])
    except run_status.UNREADABLE:
        return 0


def _newest_and_size(folder: Path) -> tuple[float, int]:
    newest, size = 0.0, 0
    for file in folder.rglob("*"):
        try:
            found = file.lstat()
        except OSError:  # a checkpoint that a running run has just replaced
            continue
        size += found.st_size
        if file.name != REPORT:  # which the run has not written
            newest = max(newest, found.st_mtime)
    return newest, size


def _check(word: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise UserError(word, "is not one of its choices", got=value, remedy=f"use one of {', '.join(known)}")


def _wanted(row: Row, words: Mapping[str, str]) -> bool:
    named = words.get("name", "") in row.name or words.get("name", "") in row.folder
    return named and row.status == words.get("status", row.status) and row.verb == words.get("verb", row.verb)


def _place(row: Row, column: str) -> tuple[Any, ...]:
    """By age the newest last; by numbers the largest last, those without one first."""
    if column == "age":
        return (-row.age, row.folder)
    value = getattr(row, column)
    return (value is not None, value if value is not None else 0, row.folder)


def as_json(found: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in found]


def print_rows(found: Sequence[Row], root: Path) -> None:
    """A table on a terminal; one line of values separated by tabs for each run in a pipe."""
    terminal = open_terminal()
    if not found:
        terminal.print(Text(f"no such run below {root}"))
    elif sys.stdout.isatty():
        print_table(terminal, found, root)
    else:
        print_lines(found)


def cells_of(row: Row) -> dict[str, str]:
    """The text of each column."""
    numbers = {"reward": row.reward, "loss": row.loss, "accuracy": row.accuracy}
    return {
        "run": row.folder,
        "verb": row.verb,
        "status": row.status,
        "step": f"{row.step}" if row.steps is None else f"{row.step}/{row.steps}",
        **{name: "" if value is None else f"{value:.3f}" for name, value in numbers.items()},
        "age": age_text(row.age),
        "size": size_text(row.size),
    }


def print_lines(found: Sequence[Row]) -> None:
    """A line of titles, then a line a run, the reason of a stop last; no value is cut or coloured."""
    print("\t".join([*TITLES, "reason"]))
    for row in found:
        cells = [*cells_of(row).values(), row.reason]
        print("\t".join(visible(cell).replace("\t", "\\t").replace("\n", "\\n") for cell in cells))


def print_table(terminal: Terminal, found: Sequence[Row], root: Path) -> None:
    """One line a run within the terminal's width, and the reasons of stops below."""
    rows = [{name: visible(cell).replace("\n", "\\n") for name, cell in cells_of(row).items()} for row in found]
    titles = [name for name in TITLES if any(row[name] for row in rows)]
    titles, room = fitting_columns(rows, titles, root, terminal.width)
    if any(len(row["run"]) > room for row in rows):
        terminal.print(Text(f"in {visible(str(root))}:", style="dim"), soft_wrap=True)
        rows = [{**row, "run": _end(_below(row["run"], root), room)} for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for name in titles:
        is_text = name in ("run", "verb", "status")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, overflow="crop")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in titles))
    terminal.print(table)
    for row in found:
        if row.reason:
            terminal.print(Text(f"{row.folder} {row.status}: {visible(row.reason)}", style="dim"), soft_wrap=True)


def fitting_columns(
    rows: Sequence[Mapping[str, str]], titles: Sequence[str], root: Path, width: int
) -> tuple[list[str], int]:
    """(columns, characters for the run's folder): the most columns beside which folders, named from the root, fit."""
    kept = list(titles)
    longest = max(len(_below(row["run"], root)) for row in rows)

    def room() -> int:
        others = [max(len(name), *(len(row[name]) for row in rows)) for name in kept if name != "run"]
        return width - sum(others) - GAP * len(others)

    for columns, wanted in ((LEFT_OUT_FIRST, longest), (LEFT_OUT_LAST, min(longest, LEAST_ROOM))):
        for name in columns:
            if room() < wanted and name in kept:
                kept.remove(name)
    return kept, max(room(), LEAST_ROOM)


def _end(text: str, width: int) -> str:
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _below(folder: str, root: Path) -> str:
    """The folder as it is named from the root."""
    path = Path(folder)
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else folder


def age_text(seconds: float) -> str:
    """The age in its largest whole unit.

    >>> age_text(5), age_text(150), age_text(7200), age_text(400000)
    ('5 s', '2 min', '2 h', '4 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def size_text(size: int) -> str:
    """The size in its largest unit.

    >>> size_text(512), size_text(20_500_000), size_text(3 * 10**9)
    ('1 kB', '20.5 MB', '3.0 GB')
    """
    if size >= 10**9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 10**6 else f"{max(1, round(size / 1000))} kB"
