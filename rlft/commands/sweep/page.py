"""The results of a sweep: its table and sweep.csv, the best run; of a study also sweep.png."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

from rlft.commands.sweep.space import Space
from rlft.commands.training import after_a_sweep
from rlft.commands.watch.report import SWEEP as TABLE
from rlft.loop.evaluations import metric_of
from rlft.runs import run_folder, run_status
from rlft.runs.forecast import seconds_of
from rlft.runs.lines import EVALUATIONS, METRICS, read_lines, silent
from rlft.runs.run_status import Status
from rlft.system.files import write_atomically
from rlft.system.terminal import command_line, program
from rlft.types import counted

PICTURE = "sweep.png"
KEYS, STATE, PLUS_MINUS = "keys", "state", "±"
FINISHED = str(Status.finished)
PRINTED = ("accuracy_before", "accuracy", "reward", "loss", "seconds")
"""Columns of a plain sweep's table: means over seeds; what ranks the settings is printed with its standard error."""
RESULTS = ("job", "state", "why", "steps", "accuracy_before", "accuracy", "accuracy_se", "reward", "loss", "seconds",
           "folder")  # fmt: skip
"""Columns of its sweep.csv besides the swept keys."""
RANKED_BY = {
    "accuracy": ", best held-out accuracy first",
    "loss": ", lowest held-out loss first",
    "reward": ", highest reward first",
}
"""{what ranks a plain sweep, the first that any finished job has: how the title says so}."""
NOISE = 2.0  # standard errors of a difference below which it is called noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a setting has measured by seed, and the folder of the best of its runs."""

    name: str
    values: Sequence[float]
    folder: Path
    evaluation_error: float | None  # of a single seed, the standard error over the prompts of its evaluation

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def error(self) -> float | None:
        return self.evaluation_error if len(self.values) == 1 else standard_error(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial of a study, and what has become of it."""

    number: int  # counts from 0 in the order in which trials were drawn
    params: Mapping[str, Any]
    state: str = "unfinished"  # complete, pruned, failed or unfinished
    value: float | None = None  # of the metric: at the end, or where it was pruned; None if it has none
    values: Sequence[float] = ()
    same_as: int | None = None  # the number of the trial whose result it has, which only older studies know
    why: str = ""  # why it failed, or what pruned it and where


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The results of a study."""

    folder: Path
    space: Space
    metric: str
    lower_is_better: bool
    seeds: Sequence[int]

    def write_table(self, trials: Iterable[Trial]) -> None:
        """Writes sweep.csv with a line a trial, the best first: its values, its metric, and where its runs are."""
        keys = [one.key for one in self.space.varied]
        columns = ["trial", "state", *keys, self.metric, "standard_error", "by_seed", "why", "folder"]
        rows: list[list[Any]] = []
        for row in trials:
            by_seed = " ".join(map(repr, row.values))
            folder = self.folder / str(row.number if row.same_as is None else row.same_as)
            results = [row.value, standard_error(row.values), by_seed, row.why, str(folder)]
            rows.append([row.number, row.state, *(row.params[key] for key in keys), *results])
        write_csv(self.folder, columns, rows)

    def show(self, rows: Sequence[Trial], picture: Callable[[], bytes]) -> None:
        """Writes sweep.csv and sweep.png, and prints the table; does nothing without trials, which are sorted."""
        if not rows:
            return
        self.write_table(rows)
        columns = ["trial", KEYS, "seeds", self.metric]
        lines = [
            [str(row.number), self.space.name(row.params), str(len(row.values) or "-"), value_of(row)] for row in rows
        ]
        if any(states := [state_of(row) for row in rows]):
            columns, lines = [*columns, STATE], [[*line, state] for line, state in zip(lines, states, strict=True)]
        best = f", best {self.metric} first" if any(row.value is not None for row in rows) else ""
        print_table(f"sweep of {counted(len(rows), 'trial')}{best}", columns, lines)
        write_atomically(self.folder / PICTURE, picture())
        print(f"written to {self.folder / TABLE} and {self.folder / PICTURE}")
        complete = [row for row in rows if row.state == "complete" and row.values and row.same_as is None]
        print_best([self._result(row) for row in complete], self.metric)

    def _result(self, row: Trial) -> Result:
        best = (min if self.lower_is_better else max)(row.values)
        run = self.folder / str(row.number) / f"seed_{self.seeds[list(row.values).index(best)]}"
        metric, lines = metric_of(self.metric), read_lines(run / EVALUATIONS, silent)
        error = lines[-1].get(f"{self.metric}_se") if lines and metric is not None and metric.has_error else None
        return Result(name=self.space.name(row.params), values=row.values, folder=run, evaluation_error=error)


def show_jobs(folder: Path, space: Space, failed: Mapping[int, str]) -> None:
    """Writes sweep.csv of a plain sweep and prints a row for each setting; failed: {job of this process: why}."""
    table = rows(folder, space, failed)
    file = write_csv(folder, list(table[0]), [list(row.values()) for row in table])
    metric, names = ranking(table), [space.setting(params) for params in space.combinations()]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in table:
        groups.setdefault(names[row["job"]], []).append(row)
    results = {name: result for name, jobs in groups.items() if (result := result_of(name, jobs, metric)) is not None}
    best = sorted(results.values(), key=lambda result: result.mean, reverse=metric != "loss")
    shown = [name for name in PRINTED if any(row[name] is not None for row in table)]
    columns = ["job", KEYS, "seeds", *("before" if name == "accuracy_before" else name for name in shown), STATE]
    lines = []
    for name in dict.fromkeys([*(result.name for result in best), *groups]):
        jobs, error = groups[name], results[name].error if name in results else None
        ended = [job for job in jobs if job["state"] == FINISHED]
        numbers = [_mean(ended or jobs, of, error if of == metric else None) for of in shown]
        states = [(job["job"], job["state"]) for job in jobs if job not in ended]
        state = ", ".join(said if len(jobs) == 1 else f"job {number} {said}" for number, said in sorted(states))
        of_setting = ", ".join(map(str, sorted(job["job"] for job in jobs)))
        lines.append([of_setting, name, str(len(ended)), *numbers, state])
    is_shown = {"seeds": len(groups) < len(table), STATE: any(line[-1] for line in lines)}
    kept = [i for i, name in enumerate(columns) if is_shown.get(name, True)]
    title = f"sweep of {counted(len(table), 'job')}{RANKED_BY.get(metric, '')}"
    print_table(title, [columns[i] for i in kept], [[line[i] for i in kept] for line in lines])
    for row in (row for row in table if row["why"]):  # the table has no room for it
        print(f"job {row['job']} failed: {row['why']}")
    print(f"written to {file}")
    print_best(best, metric)


def ranking(table: Sequence[Mapping[str, Any]]) -> str:
    """The name in RANKED_BY of what ranks these rows; "" if no finished one has any."""
    finished = [row for row in table if row["state"] == FINISHED]
    return next((name for name in RANKED_BY if any(row[name] is not None for row in finished)), "")


def result_of(name: str, jobs: Sequence[Mapping[str, Any]], metric: str) -> Result | None:
    """The result of a setting's jobs, which are sorted, the best first; None if no finished one has the metric."""
    measured = [job for job in jobs if metric and job["state"] == FINISHED and job[metric] is not None]
    if not measured:
        return None
    error = measured[0]["accuracy_se"] if metric == "accuracy" else None
    values = [job[metric] for job in measured]
    return Result(name=name, values=values, folder=Path(measured[0]["folder"]), evaluation_error=error)


def _mean(jobs: Sequence[Mapping[str, Any]], name: str, error: float | None) -> str:
    values = [job[name] for job in jobs if job[name] is not None]
    if not values:
        return "-"
    text = f"{sum(values) / len(values):{'.1f' if name == 'seconds' else '.3f'}}"
    return text if error is None else f"{text} {PLUS_MINUS} {error:.3f}"


def print_best(results: Sequence[Result], metric: str) -> None:
    """Prints whether settings, the best first, differ by more than noise, and what continues with the best run."""
    from rlft.logger.console import open_terminal
    from rlft.logger.summary import print_commands

    if not results:
        return
    terminal, best = open_terminal(), results[0]
    terminal.print(noise(results), end="")
    where = f"its best seed in {best.folder}" if len(best.values) > 1 else f"in {best.folder}"
    terminal.print(f"best: {best.name} ({metric.removeprefix('eval/')} {best.mean:.4g}), {where}")
    if run_folder.config_file(best.folder).exists():
        suggested = after_a_sweep(best.folder)
        print_commands(terminal, [(purpose, command_line(program(), *words)) for purpose, words in suggested])


def noise(results: Sequence[Result]) -> str:
    """A line that says how many results differ from the first by no more than noise; "" if that cannot be said.

    Two means differ by noise if their difference is less than NOISE of its standard errors, sqrt(a^2 + b^2).
    """
    best, others = results[0], [(one.mean, one.error) for one in results[1:] if one.error is not None]
    if best.error is None or not others:
        return ""
    within = sum(abs(best.mean - mean) < NOISE * math.hypot(best.error, error) for mean, error in others)
    text = f"within noise of the best ({NOISE:g} standard errors): {within} of {counted(len(others), 'other setting')}"
    is_of_one_seed = all(len(one.values) == 1 for one in results)
    return text + ("; seeds may differ by more: run several" if is_of_one_seed else "") + "\n"


def rows(folder: Path, space: Space, failed: Mapping[int, str]) -> list[dict[str, Any]]:
    """One row per job, finished ones ranked by the first of RANKED_BY that any has.

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
                "seconds": round(sum(map(seconds_of, metrics)), 1),
                "folder": str(run),
            }
        )

    metric = ranking(result)
    sign = 1.0 if metric == "loss" else -1.0

    def rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
        if row["state"] != FINISHED:
            return (True, row["state"] != "failed", row["job"])
        value = row[metric] if metric else None
        return (False, value is None, sign * (value or 0.0), row["job"])

    return sorted(result, key=rank)


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
    from rlft.logger.console import open_terminal
    from rlft.logger.tables import Column, WordTable
    from rlft.system.text import glyphs_for

    terminal = open_terminal()
    terminal.print(title)
    shown = ([cell.replace(PLUS_MINUS, glyphs_for(terminal.encoding).plus_minus) for cell in row] for row in rows)
    are_words = {name: name in (KEYS, STATE) for name in columns}
    terminal.print(WordTable([Column(n, right=not words, folds=words) for n, words in are_words.items()], shown))


def state_of(row: Trial) -> str:
    return "" if row.state == "complete" else f"{row.state}: {row.why}" if row.why else row.state
