"""What came of a study: the table, sweep.csv, the importance of each key, and sweep.png."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.commands.sweep.space import Interval, Space
from rlft.commands.sweep.table import TABLE
from rlft.commands.sweep.trials import Row, Trials
from rlft.system.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "sweep.png"
COLUMNS = 3
"""Panels of the picture beside each other."""
MOST_KEYS = 7
"""Keys with a panel of their own in the picture: the most important ones."""
GREY, BLUE, ORANGE, RED = "0.6", "#1f77b4", "#ff7f0e", "#d62728"
COLOURS = {"complete": BLUE, "pruned": ORANGE, "failed": RED, "unfinished": GREY}


class Page:
    """What is written and printed of a study.

    Args:
        folder: of the sweep.
        trials: its trials.
        space: the keys and their values.
        metric: what is compared.
        name: (values of a trial) -> what it is called.
    """

    def __init__(
        self, folder: Path, trials: Trials, space: Space, metric: str, name: Callable[[Mapping[str, Any]], str]
    ) -> None:
        self._folder, self._trials, self._space, self._metric, self._name = folder, trials, space, metric, name

    def write_table(self) -> None:
        """Writes sweep.csv with the trials so far."""
        write_csv(self._folder, self._trials.rows(), [one.key for one in self._space.varied], self._metric)

    def show(self) -> None:
        """Writes sweep.csv and sweep.png, and prints the table; does nothing without trials."""
        rows, importance = self._trials.rows(), self._trials.importance()
        if not rows:
            return
        self.write_table()
        print_table(rows, self._metric, lambda row: self._name(row.params), importance)
        lower, picture = self._trials.lower_is_better, io.BytesIO()
        drawn = figure(rows, self._space, self._metric, importance, lower=lower)
        drawn.savefig(picture, dpi=120, metadata={"Software": None})
        write_atomically(self._folder / PICTURE, picture.getvalue())
        print(f"written to {self._folder / TABLE} and {self._folder / PICTURE}")


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean over seeds; None of a single one.

    >>> standard_error([0.5]), standard_error([0.4, 0.6])
    (None, 0.1)
    """
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    return round(math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n), 12)


def write_csv(folder: Path, rows: Sequence[Row], keys: Sequence[str], metric: str) -> None:
    """Writes a line a trial, the best first: its values, its metric, the metric by seed, and where its runs are."""
    stream = io.StringIO(newline="")
    names = ["trial", "state", *keys, metric, "standard_error", "by_seed", "same_as", "why", "folder"]
    writer = csv.writer(stream)
    writer.writerow(names)
    for row in rows:
        of = row.number if row.same_as is None else row.same_as
        by_seed = " ".join(map(repr, row.values))
        results = [row.value, standard_error(row.values), by_seed, row.same_as, row.why, str(folder / str(of))]
        writer.writerow([row.number, row.state, *(row.params[key] for key in keys), *results])
    write_atomically(folder / TABLE, stream.getvalue())


def print_table(rows: Sequence[Row], metric: str, name: Callable[[Row], str], importance: Mapping[str, float]) -> None:
    """Prints a line a trial, the best first, then the importance of the keys."""
    from rich.table import Table

    from rlft.logger.console import open_terminal
    from rlft.logger.text import glyphs_for

    terminal = open_terminal()
    plus_minus = glyphs_for(terminal.encoding).plus_minus
    terminal.print(f"sweep of {len(rows)} trials, best {metric} first", soft_wrap=True, highlight=False)
    printed = Table()
    printed.add_column("trial", justify="right", no_wrap=True)
    printed.add_column("keys", overflow="fold")
    printed.add_column(metric, justify="right", no_wrap=True)
    states = {row.number: state_of(row) for row in rows}
    if any(states.values()):
        printed.add_column("state", overflow="fold")
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.4g}"
        error = standard_error(row.values)
        shown = value if error is None else f"{value} {plus_minus} {error:.2g}"
        printed.add_row(str(row.number), name(row), shown, *([states[row.number]] if any(states.values()) else []))
    terminal.print(printed)
    for key, share in importance.items():
        terminal.print(f"importance of {key}: {share:.2f}", soft_wrap=True, highlight=False)


def state_of(row: Row) -> str:
    """What the table says of a trial beside its value."""
    said = "" if row.state == "complete" else f"{row.state}: {row.why}" if row.why else row.state
    return said if row.same_as is None else f"as {row.same_as}" + (f", {said}" if said else "")


def figure(rows: Sequence[Row], space: Space, metric: str, importance: Mapping[str, float], *, lower: bool) -> Figure:
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


def _by_trial(panel: Axes, rows: Sequence[Row], metric: str, *, lower: bool) -> None:
    for state, colour in COLOURS.items():
        of = [row for row in rows if row.state == state]
        if of:
            panel.scatter([row.number for row in of], [row.value or 0.0 for row in of], s=18, color=colour, label=state)
    complete = [row for row in rows if row.state == "complete"]
    better = min if lower else max
    best: list[Any] = []
    for row in complete:
        best.append(row.value if not best else better(best[-1], row.value))
    panel.step([row.number for row in complete], best, where="post", color=GREY, zorder=0, label="best so far")
    panel.set(xlabel="trial", ylabel=metric)
    panel.legend(fontsize="small")


def _by_key(panel: Axes, rows: Sequence[Row], one: Any, metric: str) -> None:
    values: list[Any] = [row.params[one.key] for row in rows]
    if not isinstance(one, Interval):
        places = {value: i for i, value in enumerate(one.values)}
        panel.set_xticks(range(len(places)), list(places))
        values = [places[value] for value in values]
    elif one.log:
        panel.set_xscale("log")
    panel.scatter(values, [row.value or 0.0 for row in rows], s=18, color=[COLOURS[row.state] for row in rows])
    panel.set(xlabel=one.key, ylabel=metric)
