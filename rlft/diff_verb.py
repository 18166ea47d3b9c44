"""`rlft diff <run> <run>`: in which keys two runs differ, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from rlft.logger.console import open_terminal
from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines
from rlft.logger.text import visible
from rlft.run.naming import one_run, runs_below
from rlft.runfolder import ORIGIN, flatten, read
from rlft.types import UserError
from rlft.words import read_words
from rlft.work import say

USAGE = """\
usage: rlft diff <run> <run> [--json]

The keys in which the two configs differ, versions and commit among them, and the metrics of both side by side: means of
the last tenth of the steps they have both done, medians of times, the largest memory, accuracy before and after.

  rlft diff runs/grpo_arithmetic/<time> runs/ppo_arithmetic/<time>"""

ABSENT = "-"
UNTOLD = ("resume",)
LAST_SHARE = 0.1


def command(arguments: Sequence[str]) -> None:
    """Prints how the two runs differ that the words of a command line name."""
    words = read_words("diff", arguments, has_json=True)
    first, second = two_runs(words.places)
    if words.as_json:
        print(json.dumps(as_json(first, second), indent=1))
    else:
        print_differences(first, second)


def two_runs(names: Sequence[str]) -> tuple[Path, Path]:
    """The runs that are compared: two that are named, or the two below one folder.

    Raises:
        UserError: another number of them.
    """
    if len(names) == 1 and len(runs := runs_below(Path(names[0]))) == 2:
        say(f"{names[0]}: {runs[0]} and {runs[1]}, the two runs there")
        return runs[0], runs[1]
    if len(names) != 2:
        got = " ".join(names) or "none"
        raise UserError("diff", "compares two runs", got=got, remedy="write rlft diff <run> <run>")
    first, second = (one_run(name, "diff", say) for name in names)
    return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One line: a key or a metric, and its value in each run."""

    name: str
    first: Any
    second: Any


def config_differences(first: Path, second: Path) -> list[Difference]:
    """Keys whose values differ, `origin.*` (commit, versions, fingerprints) last."""
    before, after = (flatten(read(folder, "diff")) for folder in (first, second))
    names = [name for name in {**before, **after} if name not in UNTOLD]
    found = [
        Difference(name=name, first=before.get(name, ABSENT), second=after.get(name, ABSENT))
        for name in names
        if before.get(name, ABSENT) != after.get(name, ABSENT)
    ]
    return sorted(found, key=lambda d: d.name.startswith(f"{ORIGIN}."))


def metric_rows(first: Path, second: Path) -> list[Difference]:
    """Metrics of both runs, over the same steps where both have them."""
    lines = [read_lines(folder / METRICS) for folder in (first, second)]
    evaluations = [read_lines(folder / EVALUATIONS) for folder in (first, second)]
    rows = [Difference(name="steps", first=_last_step(lines[0]), second=_last_step(lines[1]))]
    for name, place in (("accuracy at first", 0), ("accuracy at last", -1)):
        values = [_accuracies(found)[place] if _accuracies(found) else None for found in evaluations]
        if any(value is not None for value in values):
            rows.append(Difference(name=name, first=values[0], second=values[1]))
    both = [_shared(found, lines) for found in lines]
    names = dict.fromkeys(name for found in lines for line in found for name in line if name != "step")
    for name in names:
        values = [_summary(name, found) for found in both]
        if any(value is not None for value in values):
            rows.append(Difference(name=name, first=values[0], second=values[1]))
    return rows


def _shared(own: Sequence[Mapping[str, Any]], lines: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """The run's steps that the other has done, too; all of them where there is no other."""
    done = min((_last_step(found) for found in lines if found), default=0)
    return [line for line in own if line["step"] <= done]


def _summary(name: str, lines: Sequence[Mapping[str, Any]]) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    if not values:
        return None
    if name.startswith("time/"):
        return median(values)
    if name.startswith("memory/"):
        return max(values)
    last = values[-max(1, round(LAST_SHARE * len(values))) :]
    return sum(last) / len(last)


def _last_step(lines: Sequence[Mapping[str, Any]]) -> int:
    return int(lines[-1]["step"]) if lines else 0


def _accuracies(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    return [line["accuracy"] for line in lines if line.get("accuracy") is not None]


def as_json(first: Path, second: Path) -> dict[str, Any]:
    return {
        "runs": [str(first), str(second)],
        "config": [asdict(row) for row in config_differences(first, second)],
        "metrics": [asdict(row) for row in metric_rows(first, second)],
    }


def print_differences(first: Path, second: Path) -> None:
    terminal = open_terminal()
    for title, found in (("config", config_differences(first, second)), ("metrics", metric_rows(first, second))):
        if not found:
            terminal.print(Text(f"{title}: no difference", style="bold"))
            continue
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in (title, str(first), str(second)):
            table.add_column(Text(visible(name)), overflow="fold")
        for row in found:
            table.add_row(*(Text(visible(text_of(value))) for value in (row.name, row.first, row.second)))
        terminal.print(table)
        terminal.print()


def text_of(value: Any) -> str:
    """A value as a cell shows it.

    >>> text_of(0.123456), text_of(3), text_of(None), text_of(1234567.0), text_of("x")
    ('0.1235', '3', '-', '1,234,567', 'x')
    """
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**6 else f"{value:.4g}"
    return str(value)
