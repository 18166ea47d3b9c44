"""`rlft plan`: what is predicted of a run, as a page or as JSON.

A config that is wrong by itself is refused before torch is imported, which `rlft.plan.prediction` needs.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rich.console import Console as Terminal
from rich.text import Text

from rlft.commands.launch import import_libraries, settled
from rlft.config import catalog, command as commands
from rlft.config.compose import USUAL, compose_run
from rlft.config.overrides import key_of, only_overrides, recipe_in
from rlft.config.resolved import resolve
from rlft.config.suggest import OWN_KEYS
from rlft.generation.memory import busiest, in_words, peak
from rlft.logger.console import grid, open_terminal
from rlft.logger.tables import Column, WordTable
from rlft.plan.cards import read_card
from rlft.runs.forecast import FIRST, Forecast, Price, read_price
from rlft.system.disk import size_text
from rlft.system.terminal import command_line
from rlft.system.text import duration, one_line, visible
from rlft.types import Mistakes, UserError, require

if TYPE_CHECKING:
    from rlft.plan.duration import Duration
    from rlft.plan.prediction import EnvironmentTrial, Prediction
    from rlft.plan.rewards.tester import RewardTrial
    from rlft.plan.run_plan import Schedule

BINS, BAR_WIDTH = 8, 40
SIZE = re.compile(r"[0-9]+(\.[0-9]+)? ?(([kmgt]i?)?b)?", re.IGNORECASE)
MAX_TURN_CHARACTERS = 200


def command(arguments: list[str]) -> int:
    """Prints what is predicted of this config's run; returns 0 if it fits and what it tries does not fail, else 1."""
    words = [word for word in arguments if word != "--json"]
    if words and words[0].isidentifier() and words[0] not in commands.names():
        remedy = f"name one of {', '.join(commands.names())}, or none for rlft train"
        raise UserError("plan", "there is no plan of this command", got=words[0], remedy=remedy)
    command = words.pop(0) if words and words[0] in commands.names() else command_of(words)
    parsed = only_overrides(words, command, OWN_KEYS["plan"], mistakes := Mistakes())
    price, card = read_price(parsed.value("price")), parsed.value("card")
    typed = [*parsed.overrides]
    if card is not None:
        card = read_card(card)
        if "model.device" not in map(key_of, typed):
            typed.append("model.device=cuda")
    device_memory = parsed.value("device_memory")
    memory = None if device_memory is None else read_bytes(device_memory)

    def prediction_of(overrides: Sequence[str], *, tries: bool = True) -> Prediction:
        with mistakes.joined():
            run = compose_run(overrides, parsed.config_dir, command)
        mistakes.refuse()
        resolved = resolve(settled(run.plain), command)
        from rlft.plan.rules import models_of

        doing = f"rlft plan: {run.plain['name']}, a run of rlft {command}"
        import_libraries(doing, models_of(resolved.config), needs_weights=False)
        from rlft.plan.prediction import predict
        from rlft.plan.sizes import note_of_disk

        predicted = predict(resolved, memory, card, tries=tries)
        note = note_of_disk(predicted.disk, run.folder)
        return replace(predicted, notes=[*predicted.notes, note]) if note else predicted

    with contextlib.redirect_stdout(sys.stderr):  # rewards and environments may print while they are built
        predicted, fitting = prediction_of(typed), None
        for remedy in predicted.remedies():
            changed = [word for word in typed if key_of(word) not in remedy.changes] + str(remedy).split()
            if prediction_of(changed, tries=False).fits:
                kept = [word for word in words if key_of(word) not in remedy.changes]
                fitting = command_line("rlft", "plan", command, *kept, *str(remedy).split())
                break
    if "--json" in arguments:
        extra = {"tight": predicted.is_tight, "fitting": fitting, "price": price and asdict(price)}
        print(json.dumps(predicted.as_dict() | extra, indent=1))
    else:
        print_page(predicted, price, fitting)
    return int(predicted.fails)


def command_of(words: Sequence[str]) -> str:
    """The command of the named recipe, or `train`."""
    return catalog.command_of(recipe_in(words)) or USUAL


def read_bytes(text: str) -> int:
    """The number of bytes in `24GiB`, `512 MB` or a bare number of bytes.

    >>> read_bytes("24GiB"), read_bytes("0.5 GB"), read_bytes("8000000000")
    (25769803776, 500000000, 8000000000)

    Raises UserError: the text is not a size, or is one below 1 MiB.
    """
    from pydantic import ByteSize, TypeAdapter

    is_size = SIZE.fullmatch(text.strip())  # of which pydantic reads the beginning alone
    require(is_size, "device_memory", "must be a size", got=text, remedy="write it as 24GiB")
    size = int(TypeAdapter(ByteSize).validate_python(text.strip()))
    remedy = f"write {text}GiB" if text.isdecimal() else "write it as 24GiB"
    require(size >= 2**20, "device_memory", "no device has so few bytes", got=text, remedy=remedy)
    return size


# -- the page ----------------------------------------------------------------------------------------------------------
def print_page(predicted: Prediction, price: Price | None, fitting: str | None) -> None:
    terminal = open_terminal()
    print_verdict(terminal, predicted, fitting)
    terminal.print()
    terminal.print(grid(predicted.sizes))
    heading(terminal, "Parameters")
    terminal.print(grid([(role, f"{number:,}", "") for role, number in predicted.parameters.items()]))
    print_memory(terminal, predicted)
    if any(predicted.disk.values()):
        heading(terminal, "Disk, at most")
        rows = [(name, size_text(size), remedy or "") for name, size, remedy in predicted.disk_rows]
        terminal.print(grid([*rows, ("together", size_text(sum(predicted.disk.values())), "")]))
    heading(terminal, "Time")
    terminal.print(grid(time_rows(predicted.schedule, predicted.duration, price)))
    if predicted.advice:
        heading(terminal, "Learning rate and rank")
        terminal.print(grid(one.row for one in predicted.advice))
    for name, tokens in predicted.lengths.items():
        print_lengths(terminal, name, tokens)
    if predicted.rewards.trials:
        print_trials(terminal, predicted.rewards.trials)
    for doubt in predicted.doubts:
        terminal.print(visible(doubt), style="yellow")
    for line in predicted.rewards.lines:
        terminal.print(visible(line))
    if predicted.conversation is not None:
        print_conversation(terminal, predicted.conversation)
    if predicted.notes:
        terminal.print()
    for note in predicted.notes:
        terminal.print(f"note: {visible(note)}", style="yellow")


def heading(terminal: Terminal, text: str) -> None:
    terminal.print()
    terminal.print(text, style="bold")


def print_memory(terminal: Terminal, predicted: Prediction) -> None:
    """Prints every part, of training with and without gradient checkpointing, the peak, and keys that lower it."""
    heading(terminal, f"Memory on {predicted.device}")
    how = predicted.demand.recompute
    columns = {
        "plain": predicted.memory(recompute=False),
        "gradient checkpointing": predicted.memory(recompute=how or True),
    }
    names = list(columns)
    names[how is not False] += "\n(this run)"
    if not predicted.demand.trains:
        names, columns = ["bytes"], {"bytes": predicted.memory(recompute=how)}
    rows: list[Sequence[object]] = [
        (same[0].name, same[0].when, *(in_words(part.bytes) for part in same), same[0].key or "")
        for same in zip(*columns.values(), strict=True)
        if any(part.bytes for part in same)
    ]
    peaks = (Text(in_words(peak(memory)), "bold") for memory in columns.values())
    rows.append((Text("peak", "bold"), "", *peaks, ""))
    numbers = (Column(name, right=True) for name in names)
    terminal.print(WordTable((Column("part"), Column("when", "dim"), *numbers, Column("key", "dim")), rows))
    if predicted.has_engine_apart:
        alone, engine = in_words(predicted.peak_without_engine), predicted.demand.engine
        title = "the engine" if engine is None else engine.title
        terminal.print(f"with {title} on a device of its own the trainer would take {alone}")
    for remedy in predicted.remedies():
        terminal.print(f"{remedy} takes it to {in_words(remedy.peak)}")


def print_verdict(terminal: Terminal, predicted: Prediction, fitting: str | None) -> None:
    """Prints whether the run fits; fitting: a command of this run that does, if it does not."""
    room = f"{in_words(predicted.peak)} of {in_words(predicted.limit)} ({predicted.limit_name})"
    if predicted.fits:
        share = (
            f", {predicted.peak / predicted.limit:.1%}: other programs, or longer rows, may leave it too little memory"
        )
        word, style = ("tight", "yellow") if predicted.is_tight else ("fits", "green")
        terminal.print(f"{word}: {room}{share * predicted.is_tight}", style=style)
        return
    for who, lacking in predicted.shortfalls.items():
        share = f"the {who}'s share of the device is {in_words(lacking)} too small for it"
        terminal.print(f"does not start: {share}", style="red")
    memory_parts = predicted.memory(recompute=predicted.demand.recompute)
    if predicted.peak > predicted.limit:
        terminal.print(f"does not fit: {room}; it is highest while {busiest(memory_parts)}", style="red")
    if fitting is not None:
        terminal.print(f"this fits: {fitting}")
        return
    largest = max(memory_parts, key=lambda part: part.bytes)
    text = f"no value of a key makes it fit; the largest part is {largest.name} ({in_words(largest.bytes)})"
    terminal.print(f"{text}: use a smaller model or a larger device")


def print_lengths(terminal: Terminal, name: str, tokens: Sequence[int]) -> None:
    from rlft.plan.prediction import histogram

    heading(terminal, f"{name}: {len(tokens):,}, by tokens")
    ranges, rows = histogram(tokens, BINS), []
    of_single_lengths, most = ranges[0][0] == ranges[0][1], max(count for *_, count in ranges)
    for first, last, count in ranges:
        span = f"{first}" if of_single_lengths else f"{first} to {last}"
        bar = "#" * max(round(BAR_WIDTH * count / most), 1 if count else 0)
        rows.append((f"  {span}", f"{count:,}", bar))
    terminal.print(grid(rows))


def print_conversation(terminal: Terminal, tried: EnvironmentTrial) -> None:
    heading(terminal, f"A conversation with the environment, of a policy that is scripted (prompt {tried.prompt})")
    if tried.error is not None:
        terminal.print(visible(tried.error), style="red")
        return
    rows = [("begins", one_line(tried.opening, MAX_TURN_CHARACTERS), "")] if tried.opening else []
    for text, answer in tried.said:
        rows.append(("policy", one_line(text, MAX_TURN_CHARACTERS), ""))
        if answer:
            rows.append(("answer", one_line(answer, MAX_TURN_CHARACTERS), ""))
    rows.append(("ends", tried.finish, "" if tried.reward is None else f"reward {tried.reward:g}"))
    if tried.failed:
        rows.append(("failed calls", ", ".join(tried.failed), "arguments are made up: a tool may well refuse them"))
    terminal.print(grid(rows))


def print_trials(terminal: Terminal, trials: Sequence[RewardTrial]) -> None:
    heading(terminal, "What the rewards say, before their weights")
    names = list(dict.fromkeys(trial.reward for trial in trials))
    scores: dict[tuple[str, str], dict[str, str]] = {}
    for trial in trials:
        score = "failed" if trial.score is None else f"{trial.score:g}"
        scores.setdefault((trial.prompt, trial.shown), {})[trial.reward] = score
    columns = (Column("prompt", "dim", folds=True), Column("completion", folds=True))
    rows = ((*texts, *(of_one.get(name, "") for name in names)) for texts, of_one in scores.items())
    terminal.print(WordTable((*columns, *(Column(name, right=True) for name in names)), rows))


# -- time --------------------------------------------------------------------------------------------------------------
def time_rows(schedule: Schedule, estimated: Duration | str, price: Price | None) -> list[tuple[str, str, str]]:
    """The numbers of the schedule, the estimate or why there is none, and the price."""
    first = schedule.first_evaluation
    when = "none" if first is None else f"before the first step, after {first} of them, and so on to the last"
    table = [("steps", f"{schedule.steps:,}", "")]
    if schedule.checkpoints:
        table.append(("evaluations", f"{schedule.evaluations:,}", when))
        table.append(("checkpoints", f"{schedule.checkpoints:,}", "of the last step as well"))
    measured = f"after {FIRST} steps rlft watch says it from what they took"
    later = [measured] * bool(schedule.checkpoints)  # of a run that writes metrics
    if isinstance(estimated, str):
        table.append(("the run", "no estimate", "; ".join([estimated, *later])))
        said_later = "with price= rlft watch says what it costs" * bool(later)
        return table if price is None else [*table, ("price", str(price), said_later)]
    step, run = estimated.step, estimated.run
    words = [f"an estimate for {estimated.machine}", *later]
    if schedule.checkpoints:
        words.insert(0, stages_text(estimated.between_steps))
    table += [
        ("a step", f"{seconds(step.seconds)} ({seconds(step.low)} to {seconds(step.high)})", step_text(estimated)),
        ("the run", str(run), "; ".join(words)),
    ]
    if price is not None:
        table.append(("price", f"{price.whole(run)} {price.currency}".rstrip(), f"at {price}, without the start"))
    return table


def stages_text(stages: Mapping[str, Forecast]) -> str:
    return ", ".join(f"{name} {seconds(stage.seconds)}" for name, stage in stages.items())


def step_text(estimated: Duration) -> str:
    """Such as `sample 5.2 s, update 10 s, if all completions have 64 tokens (lower end: 16); without rewards`."""
    text = stages_text(estimated.of_a_step)
    if estimated.completion_tokens is None:
        return text
    short, longest = estimated.completion_tokens
    text += f"; if completions have all {longest} tokens (at the lower end {short})"
    return f"{text}; rewards by programs are not counted"


def seconds(number: float) -> str:
    """Seconds in two digits, or as a clock shows them from a minute on.

    >>> seconds(0.0321), seconds(5.24), seconds(61.2), seconds(3601)
    ('0.032 s', '5.2 s', '1:01', '1:00:01')
    """
    return f"{number:.2g} s" if number < 59.5 else duration(number)
