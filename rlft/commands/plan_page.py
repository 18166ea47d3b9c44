"""The page of `rlft plan`: tables of sizes and memory, lengths of the data, scores of the rewards."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from rlft.commands.plan import Planned
from rlft.generation.memory import MemoryPart, busiest, peak
from rlft.logger.console import open_terminal
from rlft.logger.text import one_line, visible
from rlft.plan.fit import in_words
from rlft.plan.run_plan import DataLengths
from rlft.plan.sizes import LOWERED_BY
from rlft.plan.trials import EnvironmentTrial, RewardTrial, doubts
from rlft.system.disk import size_text

BINS = 8
BAR_WIDTH = 40
SHOWN_CHARACTERS = 32
MAX_TURN_CHARACTERS = 200
MAX_SCORE_CHARACTERS = 6
"""Of a score such as -0.125 or `failed`, so that a narrow terminal folds texts and cuts no number."""


def print_plan(planned: Planned, terminal: Terminal | None = None) -> None:
    """Prints the plan to this terminal, by default to standard output."""
    terminal = terminal or open_terminal()
    terminal.print(grid([tuple(map(str, row)) for row in planned.sizes]))
    heading(terminal, "Parameters")
    terminal.print(grid([(role, f"{number:,}", "") for role, number in planned.parameters.items()]))
    print_memory(terminal, planned)
    print_disk(terminal, planned)
    for lengths in planned.lengths:
        print_lengths(terminal, lengths)
    if planned.trials:
        print_trials(terminal, planned.trials)
    if planned.conversation is not None:
        print_conversation(terminal, planned.conversation)
    notes = [*planned.notes, *doubts(planned.trials)]
    if notes:
        terminal.print()
    for note in notes:
        terminal.print(Text(f"note: {visible(note)}", style="yellow"), soft_wrap=True)


def heading(terminal: Terminal, text: str) -> None:
    terminal.print()
    terminal.print(Text(text, style="bold"), soft_wrap=True)


def grid(rows: Sequence[tuple[str, ...]]) -> Table:
    """A table of rows (name, value, explanation)."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def print_memory(terminal: Terminal, planned: Planned) -> None:
    """Prints every part with and without gradient checkpointing, the peak, and whether the run fits."""
    heading(terminal, f"Memory on {planned.device}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    table.add_column("when", style="dim")
    names = ["plain", "gradient checkpointing"]
    names[planned.demand.recompute] += "\n(this run)"
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("key", style="dim", overflow="fold")
    plain, recomputed = (planned.memory(recompute=on) for on in (False, True))
    for part, other in zip(plain, recomputed, strict=True):
        if part.bytes or other.bytes:
            cells = (part.name, part.when, in_words(part.bytes), in_words(other.bytes), part.key or "")
            table.add_row(*map(str, cells))
    peaks = [in_words(peak(parts)) for parts in (plain, recomputed)]
    table.add_row(Text("peak", style="bold"), "", *(Text(peak_text, style="bold") for peak_text in peaks), "")
    terminal.print(table)
    if planned.has_engine_apart:
        alone, engine = in_words(planned.peak_without_engine), planned.demand.engine
        title = "the engine" if engine is None else engine.title
        terminal.print(Text(f"with {title} on a device of its own the trainer would take {alone}"), soft_wrap=True)
    print_verdict(terminal, planned, plain if not planned.demand.recompute else recomputed)


def print_disk(terminal: Terminal, planned: Planned) -> None:
    """Prints the most that each part of the run's folder may take, and the key that lowers it."""
    if not any(planned.disk.values()):
        return
    heading(terminal, "Disk, at most")
    rows = [(name, size_text(size), LOWERED_BY.get(name, "")) for name, size in planned.disk.items()]
    terminal.print(grid([*rows, ("together", size_text(sum(planned.disk.values())), "")]))


def print_verdict(terminal: Terminal, planned: Planned, memory_parts: Sequence[MemoryPart]) -> None:
    """Prints whether the run fits and, if not, which keys to change."""
    limit_name = "device_memory" if planned.named_limit else "this machine has free"
    room = f"{in_words(planned.peak)} of {in_words(planned.limit)} ({limit_name})"
    if planned.fits:
        terminal.print(Text(f"fits: {room}", style="green"), soft_wrap=True)
        return
    if planned.engine_lacks:
        text = f"does not start: the engine's share of the device is {in_words(planned.engine_lacks)} too small for it"
        terminal.print(Text(text, style="red"), soft_wrap=True)
    if planned.teacher_lacks:
        text = (
            f"does not start: the teacher's share of the device is {in_words(planned.teacher_lacks)} too small for it"
        )
        terminal.print(Text(text, style="red"), soft_wrap=True)
    if planned.peak > planned.limit:
        text = f"does not fit: {room}; it is highest while {busiest(memory_parts)}"
        terminal.print(Text(text, style="red"), soft_wrap=True)
    remedies = planned.remedies()
    for remedy in remedies:
        terminal.print(Text(f"  {remedy} takes it to {in_words(remedy.peak)}"), soft_wrap=True)
    if not remedies:
        largest = max(memory_parts, key=lambda part: part.bytes)
        text = f"  no change of these keys suffices; the largest part is {largest.name} ({in_words(largest.bytes)})"
        terminal.print(Text(f"{text}: use a smaller model or a larger device"), soft_wrap=True)


def print_lengths(terminal: Terminal, lengths: DataLengths) -> None:
    """Prints a histogram of lengths in tokens."""
    heading(terminal, f"{lengths.name}: {len(lengths.tokens):,}, by tokens")
    low, high = min(lengths.tokens), max(lengths.tokens)
    width = max(1, -(-(high - low + 1) // BINS))
    counts = [0] * (-(-(high - low + 1) // width))
    for tokens in lengths.tokens:
        counts[(tokens - low) // width] += 1
    rows = []
    for number, count in enumerate(counts):
        start = low + number * width
        span = f"{start}" if width == 1 else f"{start} to {min(high, start + width - 1)}"
        bar = "#" * max(round(BAR_WIDTH * count / max(counts)), 1 if count else 0)
        rows.append((f"  {span}", f"{count:,}", bar))
    terminal.print(grid(rows))
    if lengths.note:
        terminal.print(Text(f"  {visible(lengths.note)}", style="yellow"), soft_wrap=True)


def print_conversation(terminal: Terminal, tried: EnvironmentTrial) -> None:
    """Prints a conversation with the environment, with a line for each of the policy's turns and each answer."""
    heading(terminal, f"A conversation with the environment, of a policy that is scripted (prompt {tried.prompt})")
    if tried.error is not None:
        terminal.print(Text(visible(tried.error), style="red"), soft_wrap=True)
        return
    rows = [("begins", one_line(tried.opening, MAX_TURN_CHARACTERS), "")] if tried.opening else []
    for text, answer in tried.said:
        rows += [
            ("policy", one_line(text, MAX_TURN_CHARACTERS), ""),
            *([("answer", one_line(answer, MAX_TURN_CHARACTERS), "")] if answer else []),
        ]
    rows.append(("ends", tried.finish, "" if tried.reward is None else f"reward {tried.reward:g}"))
    if tried.failed:
        rows.append(("failed calls", ", ".join(tried.failed), "arguments are made up: a tool may well refuse them"))
    terminal.print(grid(rows))


def print_trials(terminal: Terminal, trials: Sequence[RewardTrial]) -> None:
    """Prints a table with a row per completion and a column per reward."""
    heading(terminal, "What the rewards say, before their weights")
    names = list(dict.fromkeys(trial.reward for trial in trials))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("prompt", style="dim", overflow="fold")
    table.add_column("completion", overflow="fold")
    for name in names:
        table.add_column(Text(visible(name)), justify="right", overflow="fold", min_width=MAX_SCORE_CHARACTERS)
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for trial in trials:
        score = "failed" if trial.score is None else f"{trial.score:g}"
        rows.setdefault((trial.prompt, trial.kind, trial.completion), {})[trial.reward] = score
    for (prompt, kind, completion), scores in rows.items():
        completion_text = f"{kind}: {one_line(completion, SHOWN_CHARACTERS)}" if completion else kind
        table.add_row(Text(visible(prompt)), Text(completion_text), *(scores.get(name, "") for name in names))
    terminal.print(table)
