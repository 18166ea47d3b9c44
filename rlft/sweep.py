"""A sweep: which jobs it has, and the table of what they reached. The jobs themselves are ordinary runs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines
from rlft.types import UserError

TABLE = "sweep.csv"
# Where a run is, not what it is: a job may not have its own.
FIXED = ("resume", "hydra.sweep.dir", "hydra.run.dir", "hydra.sweep.subdir")


def check_jobs(jobs: Sequence[Sequence[str]]) -> None:
    """Refuses a sweep whose jobs cannot be told apart or would fight over a folder.

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
                remedy="take it out of the sweep",
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


def rows(folder: Path, jobs: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """A row a job, best held-out accuracy first, or lowest loss where no accuracy was measured."""
    swept = swept_keys(jobs)
    result = []
    for number, job in enumerate(jobs):
        run = folder / str(number)
        evaluations, metrics = read_lines(run / EVALUATIONS), read_lines(run / METRICS)
        chosen = dict(override.lstrip("+~").split("=", 1) for override in job)
        result.append(
            {
                "job": number,
                **{key: chosen.get(key, "") for key in swept},
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
    return [key for key, found in values.items() if len(found) > 1] or list(values)


def write_csv(folder: Path, table: Sequence[Mapping[str, Any]]) -> Path:
    file = folder / TABLE
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return file


def print_table(table: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Best first, on the terminal."""
    from rich.console import Console
    from rich.table import Table

    columns = [key for key in table[0] if key != "folder"]
    first = "lowest held-out loss" if all(row["accuracy"] is None for row in table) else "best held-out accuracy"
    printed = Table(title=f"sweep of {len(table)} jobs, {first} first", title_justify="left")
    for column in columns:
        printed.add_column(column.replace("_", " "), justify="right")
    for row in table:
        printed.add_row(
            *("-" if row[c] is None else f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in columns)
        )
    console = Console()
    console.print(printed)
    console.print(f"written to {file}", markup=False, highlight=False)
