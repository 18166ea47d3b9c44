"""What can be learned from the file of `rlft sample`: commands that run as they are printed, for this file's size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlft.data.records import identity
from rlft.work import command_line, override

LARGEST_STEP = 32
HELD_OUT = 0.1
"""As configs/sft.yaml, configs/rm.yaml and their data have it."""


def after_sampling(
    command: str, file: Path, model: str, max_prompt_tokens: int, max_completion_tokens: int
) -> list[tuple[str, str]]:
    """(what it does, command) for each verb that the lines suffice for; command: how rlft is called here."""
    rewards: dict[str, list[float | None]] = {}
    with file.open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            rewards.setdefault(identity(line["prompt"]), []).append(line["reward"])
    ranked = [question for question, found in rewards.items() if len({r for r in found if r is not None}) > 1]
    limits = [f"prompts.max_tokens={max_prompt_tokens}", f"max_completion_tokens={max_completion_tokens}"]
    shared = [override("model.path", model), *limits]
    commands = []
    for what, verb, data, unit, questions in (
        ("learn from them", "sft", "demonstrations", "examples_per_step", list(rewards)),
        ("a reward model from their ranking", "rm", "preferences", "rankings_per_step", ranked),
    ):
        if len(questions) < 2:  # one to learn from and one to hold out
            continue
        fraction = held_out_fraction(questions)
        split = [] if fraction == HELD_OUT else [f"{data}.held_out_fraction={fraction}"]
        learned = sum(1 for question in questions if place_of(question) >= fraction)
        step = [f"{unit}={learned}"] if learned < LARGEST_STEP else []
        words = [verb, override(f"{data}.path", file), *shared, *split, *step]
        commands.append((what, command_line(command, *words)))
    return commands


def held_out_fraction(questions: Sequence[str]) -> float:
    """The usual share where it leaves both splits a question, else one that does; questions: two identities or more."""
    places = sorted(map(place_of, questions))
    if places[0] < HELD_OUT <= places[-1]:
        return HELD_OUT
    number = min(len(places) - 1, max(1, round(HELD_OUT * len(places))))
    return round((places[number - 1] + places[number]) / 2, 9)


def place_of(question: str) -> float:
    """Where a question lies between 0 and 1 by its hash: below the held-out fraction it is held out."""
    return int(question[:16], 16) / 2**64
