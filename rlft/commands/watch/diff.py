"""`rlft diff <run> <run>`: prints the keys and metrics in which two runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console as Terminal
from rich.text import Text

from rlft.commands.watch.runs import differing, read_words
from rlft.config.choices import choice_remedy
from rlft.logger.console import open_terminal
from rlft.logger.summary import points
from rlft.logger.tables import Column, WordTable
from rlft.runs.find import one_run
from rlft.runs.lines import EVALUATIONS, METRICS, read_lines
from rlft.runs.run_folder import flatten, read
from rlft.system.terminal import say
from rlft.system.text import visible
from rlft.types import require

ABSENT = "-"
SIDES = ("first", "second")
LAST_SHARE = 0.1
AT = ("common", "last")


def command(arguments: Sequence[str]) -> None:
    folders, values, as_json = read_words("diff", arguments, has_json=True)
    at = values.get("at", "common")
    require(at in AT, "at", "is not one of its choices", got=at or "nothing", remedy=choice_remedy(at, AT))
    remedy = "write rlft diff <run> <run>"
    require(len(folders) == 2, "diff", "compares two runs", got=" ".join(folders) or "none", remedy=remedy)
    first, second = runs = [one_run(name, "diff", say) for name in folders]
    configs = [flatten(read(folder, "diff")) for folder in runs]
    config = [Difference(name=name, first=one, second=other) for name, (one, other) in differing(configs, ABSENT)]
    spans, metrics = compare_metrics(first, second, at)
    if as_json:
        rows = {"config": [asdict(row) for row in config], "at": at, "steps_of_means": spans}
        rows["metrics"] = [asdict(row) for row in metrics]
        print(json.dumps({"runs": [str(run) for run in runs], **rows}, indent=1))
        return
    limit = "the last step that both have done" if at == "common" else "each run's own last step"
    step_texts = dict.fromkeys("no steps" if span is None else steps_text(*span) for span in spans)
    terminal = open_terminal()
    for name, run in zip(SIDES, runs, strict=True):
        terminal.print(Text(f"{name}: {visible(str(run))}"))
    print_differences(terminal, "config", config)
    print_differences(terminal, "metrics", metrics, f"metrics up to {limit}: means of {' and '.join(step_texts)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key or a metric with its value in each run; `steps` are set if each value was measured at a single step."""

    name: str
    first: Any
    second: Any
    steps: tuple[int | None, int | None] | None = None

    @property
    def title(self) -> str:
        """The name, with the steps if there are any: `accuracy at last (step 40)`."""
        if self.steps is None:
            return self.name
        shown_steps = dict.fromkeys(ABSENT if step is None else str(step) for step in self.steps)
        return f"{self.name} (step {' and '.join(shown_steps)})"


def steps_text(first: int, last: int) -> str:
    """The steps in words.

    >>> steps_text(3, 3), steps_text(91, 100)
    ('step 3', 'steps 91 to 100')
    """
    return f"step {last}" if first == last else f"steps {first} to {last}"


def compare_metrics(first: Path, second: Path, at: str) -> tuple[list[tuple[int, int] | None], list[Difference]]:
    """The (first, last) steps of each run's means, None without metrics, and a row for each metric."""
    lines = [read_lines(folder / METRICS) for folder in (first, second)]
    num_steps = ends = [int(run_lines[-1]["step"]) if run_lines else 0 for run_lines in lines]
    if at == "common":
        ends = [min((end for end, run_lines in zip(ends, lines, strict=True) if run_lines), default=0)] * 2
    kept = [[line for line in run_lines if line["step"] <= end] for run_lines, end in zip(lines, ends, strict=True)]
    rows = [Difference(name="steps", first=num_steps[0], second=num_steps[1])]
    evaluations = [dict(points(read_lines(folder / EVALUATIONS), "accuracy")) for folder in (first, second)]
    rows += accuracy_rows(evaluations, at)
    names = dict.fromkeys(name for run_lines in kept for line in run_lines for name in line if name != "step")
    for name in names:
        values = [_summary(name, run_lines) for run_lines in kept]
        if any(value is not None for value in values):
            rows.append(Difference(name=name, first=values[0], second=values[1]))
    averaged = [_last_tenth(run_lines) for run_lines in kept]
    return [(of_run[0]["step"], of_run[-1]["step"]) if of_run else None for of_run in averaged], rows


def accuracy_rows(evaluations: Sequence[Mapping[int, float]], at: str) -> list[Difference]:
    """Rows with accuracy at the first and last evaluation, of {step: accuracy}; at common steps if `at` says so."""
    common_steps = sorted(set(evaluations[0]) & set(evaluations[1]))
    rows = []
    for name, index in (("accuracy at first", 0), ("accuracy at last", -1)):
        if at == "common" and common_steps:
            steps: list[int | None] = [common_steps[index]] * 2
        else:
            steps = [sorted(accuracies)[index] if accuracies else None for accuracies in evaluations]
        pairs = zip(steps, evaluations, strict=True)
        values = [None if step is None else accuracies[step] for step, accuracies in pairs]
        if any(value is not None for value in values):
            rows.append(Difference(name=name, first=values[0], second=values[1], steps=(steps[0], steps[1])))
    return rows


def _last_tenth(items: Sequence[Any]) -> Sequence[Any]:
    """The last tenth of the items, at least one."""
    return items[-max(1, round(LAST_SHARE * len(items))) :]


def _summary(name: str, lines: Sequence[Mapping[str, Any]]) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    if not values:
        return None
    if name.startswith("time/"):
        return median(values)
    if name.startswith("memory/"):
        return max(values)
    last = _last_tenth(values)
    return sum(last) / len(last)


def print_differences(terminal: Terminal, title: str, rows: Sequence[Difference], sentence: str = "") -> None:
    """Prints a table of keys or of metrics, below a sentence that says over which steps means are taken."""
    if not rows:
        terminal.print(Text(f"{title}: no difference", style="bold"))
        return
    if sentence:
        terminal.print(Text(sentence, style="bold"))
    columns = (Column(title), *(Column(name, folds=True) for name in SIDES))
    terminal.print(WordTable(columns, [[text_of(cell) for cell in (row.title, row.first, row.second)] for row in rows]))
    terminal.print()


def text_of(value: Any) -> str:
    """The text of a cell with this value.

    >>> text_of(0.123456), text_of(3), text_of(None), text_of(1234567.0), text_of("x")
    ('0.1235', '3', '-', '1,234,567', 'x')
    """
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**6 else f"{value:.4g}"
    return str(value)
