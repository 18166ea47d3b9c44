"""`rlft runs`: prints a table of every run below a folder, with its status and progress; and what runs are called.

Among others, a run is called by the settings in which they differ, and runs with equal ones are seeds of one
experiment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.text import Text

from rlft.config import command as commands
from rlft.config.choices import choice_remedy
from rlft.config.keys import is_path_key
from rlft.config.overrides import unquoted
from rlft.config.suggest import OWN_KEYS, of_other_commands
from rlft.logger.console import open_terminal
from rlft.logger.tables import GAP, Column, WordTable
from rlft.runs import run_folder, run_status
from rlft.runs.find import named_folder, run_folders, setting_name
from rlft.runs.forecast import Forecast, Pace
from rlft.runs.lines import ALARMS, EVALUATIONS, METRICS, last_line, read_lines
from rlft.runs.run_folder import CONFIG, ORIGIN, flatten, whole_config
from rlft.runs.run_status import NewerError, Status
from rlft.system.disk import size_text
from rlft.system.terminal import Say, resuming, say
from rlft.system.text import duration, visible
from rlft.types import Mistakes, UserError, require

MAX_KEYS_OF_NAME = 4

Config = Mapping[str, Any]


def settings_of(configs: Sequence[Config]) -> list[dict[str, str]]:
    """{key: its value as text} of each plain config, of the keys in which they differ and on which results depend."""
    flat = [flatten({key: value for key, value in config.items() if key != ORIGIN}) for config in configs]
    located = [
        {k: os.path.realpath(v) if is_path_key(k) and Path(str(v)).exists() else v for k, v in f.items()} for f in flat
    ]
    rows = [(key, v) for key, v in differing(located, "") if any(run_folder.decides_results(key, c) for c in configs)]
    return [{key: text_of(values[i]) for key, values in rows} for i in range(len(configs))]


def names_of(folders: Sequence[Path], configs: Sequence[Config]) -> list[tuple[str, str]]:
    """(name, name of its settings) of each run: the settings in which it differs from the others, and its seed.

    Runs with equal settings and seeds have their folders as well. If many settings differ, or none and no seed either,
    the name is the folder, and that of the settings is empty.
    """
    short = ["/".join(folder.parts[-2:]) for folder in folders]
    seeds, settings = [text_of(config.get("seed")) for config in configs], settings_of(configs)
    varied = [{"seed": seed} if len(set(seeds)) > 1 else {} for seed in seeds]
    names = [setting_name({**setting, **seed}) for setting, seed in zip(settings, varied, strict=True)]
    if len(settings[0]) > MAX_KEYS_OF_NAME or not any(names):
        return [(folder, "") for folder in short]
    own = [f"{name} ({folder})" if names.count(name) > 1 else name for name, folder in zip(names, short, strict=True)]
    return list(zip(own, map(setting_name, settings), strict=True))


def same_settings(configs: Sequence[Config]) -> list[list[int]]:
    """Groups of two or more runs, by index, with the same settings: seeds of one experiment."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, settings in enumerate(settings_of(configs)):
        groups.setdefault(tuple(settings.values()), []).append(index)
    return [indices for indices in groups.values() if len(indices) > 1]


def differing(configs: Sequence[Mapping[str, Any]], absent: str) -> list[tuple[str, list[Any]]]:
    """(key, its value in each config, or `absent`) of the keys whose values differ, the origin's keys last."""
    names = dict.fromkeys(name for config in configs for name in config if name != "resume")
    rows = [(name, [config.get(name, absent) for config in configs]) for name in names]
    rows = [(name, values) for name, values in rows if any(value != values[0] for value in values)]
    return sorted(rows, key=lambda row: row[0].startswith(f"{ORIGIN}."))


def text_of(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


COLUMNS = ("age", "name", "status", "step", "reward", "loss", "accuracy", "size")
TITLES = ("run", "setting", "command", "status", "step", "reward", "loss", "accuracy", "left", "age", "size")
LEFT_OUT_FIRST = ("size", "command", "age")  # in this order, until folders fit in full length
LEFT_OUT_LAST = ("accuracy", "left", "step")  # until the last LEAST_ROOM characters of a folder fit
LEAST_ROOM = 12
DAMAGED = "damaged"  # the status of a run whose config or metrics cannot be read
CHOICES = {"status": (*map(str, Status), DAMAGED), "sort": COLUMNS}
WRITTEN_BY_RUNS = ("status.json", METRICS, EVALUATIONS, "checkpoints", "rollouts", run_status.PROGRESS)
"""Files next to a run's config.yaml, by which a damaged run is told from a folder with another config.yaml."""
REPORT = "report.html"
RESUME = "resume with:"


def command(arguments: Sequence[str]) -> None:
    folders, values, as_json = read_words("runs", arguments, has_json=True)
    require(len(folders) < 2, "runs", "takes one folder", got=" ".join(folders), remedy="name the one above them")
    root = named_folder(folders[0] if folders else "runs", "runs", say)
    listed, terminal = rows(root, values), open_terminal()
    if as_json:
        print(json.dumps([asdict(row) for row in listed], indent=1))
    elif not listed:
        terminal.print(Text(f"no such run below {root}"))
    elif sys.stdout.isatty():
        print_table(terminal, listed, root)
    else:
        print_lines(listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """The row of a run.

    `reward` or `loss` is the last value of the command's headline metric (reward/mean or loss/total for rlft's own):
    `reward` if more is better, else `loss`. `age` is the number of seconds since anything was written, `size` the bytes
    of the whole folder. `steps` is None if it is not known before the run starts. `left` is how long it still takes;
    None if it does not run, or has not done enough steps to say. `setting` is what tells a sweep's run from its others.
    """

    folder: str
    name: str = ""
    setting: str = ""
    command: str = ""
    status: str
    reason: str
    step: int = 0
    steps: int | None = None
    reward: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    left: Forecast | None = None
    age: float
    size: int


def rows(root: Path, words: Mapping[str, str]) -> list[RunRow]:
    """The rows of the runs below the folder that match the filters in `words`, sorted."""
    remedy = "name one that holds runs, or train one"
    require(root.is_dir(), "runs", "there is no such folder", got=root, remedy=remedy)
    _check("status", words.get("status"), CHOICES["status"])
    _check("sort", words.get("sort"), CHOICES["sort"])
    all_rows = with_settings([row for folder in run_folders(root) if (row := read(folder)) is not None])
    known = {*commands.names(), *(row.command for row in all_rows if row.command)}
    _check("command", words.get("command"), sorted(known))
    chosen = [row for row in all_rows if any(words.get("name", "") in text for text in (row.name, row.folder))]
    for key in ("status", "command"):
        chosen = [row for row in chosen if getattr(row, key) == words.get(key, getattr(row, key))]
    return sorted(chosen, key=lambda row: _sort_key(row, words.get("sort", "age")))


def with_settings(rows: Sequence[RunRow]) -> list[RunRow]:
    """The rows with the names of their settings, as `rlft report` has them, if all are runs of one name and command."""
    whole = [row for row in rows if row.status != DAMAGED]
    if len(whole) < 2 or len({(row.name, row.command) for row in whole}) > 1:
        return list(rows)
    folders = [Path(row.folder) for row in whole]
    named = names_of(folders, [whole_config(folder) for folder in folders])
    names = {row.folder: name for row, (name, setting) in zip(whole, named, strict=True) if setting or "=" in name}
    return [replace(row, setting=names.get(row.folder, "")) for row in rows]


def read(folder: Path, say: Say = say) -> RunRow | None:
    """The row of the run in a folder; None if its config.yaml is not that of a run. `say` reports damaged lines.

    A run that cannot be read has the status damaged, with the reason.
    """
    try:
        return _read(folder, say)
    except (OSError, ValueError, UserError) as error:
        if not any((folder / name).exists() for name in WRITTEN_BY_RUNS):
            return None
        if isinstance(error, UserError):
            reason = f"{error.key} {error.problem}"
        else:
            reason = f"{CONFIG} {error}" if isinstance(error, NewerError) else f"{CONFIG} is damaged: {error}"
        age, size = _age_and_size(folder)
        return RunRow(folder=str(folder), status=DAMAGED, reason=reason, age=age, size=size)


def _read(folder: Path, say: Say) -> RunRow:
    config = whole_config(folder)
    status, reason = run_status.read(folder)
    last = last_line(folder / METRICS, say)
    evaluations, _ = (read_lines(folder / name, say) for name in (EVALUATIONS, ALARMS))
    accuracy = next((line["accuracy"] for line in reversed(evaluations) if line.get("accuracy") is not None), None)
    headline = commands.named(config["command"]).headline
    value = None if headline is None else last.get(headline.metric)
    is_loss = headline is not None and headline.lower_is_better
    age, size = _age_and_size(folder)
    steps = run_status.num_steps(folder) or config.get("steps")
    return RunRow(
        folder=str(folder),
        name=str(config.get("name", "")),
        command=config["command"],
        status=str(status),
        reason=reason,
        step=int(last.get("step", run_status.counted_steps(folder))),
        steps=steps,
        reward=None if is_loss else value,
        loss=value if is_loss else None,
        accuracy=accuracy,
        left=_left(folder, config, steps, say) if status is Status.running and steps else None,
        age=age,
        size=size,
    )


def _left(folder: Path, config: Mapping[str, Any], steps: int, say: Say) -> Forecast | None:
    """How long a running run still takes; None if it has not done enough steps to say."""
    pace = Pace(config, steps)
    for line in read_lines(folder / METRICS, say):
        pace.add(line["step"], line)
    left = pace.forecast()
    return left and left.after(max(0.0, time.time() - (folder / METRICS).stat().st_mtime))


def _age_and_size(folder: Path) -> tuple[float, int]:
    """Seconds since the run has written anything, and the bytes of its folder."""
    newest, size = 0.0, 0
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):  # a checkpoint may just have been replaced
                stat = Path(above, name).lstat()
                size += stat.st_size
                if name != REPORT:  # `rlft report` has written it, not the run
                    newest = max(newest, stat.st_mtime)
    return max(0.0, time.time() - newest), size


def _check(word: str, value: str | None, known: Sequence[str]) -> None:
    remedy = choice_remedy(value, known)
    require(value in (None, *known), word, "is not one of its choices", got=value, remedy=remedy)


def _sort_key(row: RunRow, column: str) -> tuple[Any, ...]:
    """Sorts the newest run last for `age`; for numbers, the largest last and runs without one first."""
    if column == "age":
        return (-row.age, row.folder)
    value = getattr(row, column)
    return (value is not None, value if value is not None else 0, row.folder)


def cells_of(row: RunRow) -> dict[str, str]:
    numbers = {"reward": row.reward, "loss": row.loss, "accuracy": row.accuracy}
    return {
        "run": row.folder,
        "setting": row.setting,
        "command": row.command,
        "status": row.status,
        "step": f"{row.step}" if row.steps is None else f"{row.step}/{row.steps}",
        **{name: "" if value is None else f"{value:.3f}" for name, value in numbers.items()},
        "left": "" if row.left is None else duration(row.left.seconds),
        "age": age_text(row.age),
        "size": size_text(row.size),
    }


def print_lines(listed: Sequence[RunRow]) -> None:
    """Prints a line of titles, then one line per run with tabs between values, the reason of a stop last."""
    print("\t".join([*TITLES, "reason"]))
    for row in listed:
        cells = [*cells_of(row).values(), explained(row)]
        print("\t".join(visible(cell).replace("\t", "\\t").replace("\n", "\\n") for cell in cells))


def print_table(terminal: Terminal, listed: Sequence[RunRow], root: Path) -> None:
    """Prints a row per run in as many columns as the terminal has room for, and the reasons of stops below."""
    rows = [{name: visible(cell).replace("\n", "\\n") for name, cell in cells_of(row).items()} for row in listed]
    titles = [name for name in TITLES if any(row[name] for row in rows)]

    def lacking(least: int = sys.maxsize) -> int:
        """The columns that the terminal lacks; folders need `least` at most, and a setting may take several lines."""
        texts = {name: [row[name] for row in rows] for name in titles}
        texts |= {"setting": " ".join(texts["setting"]).split()} if "setting" in titles else {}
        widths = {name: max(len(name), *map(len, texts[name])) for name in titles}
        widths["run"] = min(widths["run"], least)
        return sum(widths.values()) + len(GAP) * (len(titles) - 1) - terminal.width

    if lacking() > 0:
        terminal.print(Text(f"in {visible(str(root))}:", style="dim"))
        rows = [{**row, "run": _relative(row["run"], root)} for row in rows]
    for name in (*LEFT_OUT_FIRST, *LEFT_OUT_LAST):
        if name in titles and lacking(LEAST_ROOM if name in LEFT_OUT_LAST else sys.maxsize) > 0:
            titles.remove(name)
    if (excess := lacking()) > 0:
        room = max(LEAST_ROOM, max(len(row["run"]) for row in rows) - excess)
        rows = [{**row, "run": f"...{row['run'][3 - room :]}"} if len(row["run"]) > room else row for row in rows]
    columns = [Column(name, right=name not in ("run", "setting", "command", "status")) for name in titles]
    terminal.print(WordTable(columns, [[row[name] for name in titles] for row in rows]))
    for row in listed:
        if explanation := explained(row):
            text = f"{row.folder} {row.status}: {visible(explanation)}"
            if len(text) > terminal.width:
                text = text.replace(f" {RESUME} ", f" {RESUME}\n  ")  # the command is whole in its line
            terminal.print(Text(text, style="dim"))


def explained(row: RunRow) -> str:
    """Why the run stopped, or how to resume one that was killed or interrupted; "" for any other."""
    has_all_steps = row.steps is not None and row.step >= row.steps
    if row.status in (Status.killed, Status.interrupted) and not has_all_steps:
        return f"{RESUME} {resuming(Path(row.folder))}"
    return row.reason


def _relative(folder: str, root: Path) -> str:
    """The folder relative to the root, if it is below it."""
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


def read_words(
    command: str, arguments: Sequence[str], *, has_json: bool = False
) -> tuple[list[str], dict[str, str], bool]:
    """Parses the arguments of a command that has only keys of its own.

    Returns the folders as they were typed, without a leading `run=`, the typed keys, and whether --json is among them.
    An existing path is a folder, even with an equals sign: a sweep's may be named `lr=1e-05`.
    """
    options = [word for word in arguments if word.startswith("-") and not _exists(word)]
    if unknown_options := [word for word in options if not (has_json and word == "--json")]:
        remedy = "use --json or --help" if has_json else "use --help"
        raise UserError("command line", "there is no such option", got=unknown_options[0], remedy=remedy)
    words = [
        unquoted(word.removeprefix("run=")) if word.startswith("run=") and not _exists(word) else word
        for word in arguments
        if word not in options
    ]
    assignments = [word for word in words if "=" in word and not _exists(word)]
    values = dict(word.split("=", 1) for word in assignments)
    mistakes = Mistakes()
    for key, value in values.items():
        remedy = f"use {', '.join(f'{own}=' for own in OWN_KEYS[command])}"
        problem = of_other_commands(key, command) or f"is not a key of rlft {command}"
        with mistakes:
            require(key in OWN_KEYS[command], key, problem, got=value, remedy=remedy)
    mistakes.refuse()
    return [word for word in words if word not in assignments], values, bool(options)


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # too long for a name
        return False
