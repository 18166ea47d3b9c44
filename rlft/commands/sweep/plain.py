"""A plain sweep: every combination of the values is a job, with a run in <sweep>/<job>; and the table of its results.

What it knows of its jobs is what their runs leave on disk: the same command again does what they lack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.commands.sweep.checks import Checked, is_finished
from rlft.commands.sweep.driver import Ending, Run
from rlft.commands.sweep.jobs import JobsFailedError
from rlft.commands.sweep.page import KEYS, PLUS_MINUS, print_table, write_csv
from rlft.commands.sweep.space import Space
from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines
from rlft.system.terminal import command_line, override

RESULTS = ("job", "steps", "accuracy_before", "accuracy", "accuracy_se", "reward", "loss", "seconds", "folder")
"""The columns of sweep.csv beside the swept keys."""
PRINTED = ("steps", "accuracy_before", "accuracy", "reward", "loss", "seconds")
"""Those of the printed table; the accuracy is printed with its standard error."""


class Grid:
    """The jobs of a plain sweep, see `driver.Source`."""

    def __init__(self, checked: Checked, folder: Path) -> None:
        repeating = command_line(override("hydra.sweep.dir", folder))
        self._space, self._folder = checked.space, folder
        self._waiting = [
            Run(
                number=number,
                name=checked.space.name(params),
                words=checked.space.words(params),
                folder=folder / str(number),
                resolved=resolved,
                plan=checked.plans.get(number),
            )
            for number, (params, resolved) in enumerate(zip(checked.space.combinations(), checked.configs, strict=True))
        ]
        self._failed: list[tuple[Run, Ending]] = []
        first = f"sweep of {len(self._waiting)} jobs; if it is stopped, repeat it with {repeating}"
        self.beginning: Sequence[str] = [first]
        self.again = f"repeat the sweep with {repeating}"

    def next(self) -> Run | None:
        while self._waiting:
            run = self._waiting.pop(0)
            if run.resolved is None or not is_finished(run.resolved.plain, run.folder):
                return run
            print(f"job {run.number} is finished already: {run.folder}")
        return None

    def is_done(self) -> bool:
        return not self._waiting

    def ended(self, run: Run, ending: Ending) -> None:
        """A job that has failed stops none of the others."""
        if ending.problem:
            self._failed.append((run, ending))

    def is_pruned(self, run: Run) -> bool:
        return False

    def was_pruned(self, run: Run) -> None: ...

    def withdraw(self, run: Run) -> None: ...

    def conclude(self) -> None:
        if self._failed:
            run, ending = self._failed[0]
            others = f"{len(self._failed)} jobs failed, the first of them " if len(self._failed) > 1 else ""
            raise ending.error or JobsFailedError(f"{others}job {run.number}: {ending.problem}")

    def show(self) -> None:
        """Writes sweep.csv and prints the table, without columns that no job has."""
        table = rows(self._folder, self._space)
        file = write_csv(self._folder, list(table[0]), [list(row.values()) for row in table])
        names = [self._space.name(params) for params in self._space.combinations()]
        first = "lowest held-out loss" if all(row["accuracy"] is None for row in table) else "best held-out accuracy"
        shown = [name for name in PRINTED if any(row[name] is not None for row in table)]
        lines = [[str(row["job"]), names[row["job"]], *(_shown(row, name) for name in shown)] for row in table]
        columns = ["job", KEYS, *("before" if name == "accuracy_before" else name for name in shown)]
        print_table(f"sweep of {len(table)} jobs, {first} first", columns, lines)
        print(f"written to {file}")


def rows(folder: Path, space: Space) -> list[dict[str, Any]]:
    """One row per job, the best held-out accuracy first, or the lowest loss if no accuracy was measured."""
    result = []
    for number, params in enumerate(space.combinations()):
        run = folder / str(number)
        metrics, evaluations = read_lines(run / METRICS), read_lines(run / EVALUATIONS) or [{}]
        first, last = evaluations[0], evaluations[-1]
        result.append(
            {
                "job": number,
                **{column_of(key): value for key, value in space.named(params).items()},
                "steps": metrics[-1]["step"] if metrics else 0,
                "accuracy_before": first.get("accuracy"),
                "accuracy": last.get("accuracy"),
                "accuracy_se": last.get("accuracy_se"),
                "reward": metrics[-1].get("reward/mean") if metrics else None,
                "loss": last.get("eval/loss"),
                "seconds": round(sum(line.get("time/step") or 0.0 for line in metrics), 1),
                "folder": str(run),
            }
        )

    def rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
        loss = row["loss"]
        return (row["accuracy"] is None, -(row["accuracy"] or 0.0), loss is None, loss or 0.0, row["job"])

    return sorted(result, key=rank)


def column_of(key: str) -> str:
    """A swept key's column: the key itself, with a mark if a result has that name, such as `reward`."""
    return f"{key}=" if key in RESULTS else key


def _shown(row: Mapping[str, Any], name: str) -> str:
    value, error = row[name], row["accuracy_se"] if name == "accuracy" else None
    if value is None:
        return "-"
    text = f"{value:.3f}" if isinstance(value, float) and name != "seconds" else str(value)
    return text if error is None else f"{text} {PLUS_MINUS} {error:.3f}"
