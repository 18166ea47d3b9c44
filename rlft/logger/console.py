"""Shows a run while it is running: a live view on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rich.console import Console as Terminal, Group as Stack
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlft.logger.interface import Logger, RunInfo
from rlft.logger.tables import Column, WordTable
from rlft.runs.forecast import Forecast, Pace, Price, seconds_without_pauses
from rlft.runs.lines import EVALUATIONS, METRICS, StepRecord, read_lines, silent
from rlft.system.terminal import discard
from rlft.system.text import Glyphs, duration, glyphs_for, sparkline, visible
from rlft.types import Evaluation, counted

if TYPE_CHECKING:
    from rlft.config.schema import ConsoleConfig

STAGES = ("sample", "score", "credit", "inspect", "update", "publish")
TREND_WIDTH = 24
REFRESHES_PER_SECOND = 4


class StandardOutput(Terminal):
    """A console that leaves it to the terminal to break long lines, so that a command is copied from it as one line.

    It stops printing when nobody reads its pipe any more, where rich's own would end the process.
    """

    def print(self, *objects: Any, **how: Any) -> None:
        if len(objects) == 1 and isinstance(objects[0], str | Text):
            text = Text(objects[0]) if isinstance(objects[0], str) else objects[0].copy()
            text.no_wrap, text.overflow, text.end = True, text.overflow or "ignore", how.pop("end", text.end)
            objects = (Stack(text),)  # where the text alone obeys: a live view below it is as it was
        super().print(*objects, crop=False, **how)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(sys.stdout)


def open_terminal() -> Terminal:
    """A console on stdout that escapes what its encoding lacks, and survives the end of what reads it (`head -1`)."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    return StandardOutput(file=sys.stdout, markup=False, emoji=False, highlight=False)


PRINTED: ContextVar[set[tuple[str, str, str]] | None] = ContextVar("rows", default=None)
"""In a sweep, the rows of start-up tables that its earlier runs have printed, which later ones leave out."""


def show_rows(rows: Collection[tuple[str, str, str]], title: str = "") -> None:
    """Prints rows of the start-up table, which begins with its title, as they become known."""
    terminal, earlier = open_terminal(), PRINTED.get()
    if title and not earlier:
        terminal.print(Text(visible(title), style="bold"))
    if new := [row for row in rows if row not in (earlier or ())]:
        terminal.print(WordTable((Column(width=18), Column(style="bold", width=26), Column(style="dim")), new))
    if earlier is not None:
        earlier.update(rows)


class Console(Logger):
    """Shows the last rows of the start-up table, then the run: live on a terminal, else a line now and then."""

    def __init__(self, config: ConsoleConfig) -> None:
        self.config = config
        self.view: Any = None

    def start(self, run: RunInfo) -> None:
        terminal = open_terminal()
        progress = Progress(run, glyphs_for(terminal.encoding))
        # `isatty` instead of rich's `is_terminal`: FORCE_COLOR must not send cursor movements into a file.
        in_place = self.config.live and sys.stdout.isatty() and not terminal.is_dumb_terminal
        show_rows(run.sizes)
        seconds = self.config.plain_seconds
        progress.read_earlier()
        self.view = LiveView(terminal, progress) if in_place else PlainView(terminal, progress, seconds)

    def stage(self, name: str) -> None:
        self.view.progress.current = name

    def step(self, record: StepRecord) -> None:
        self.view.progress.step(record)
        self.view.step()

    def evaluation(self, evaluation: Evaluation) -> None:
        self.view.progress.evaluations.append(evaluation)
        self.view.print(Text(self.view.progress.evaluation_line()))

    def note(self, text: str) -> None:
        self.view.print(Text(f"note: {visible(text)}", style="yellow"))

    def finish(self, status: str) -> None:
        if self.view is not None:
            self.view.close(visible(status))
            self.view = None


def grid(rows: Iterable[Sequence[object]]) -> WordTable:
    """A table of rows (name, value, explanation)."""
    return WordTable((Column(), Column(style="bold"), Column(style="dim")), rows)


class Progress:
    """The progress of a run, and its texts for both views; `now` is a clock in seconds, `time.monotonic` by default.

    price: of the machine, where its cost is to be shown.
    """

    def __init__(
        self, run: RunInfo, glyphs: Glyphs, now: Callable[[], float] | None = None, price: Price | None = None
    ) -> None:
        self.run, self.glyphs, self.price = run, glyphs, price
        self.now = now or (lambda: time.monotonic())
        self.done = run.step
        self.metrics: Mapping[str, float] = {}
        self.watched: list[float] = []
        self.evaluations: list[Evaluation] = []
        self.current = "starting"
        self.started = self.now()
        self._pace = Pace(run.config, run.steps)
        self._last_step_at = self.started

    def read_earlier(self) -> None:
        """Reads what the steps before a resume have measured, so that what follows is compared with their first."""
        if not self.run.step:
            return
        metrics, evaluations = (read_lines(self.run.folder / name, silent) for name in (METRICS, EVALUATIONS))
        watched = self.run.watched[1]
        self.watched += [line[watched] for line in metrics if line["step"] <= self.run.step and watched in line]
        self.evaluations += [evaluation_of(line) for line in evaluations if line["step"] <= self.run.step]

    def step(self, record: StepRecord) -> None:
        self.done, self.metrics = record.step, record.metrics
        self.watched.append(record.metrics.get(self.run.watched[1], 0.0))
        self._pace.add(record.step, record.metrics)
        self._last_step_at = self.now()

    @property
    def accuracies(self) -> list[float]:
        return [evaluation.accuracy for evaluation in self.evaluations if evaluation.accuracy is not None]

    @property
    def elapsed(self) -> float:
        return self.now() - self.started

    def left(self) -> Forecast | None:
        """How long the run still takes; None before it has done a few steps."""
        left = self._pace.forecast()
        return None if left is None else left.after(self.now() - self._last_step_at)

    def eta(self) -> str:
        left = self.left()
        return "-:--" if left is None else str(left)

    def cost(self) -> str | None:
        return None if self.price is None else self.price.so_far(self.elapsed, self.left())

    def tokens_per_second(self) -> float | None:
        """Sampled completion tokens per second of the whole step, without an evaluation or a checkpoint before it."""
        tokens, seconds = self.metrics.get("tokens/completion"), seconds_without_pauses(self.metrics)
        return None if tokens is None or not seconds else tokens / seconds

    def trend(self, values: Sequence[float]) -> str:
        """The first and the last value, and a small curve of all of them."""
        if not values:
            return "-"
        if len(values) == 1:
            return f"{values[0]:.3f}"
        arrow = f"{values[0]:.3f} {self.glyphs.arrow} {values[-1]:.3f}"
        return f"{arrow}  {sparkline(values, TREND_WIDTH, self.glyphs.bars)}"

    def evaluation_line(self) -> str:
        """The latest evaluation, followed by the first one."""
        last, first = self.evaluations[-1], self.evaluations[0]
        line = f"step {last.step}: held-out {headline(last, self.glyphs)}"
        return line if last is first else f"{line} (step {first.step}: {headline(first, None)})"

    def closing_line(self, status: str) -> str:
        if status == "finished":
            first = f"{self.done} of " if self.done < self.run.steps else ""
            return f"finished {first}{counted(self.run.steps, 'step')} in {duration(self.elapsed)}"
        where = f"after step {self.done} of {self.run.steps}, {duration(self.elapsed)}"
        is_stop = status != "interrupted"
        return f"stopped {where}: {status.removeprefix('stopped: ')}" if is_stop else f"interrupted {where}"


def evaluation_of(line: Mapping[str, Any]) -> Evaluation:
    """The evaluation of a line of eval.jsonl, without its examples."""
    metrics = {name: value for name, value in line.items() if name.startswith("eval/") and value is not None}
    accuracy, error = line.get("accuracy"), line.get("accuracy_se")
    return Evaluation(step=int(line["step"]), accuracy=accuracy, accuracy_se=error, metrics=metrics, examples=())


def headline(evaluation: Evaluation, glyphs: Glyphs | None) -> str:
    """The accuracy and the loss of an evaluation, as far as it has them; with glyphs also their names and the error."""
    parts = []
    if evaluation.accuracy is not None:
        error, value = evaluation.accuracy_se or 0.0, f"{evaluation.accuracy:.3f}"
        parts.append(value if glyphs is None else f"accuracy {value} {glyphs.plus_minus} {error:.3f}")
    if (loss := evaluation.metrics.get("eval/loss")) is not None:
        parts.append(f"{loss:.3f}" if glyphs is None else f"loss {loss:.3f}")
    return ", ".join(parts)


class PlainView:
    """Prints a short line for a step, at most one in `seconds`; the first and the last step always get a line."""

    def __init__(self, terminal: Terminal, progress: Progress, seconds: float) -> None:
        self.terminal, self.progress, self._seconds = terminal, progress, seconds
        self._printed: float | None = None

    def print(self, line: Text) -> None:
        self.terminal.print(line)
        self.terminal.file.flush()

    def step(self) -> None:
        now = time.monotonic()
        due = self._printed is None or now - self._printed >= self._seconds
        if due or self.progress.done == self.progress.run.steps:
            self._printed = now
            self.print(Text(step_line(self.progress)))

    def close(self, status: str) -> None:
        self.print(Text(self.progress.closing_line(status)))


def step_line(progress: Progress) -> str:
    """`step  12/100  reward 0.620  length 41  3,412 tokens/s  2.1 s/step  elapsed 0:25  ETA 2:56 (2:21 to 3:40)`.

    It leaves out the accuracy: an evaluation has its own line, and later steps would repeat an outdated value.
    """
    metrics, steps = progress.metrics, progress.run.steps
    parts = [f"step {progress.done:>{len(str(steps))}}/{steps}"]
    watched_label, watched_metric = progress.run.watched
    parts += [f"{watched_label} {metrics[watched_metric]:.3f}"] if watched_metric in metrics else []
    parts += [f"length {metrics['length/mean']:.0f}"] if "length/mean" in metrics else []
    speed = progress.tokens_per_second()
    parts += [f"{speed:,.0f} tokens/s"] if speed is not None else []
    parts += [f"{seconds_text(seconds_without_pauses(metrics))} s/step"] if "time/step" in metrics else []
    parts += [f"elapsed {duration(progress.elapsed)}", f"ETA {progress.eta()}"]
    return "  ".join(parts if (cost := progress.cost()) is None else [*parts, f"cost {cost}"])


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


class LiveView:
    """A panel at the bottom that is redrawn in place; printed lines scroll by above it and stay."""

    def __init__(self, terminal: Terminal, progress: Progress) -> None:
        self.terminal, self.progress = terminal, progress
        self._live = Live(
            get_renderable=self._panel,
            console=terminal,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )
        self._live.start()

    def print(self, line: Text) -> None:
        self.terminal.print(line)

    def step(self) -> None:
        pass  # the view redraws itself, at a steady rate however fast the steps are

    def close(self, status: str) -> None:
        self.progress.current = status.partition("\n")[0]
        self._live.stop()
        self.terminal.print(Text(self.progress.closing_line(status)))

    def _panel(self) -> Panel:
        progress = self.progress
        head = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for ratio in (None, 1, None):
            head.add_column(ratio=ratio, no_wrap=True)
        head.add_row(
            f"step {progress.done}/{progress.run.steps}",
            ProgressBar(total=progress.run.steps, completed=progress.done),
            f"{duration(progress.elapsed)}  ETA {progress.eta()}",
        )
        body = Table.grid(padding=(0, 2, 0, 0))
        body.add_column(style="dim", no_wrap=True)
        body.add_column(overflow="fold")
        cost = progress.cost()
        for label, value in [*live_rows(progress), *([] if cost is None else [("cost", cost)])]:
            body.add_row(label, Text(value))
        title = Text(f" {visible(progress.run.name)} ", style="bold", overflow="ellipsis", no_wrap=True)
        return Panel(Stack(head, body), title=title, title_align="left")


def live_rows(progress: Progress) -> list[tuple[str, str]]:
    """(label, text) of each line of the live view; all lines exist from the start, so that its height is constant."""
    metrics = progress.metrics
    rewards = [(name, value) for name, value in metrics.items() if name.startswith("reward/")]
    parts = [f"{name[len('reward/') :]} {value:.2f}" for name, value in rewards if name[7:] not in {"mean", "std"}]
    length = f"{metrics['length/mean']:.0f} tokens" if "length/mean" in metrics else "-"
    truncated = metrics.get("length/truncated_fraction")
    speed, seconds = progress.tokens_per_second(), seconds_without_pauses(metrics)
    stages = [f"{stage} {seconds_text(metrics[f'time/{stage}'])}" for stage in STAGES if f"time/{stage}" in metrics]
    speed_row = ("speed", "-" if speed is None else f"{speed:,.0f} tokens/s, {seconds_text(seconds)} s/step")
    now_row = ("now", progress.current)
    watched_label, watched = progress.run.watched[0], progress.trend(progress.watched)
    if watched_label != "reward":
        losses = [e.metrics["eval/loss"] for e in progress.evaluations if "eval/loss" in e.metrics]
        accuracy = ("accuracy", progress.trend(progress.accuracies))
        return [(watched_label, watched), ("held out", progress.trend(losses)), accuracy, speed_row, now_row]
    return [
        ("reward", watched),
        ("rewards", "  ".join(parts) or "-"),
        ("accuracy", progress.trend(progress.accuracies) if progress.accuracies else "- (held out)"),
        ("length", length if truncated is None else f"{length}, {truncated:.0%} truncated"),
        speed_row,
        ("seconds", "  ".join(stages) or "-"),
        now_row,
    ]
