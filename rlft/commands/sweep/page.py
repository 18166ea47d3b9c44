"""What came of a sweep: the table and sweep.csv; of a study also the importance of each key, and sweep.png."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any

from rlft.commands.sweep.space import Interval, Space
from rlft.commands.watch.report import SWEEP as TABLE
from rlft.runs import run_status
from rlft.runs.lines import EVALUATIONS, METRICS, read_lines
from rlft.runs.run_status import Status
from rlft.system.files import write_atomically
from rlft.types import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rlft.commands.sweep.trials import Trial, Trials

PICTURE = "sweep.png"
KEYS, STATE, PLUS_MINUS = "keys", "state", "±"
FINISHED = str(Status.finished)
COLUMNS = 3  # panels in a row of the picture
MOST_KEYS = 7  # keys with a panel of their own in the picture: the most important ones
GREY, BLUE, ORANGE, RED = "0.6", "#1f77b4", "#ff7f0e", "#d62728"
COLOURS = {"complete": BLUE, "pruned": ORANGE, "failed": RED, "unfinished": GREY}
PRINTED = ("steps", "accuracy_before", "accuracy", "reward", "loss", "seconds")
"""Columns of a plain sweep's table; the accuracy is printed with its standard error."""
RESULTS = ("job", "state", "why", "steps", "accuracy_before", "accuracy", "accuracy_se", "reward", "loss", "seconds",
           "folder")  # fmt: skip
"""Columns of its sweep.csv besides the swept keys."""
RANKED_BY = {"accuracy": ", best held-out accuracy first", "loss": ", lowest held-out loss first"}
"""{what ranks the rows of a plain sweep, if any job has it: how the title says so}; the first counts first."""


class Page:
    def __init__(self, folder: Path, trials: Trials, space: Space, metric: str) -> None:
        self._folder, self._trials, self._space, self._metric = folder, trials, space, metric

    def write_table(self) -> None:
        """Writes sweep.csv with a line a trial, the best first: its values, its metric, and where its runs are."""
        keys = [one.key for one in self._space.varied]
        columns = ["trial", "state", *keys, self._metric, "standard_error", "by_seed", "same_as", "why", "folder"]
        rows: list[list[Any]] = []
        for row in self._trials.rows():
            folder = self._folder / str(row.number if row.same_as is None else row.same_as)
            by_seed = " ".join(map(repr, row.values))
            results = [row.value, standard_error(row.values), by_seed, row.same_as, row.why, str(folder)]
            rows.append([row.number, row.state, *(row.params[key] for key in keys), *results])
        write_csv(self._folder, columns, rows)

    def show(self) -> None:
        """Writes sweep.csv and sweep.png, and prints the table; does nothing without trials."""
        rows, importance = self._trials.rows(), self._trials.importance()
        if not rows:
            return
        self.write_table()
        columns = ["trial", KEYS, self._metric]
        lines = [[str(row.number), self._space.name(row.params), value_of(row)] for row in rows]
        if any(states := [state_of(row) for row in rows]):
            columns, lines = [*columns, STATE], [[*line, state] for line, state in zip(lines, states, strict=True)]
        best = f", best {self._metric} first" if any(row.value is not None for row in rows) else ""
        print_table(f"sweep of {counted(len(rows), 'trial')}{best}", columns, lines)
        for key, share in importance.items():
            print(f"importance of {key}: {share:.2f}")
        lower, picture = self._trials.lower_is_better, io.BytesIO()
        drawn = figure(rows, self._space, self._metric, importance, lower=lower)
        drawn.savefig(picture, dpi=120, metadata={"Software": None})
        write_atomically(self._folder / PICTURE, picture.getvalue())
        print(f"written to {self._folder / TABLE} and {self._folder / PICTURE}")


def show_jobs(folder: Path, space: Space, failed: Mapping[int, str]) -> None:
    """Writes sweep.csv of a plain sweep and prints the table, without columns that no job has.

    failed: {job: why it failed}, of those of this process.
    """
    table = rows(folder, space, failed)
    file = write_csv(folder, list(table[0]), [list(row.values()) for row in table])
    names = [space.name(params) for params in space.combinations()]
    ranked = [row for row in table if row["state"] == FINISHED]
    first = next((words for name, words in RANKED_BY.items() if any(row[name] is not None for row in ranked)), "")
    shown = [name for name in PRINTED if any(row[name] is not None for row in table)]
    lines = [[str(row["job"]), names[row["job"]], *(_shown(row, name) for name in shown)] for row in table]
    columns = ["job", KEYS, *("before" if name == "accuracy_before" else name for name in shown)]
    if len(ranked) < len(table):
        columns.append(STATE)
        lines = [[*line, "" if row in ranked else row["state"]] for line, row in zip(lines, table, strict=True)]
    print_table(f"sweep of {counted(len(table), 'job')}{first}", columns, lines)
    for row in (row for row in table if row["why"]):  # the table has no room for it
        print(f"job {row['job']} failed: {row['why']}")
    print(f"written to {file}")


def rows(folder: Path, space: Space, failed: Mapping[int, str]) -> list[dict[str, Any]]:
    """One row per job, finished ones in the order of RANKED_BY, or of the jobs if none of that was measured.

    Then those that are not finished or have failed, which have no rank: what they measured last is not their result.
    """
    result = []
    for number, params in enumerate(space.combinations()):
        run = folder / str(number)
        metrics, evaluations = read_lines(run / METRICS), read_lines(run / EVALUATIONS) or [{}]
        first, last = evaluations[0], evaluations[-1]
        status, why = run_status.read(run)
        state = {Status.finished: FINISHED, Status.stopped: "failed"}.get(status, "unfinished")
        if number in failed:
            state, why = "failed", failed[number]
        result.append(
            {
                "job": number,
                "state": state,
                "why": why if state == "failed" else "",
                # marked, if a result has that name, such as `reward`
                **{f"{key}=" if key in RESULTS else key: value for key, value in space.named(params).items()},
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
        if row["state"] != FINISHED:
            return (True, row["state"] != "failed", row["job"])
        return (False, row["accuracy"] is None, -(row["accuracy"] or 0.0), loss is None, loss or 0.0, row["job"])

    return sorted(result, key=rank)


def _shown(row: Mapping[str, Any], name: str) -> str:
    value, error = row[name], row["accuracy_se"] if name == "accuracy" else None
    if value is None:
        return "-"
    text = f"{value:.3f}" if isinstance(value, float) and name != "seconds" else str(value)
    return text if error is None else f"{text} {PLUS_MINUS} {error:.3f}"


def value_of(row: Trial) -> str:
    """What the table says of a trial's metric, with the standard error over its seeds."""
    value = "-" if row.value is None else f"{row.value:.4g}"
    error = standard_error(row.values)
    return value if error is None else f"{value} {PLUS_MINUS} {error:.2g}"


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean over seeds; None of a single one.

    >>> standard_error([0.5]), standard_error([0.4, 0.6])
    (None, 0.1)
    """
    return None if len(values) < 2 else round(stdev(values) / math.sqrt(len(values)), 12)


def write_csv(folder: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows([columns, *rows])
    write_atomically(folder / TABLE, stream.getvalue())
    return folder / TABLE


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table. Headers and numbers are never cut; keys and states take as many lines as they need."""
    from rich.table import Table

    from rlft.logger.console import open_terminal
    from rlft.logger.text import glyphs_for

    terminal = open_terminal()
    terminal.print(title, soft_wrap=True, highlight=False)
    printed = Table()
    for name in columns:
        if name in (KEYS, STATE):
            printed.add_column(name, overflow="fold")
        else:
            printed.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        printed.add_row(*(cell.replace(PLUS_MINUS, glyphs_for(terminal.encoding).plus_minus) for cell in row))
    terminal.print(printed)


def state_of(row: Trial) -> str:
    """What the table says of a trial besides its value."""
    said = "" if row.state == "complete" else f"{row.state}: {row.why}" if row.why else row.state
    return said if row.same_as is None else f"as {row.same_as}" + (f", {said}" if said else "")


def figure(rows: Sequence[Trial], space: Space, metric: str, importance: Mapping[str, float], *, lower: bool) -> Figure:
    """The metric by trial with the best so far, by each key, and the importance of the keys."""
    from matplotlib.figure import Figure

    varied = sorted(space.varied, key=lambda one: -importance.get(one.key, 0.0))[:MOST_KEYS]
    number = 1 + len(varied) + bool(importance)
    lines = math.ceil(number / COLUMNS)
    drawn = Figure(figsize=(4 * min(number, COLUMNS), 3.2 * lines), layout="constrained")
    panels = [drawn.add_subplot(lines, min(number, COLUMNS), i + 1) for i in range(number)]
    measured = [row for row in sorted(rows, key=lambda row: row.number) if row.value is not None]
    _by_trial(panels[0], measured, metric, lower=lower)
    for panel, one in zip(panels[1:], varied, strict=False):
        _by_key(panel, measured, one, metric)
    if importance:
        names = list(importance)[::-1]
        panels[-1].barh(names, [importance[name] for name in names], color=BLUE)
        panels[-1].set_xlabel("importance (PED-ANOVA)")
    return drawn


def _by_trial(panel: Axes, rows: Sequence[Trial], metric: str, *, lower: bool) -> None:
    for state, colour in COLOURS.items():
        of = [row for row in rows if row.state == state]
        if of:
            panel.scatter([row.number for row in of], [row.value or 0.0 for row in of], s=18, color=colour, label=state)
    complete = [row for row in rows if row.state == "complete"]
    best = list(accumulate((row.value or 0.0 for row in complete), min if lower else max))
    panel.step([row.number for row in complete], best, where="post", color=GREY, zorder=0, label="best so far")
    panel.set(xlabel="trial", ylabel=metric)
    panel.legend(fontsize="small")


def _by_key(panel: Axes, rows: Sequence[Trial], one: Any, metric: str) -> None:
    values: list[Any] = [row.params[one.key] for row in rows]
    if not isinstance(one, Interval):
        places = {value: i for i, value in enumerate(one.values)}
        panel.set_xticks(range(len(places)), list(places))
        values = [places[value] for value in values]
    elif one.log:
        panel.set_xscale("log")
    panel.scatter(values, [row.value or 0.0 for row in rows], s=18, color=[COLOURS[row.state] for row in rows])
    panel.set(xlabel=one.key, ylabel=metric)
