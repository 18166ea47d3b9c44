"""Prints the page at the end of a run: curve, examples before and after, folder, and next commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from rlft.logger.console import open_terminal
from rlft.logger.tables import Column, WordTable
from rlft.runs.forecast import seconds_of, trend_of
from rlft.runs.lines import EVALUATIONS, METRICS, read_lines
from rlft.system.text import ASCII, Glyphs, duration, glyphs_for, one_line, visible
from rlft.types import counted

EXAMPLES = 4
CURVE_HEIGHT = 14
CURVE_WIDTH = 100  # a wider curve is no clearer
COMPLETION_LENGTH = 180

Line = Mapping[str, Any]
_BOX_AS_ASCII = str.maketrans("┌┐└┘─│┤┬", "++++-|++")


def print_summary(folder: Path, next_commands: Sequence[tuple[str, str]], terminal: Terminal | None = None) -> None:
    """Prints the page of the whole run from its files; next_commands: (what it does, command) of each to suggest."""
    terminal = terminal or open_terminal()
    glyphs = glyphs_for(terminal.encoding)
    metrics, evaluations = read_lines(folder / METRICS), read_lines(folder / EVALUATIONS)
    print_curve(terminal, metrics, evaluations, glyphs)
    if evaluations:
        print_examples(terminal, evaluations[0], evaluations[-1], glyphs)
    terminal.print()
    print_facts(terminal, fact_rows(folder, metrics, evaluations, glyphs))
    print_commands(terminal, next_commands)


def print_facts(terminal: Terminal, facts: Iterable[tuple[str, str]]) -> None:
    terminal.print(WordTable((Column(style="dim"), Column()), facts))


def fact_rows(
    folder: Path, metrics: Sequence[Line], evaluations: Sequence[Line], glyphs: Glyphs
) -> list[tuple[str, str]]:
    """(label, value) of each fact: accuracy before and after with standard errors, seconds of training, the folder."""
    rows = []
    if evaluations:
        steps = f" {glyphs.arrow} ".join(str(line["step"]) for line in ends(evaluations))
        if evaluations[-1]["accuracy"] is not None:
            accuracy = f" {glyphs.arrow} ".join(accuracy_text(line, glyphs) for line in ends(evaluations))
            rows.append(("held-out accuracy", f"{accuracy}  (step {steps})"))
        if evaluations[-1].get("eval/loss") is not None:
            loss = f" {glyphs.arrow} ".join(f"{line['eval/loss']:.3f}" for line in ends(evaluations))
            rows.append(("held-out loss", f"{loss}  (step {steps})"))
        if (trend := trend_of(evaluations)) is not None and trend.is_flat:
            rows.append(("flat", str(trend)))
    seconds = sum(map(seconds_of, metrics))
    if seconds:
        rows.append(("training", f"{duration(seconds)} for {counted(metrics[-1]['step'], 'step')}"))
    return [*rows, ("run folder", str(folder))]


def ends(lines: Sequence[Line]) -> Sequence[Line]:
    """The first and the last line, or the only one."""
    return lines if len(lines) < 2 else (lines[0], lines[-1])


def accuracy_text(line: Line, glyphs: Glyphs) -> str:
    accuracy, error = line["accuracy"], line["accuracy_se"]
    text = "-" if accuracy is None else f"{accuracy:.3f}"
    return text if error is None else f"{text} {glyphs.plus_minus} {error:.3f}"


def print_commands(terminal: Terminal, next_commands: Sequence[tuple[str, str]]) -> None:
    """Prints one command per line, unwrapped, so that it can be copied."""
    if not next_commands:
        return
    terminal.print("\nNext", style="bold")
    for purpose, command in next_commands:
        terminal.print(Text(f"  # {purpose}", style="dim"))
        terminal.print(Text(f"  {command}"))


def print_curve(terminal: Terminal, metrics: Sequence[Line], evaluations: Sequence[Line], glyphs: Glyphs) -> None:
    """Draws mean reward (else the loss) as a line, and held-out accuracy (else loss) as circles, from two steps on."""
    training_metric, evaluation_metric = "reward/mean", "accuracy"
    if not points(metrics, training_metric):
        training_metric, evaluation_metric = "loss/total", "eval/loss"
    rewards, accuracies = points(metrics, training_metric), points(evaluations, evaluation_metric)
    if len(rewards) < 2:
        return
    drawing = curve(rewards, accuracies, width=min(terminal.width, CURVE_WIDTH), ascii_only=glyphs is ASCII)
    held_out = f", held-out {evaluation_metric.removeprefix('eval/')} (o)" if accuracies else ""
    terminal.print(Text(f"{training_metric} per step (line){held_out}", style="bold"))
    text = Text(drawing, no_wrap=True, overflow="crop")
    text.highlight_regex("(?<=[│| \u2800-\u28ff.])o", "bold green")
    text.highlight_regex("[\u2800-\u28ff]+", "cyan")
    terminal.print(text)


def points(lines: Sequence[Line], key: str) -> list[tuple[int, float]]:
    """(step, value) of the lines that have the key."""
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def curve(
    rewards: Sequence[tuple[int, float]], accuracies: Sequence[tuple[int, float]], *, width: int, ascii_only: bool
) -> str:
    """The drawing, without colours: rows of at most `width` characters."""
    import plotext  # the import takes a quarter of a second, and is needed once per run

    figure = plotext.figure  # the library's only figure, which still has what was drawn before
    figure.clear()
    figure.plot_size(width, CURVE_HEIGHT)
    figure.draw(figure.signal(*zip(*rewards, strict=True), marker="." if ascii_only else "braille").lines(True))
    if accuracies:
        figure.draw(figure.signal(*zip(*accuracies, strict=True), marker="o"))
    steps, values = zip(*rewards, *accuracies, strict=True)
    padding = max(0.0, 0.1 - (max(values) - min(values))) / 2  # so that noise does not look large
    low, high = min(values) - padding, max(values) + padding
    figure.ruler("y").lim(low, high)
    ticks = [low + (high - low) * i / 4 for i in range(5)]
    figure.ruler("y").ticks(ticks, [f"{tick:.2f}" for tick in ticks])
    figure.ruler("x").ticks(step_ticks(min(steps), max(steps)))
    drawing = figure.build().string(colorless=True)
    return drawing.translate(_BOX_AS_ASCII).rstrip("\n") if ascii_only else drawing.rstrip("\n")


def step_ticks(first: int, last: int) -> list[int]:
    """Round step numbers, at most seven, and the last step."""
    span = max(1, last - first)
    spacing = next(size for power in range(12) for base in (1, 2, 5) if span <= 5 * (size := base * 10**power))
    inner = [tick for tick in range(-(-first // spacing) * spacing, last, spacing) if last - tick > spacing / 2]
    return [*inner, last]


def print_examples(terminal: Terminal, first: Line, last: Line, glyphs: Glyphs) -> None:
    """Prints the same held-out prompts at the first and the last evaluation, side by side."""
    pairs = same_prompts(first["examples"], last["examples"])[:EXAMPLES]
    if not pairs:
        return
    terminal.print()
    if first is last or first["step"] == last["step"]:
        headings = [f"step {last['step']}"]
    else:
        headings = [f"before (step {first['step']})", f"after (step {last['step']})"]
    table = Table(expand=True, show_lines=True)
    for heading in ("prompt", *headings):
        table.add_column(heading, overflow="fold", ratio=1 if heading == "prompt" else 2)
    terminal.print(Text("held-out prompts" if len(headings) == 1 else "the same held-out prompts, before and after"))
    for before, after in pairs:
        texts = [example_text(example, glyphs) for example in ([before, after] if len(headings) == 2 else [after])]
        table.add_row(prompt_text(after), *texts)
    terminal.print(table)


def same_prompts(before: Sequence[Line], after: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Examples of both evaluations paired by prompt, in the order of the later one."""
    earlier = {example["prompt_id"]: example for example in reversed(before)}
    later = {example["prompt_id"]: example for example in reversed(after)}
    order = dict.fromkeys(example["prompt_id"] for example in after)
    return [(earlier[prompt], later[prompt]) for prompt in order if prompt in earlier]


def prompt_text(example: Line) -> Text:
    question = Text(one_line(example["question"], COMPLETION_LENGTH))
    return question.append(f"\nanswer: {one_line(str(example['answer']), 60)}", style="dim")


def example_text(example: Line, glyphs: Glyphs) -> Text:
    """A mark and the word right or wrong, or the score, then the completion."""
    score = example["score"]
    if score is None:
        mark, style = "", ""
    elif score >= 1:
        mark, style = f"{glyphs.right} right\n", "green"
    elif score <= 0:
        mark, style = f"{glyphs.wrong} wrong\n", "red"
    else:
        mark, style = f"score {score:.2f}\n", "yellow"
    completion = one_line(example["completion"], COMPLETION_LENGTH, glyphs.cut)
    return Text(mark, style=style).append(visible(completion), style="default")
