"""The jobs of a sweep, which are ordinary runs, and the table of their results."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.commands.watch.report import SWEEP as TABLE
from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines
from rlft.runs.config_file import CONFIG
from rlft.runs.find import short_names
from rlft.system.files import write_atomically
from rlft.types import UserError

RESULTS = ("job", "steps", "accuracy_before", "accuracy", "accuracy_se", "reward", "loss", "seconds", "folder")
"""The columns of sweep.csv beside the swept keys."""
COLUMNS = {
    "steps": "steps",
    "accuracy_before": "before",
    "accuracy": "accuracy",
    "reward": "reward",
    "loss": "loss",
    "seconds": "seconds",
}
"""The columns of the printed table with their headers; the accuracy is printed with its standard error."""
# Keys that say where a run is: they cannot differ between jobs.
FIXED = ("resume", "hydra.sweep.dir", "hydra.run.dir", "hydra.sweep.subdir")


def check_jobs(jobs: Sequence[Sequence[str]]) -> None:
    """Refuses a sweep whose jobs cannot be told apart or would share a folder.

    Args:
        jobs: the overrides of each job, as Hydra expands them.
    """
    keys = [[override.lstrip("+~").partition("=")[0] for override in job] for job in jobs]
    for names in keys:
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(
                repeated[0],
                "is given twice on the command line",
                got=", ".join(repeated),
                remedy="give it once, with all its values",
            )
    values: dict[str, set[str]] = {}
    for job in jobs:
        for override in job:
            key, _, value = override.lstrip("+~").partition("=")
            values.setdefault(key, set()).add(value)
    for key in FIXED:
        if len(values.get(key, ())) > 1:
            raise UserError(
                key,
                "cannot be swept: each job has its own folder",
                got=sorted(values[key]),
                remedy="leave it out of the sweep",
            )
    if "resume" in values and values["resume"] != {"null"}:
        raise UserError(
            "resume",
            "cannot be used in a sweep",
            got=sorted(values["resume"]),
            remedy="repeat the sweep with hydra.sweep.dir=<its folder>: finished jobs are skipped",
        )
    seen: dict[tuple[str, ...], int] = {}
    for number, job in enumerate(jobs):
        first = seen.setdefault(tuple(sorted(job)), number)
        if first != number:
            raise UserError(
                "-m", f"jobs {first} and {number} are the same", got=" ".join(job), remedy="give every value once"
            )


def is_sweep(folder: Path) -> bool:
    """Whether the folder has jobs of a plain sweep, or a sweep's table."""
    return (folder / TABLE).exists() or next(folder.glob(f"*/{CONFIG}"), None) is not None


def rows(folder: Path, jobs: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """One row per job, the best held-out accuracy first, or the lowest loss if no accuracy was measured."""
    swept = swept_keys(jobs)
    result = []
    for number, job in enumerate(jobs):
        run = folder / str(number)
        evaluations, metrics = read_lines(run / EVALUATIONS), read_lines(run / METRICS)
        chosen = values_of(job)
        result.append(
            {
                "job": number,
                **{column_of(key): chosen.get(key, "") for key in swept},
                "steps": metrics[-1]["step"] if metrics else 0,
                "accuracy_before": evaluations[0]["accuracy"] if evaluations else None,
                "accuracy": evaluations[-1]["accuracy"] if evaluations else None,
                "accuracy_se": evaluations[-1]["accuracy_se"] if evaluations else None,
                "reward": metrics[-1].get("reward/mean") if metrics else None,
                "loss": (evaluations[-1] if evaluations else {}).get("eval/loss"),
                "seconds": round(sum(line.get("time/step") or 0.0 for line in metrics), 1),
                "folder": str(run),
            }
        )

    def rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
        loss = row["loss"]
        return (row["accuracy"] is None, -(row["accuracy"] or 0.0), loss is None, loss or 0.0, row["job"])

    return sorted(result, key=rank)


def swept_keys(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The keys whose values differ between jobs; all of them when there is one job."""
    values: dict[str, set[str]] = {}
    for job in jobs:
        for override in job:
            key, _, value = override.lstrip("+~").partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, values_of_key in values.items() if len(values_of_key) > 1] or list(values)


def values_of(job: Sequence[str]) -> dict[str, str]:
    """{key: value} of a job's overrides."""
    return {override.lstrip("+~").partition("=")[0]: override.partition("=")[2] for override in job}


def names_of(jobs: Sequence[Sequence[str]]) -> list[str]:
    """A name for each job, from its values of the keys that differ.

    >>> names_of([["steps=4", "trainer.lr=0.001"], ["steps=4", "trainer.lr=0.003"]])
    ['lr=0.001', 'lr=0.003']
    """
    swept = swept_keys(jobs)
    names = list(zip(swept, short_names(swept), strict=True))
    return [", ".join(f"{name}={values.get(key, '')}" for key, name in names) for values in map(values_of, jobs)]


def column_of(key: str) -> str:
    """A swept key's column: the key itself, with a mark if a result has that name, such as `reward`."""
    return f"{key}=" if key in RESULTS else key


def write_csv(folder: Path, table: Sequence[Mapping[str, Any]]) -> Path:
    file, stream = folder / TABLE, io.StringIO(newline="")
    writer = csv.DictWriter(stream, fieldnames=list(table[0]))
    writer.writeheader()
    writer.writerows(table)
    write_atomically(file, stream.getvalue())
    return file


def print_table(table: Sequence[Mapping[str, Any]], names: Sequence[str], file: Path) -> None:
    """Prints the table, without columns that no job has.

    Headers and numbers are never cut; a job's name takes as many lines as it needs.

    Args:
        table: the rows, best first.
        names: the names of the jobs, by job number.
        file: the CSV file that was written.
    """
    from rich.table import Table

    from rlft.logger.console import open_terminal
    from rlft.logger.text import glyphs_for

    terminal = open_terminal()
    plus_minus = glyphs_for(terminal.encoding).plus_minus
    first = "lowest held-out loss" if all(row["accuracy"] is None for row in table) else "best held-out accuracy"
    printed = Table(title=f"sweep of {len(table)} jobs, {first} first", title_justify="left")
    printed.add_column("job", justify="right", no_wrap=True)
    printed.add_column("keys", overflow="fold")
    shown = [name for name in COLUMNS if any(row[name] is not None for row in table)]
    for name in shown:
        printed.add_column(COLUMNS[name], justify="right", no_wrap=True)
    for row in table:
        number: int = row["job"]
        printed.add_row(str(number), names[number], *(_shown(row, name, plus_minus) for name in shown))
    terminal.print(printed)
    terminal.print(f"written to {file}", soft_wrap=True)


def _shown(row: Mapping[str, Any], name: str, plus_minus: str) -> str:
    value, error = row[name], row["accuracy_se"] if name == "accuracy" else None
    if value is None:
        return "-"
    text = f"{value:.3f}" if isinstance(value, float) and name != "seconds" else str(value)
    return text if error is None else f"{text} {plus_minus} {error:.3f}"
