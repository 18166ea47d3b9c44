"""Suggests commands that learn from the file of `rlft sample`, with sizes that work for this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.data.records import identity
from rlft.logger.jsonl import told_on_stderr
from rlft.logger.lines import Lost, complete_lines, lost_text
from rlft.system.terminal import command_line, override

LARGEST_STEP = 32
HELD_OUT = 0.1
"""The default fraction of held-out data of these verbs."""


def after_sampling(
    command: str, file: Path, model: str, max_prompt_tokens: int, max_completion_tokens: int
) -> list[tuple[str, str]]:
    """(what it does, command) of each verb for which the file has enough lines; `command` is how rlft is called."""
    rewards: dict[str, list[float | None]] = {}
    lost: list[Lost] = []
    with file.open("rb") as lines:
        for _, line in complete_lines(lines, lost, _is_scored):
            rewards.setdefault(identity(line["prompt"]), []).append(line["reward"])
    if lost:
        told_on_stderr(lost_text(file, lost))
    ranked = [question for question, scores in rewards.items() if len({r for r in scores if r is not None}) > 1]
    limits = [f"prompts.max_tokens={max_prompt_tokens}", f"max_completion_tokens={max_completion_tokens}"]
    shared = [override("model.path", model), *limits]
    commands = []
    for purpose, verb, data, unit, questions in (
        ("learn from them", "sft", "demonstrations", "examples_per_step", list(rewards)),
        ("a reward model from their ranking", "rm", "preferences", "rankings_per_step", ranked),
        ("a policy from their ranking", "dpo", "preferences", "rankings_per_step", ranked),
    ):
        if len(questions) < 2:  # one is needed for learning and one is held out
            continue
        fraction = held_out_fraction(questions)
        split_override = [] if fraction == HELD_OUT else [f"{data}.held_out_fraction={fraction}"]
        num_training = sum(1 for question in questions if split_number(question) >= fraction)
        step_override = [f"{unit}={num_training}"] if num_training < LARGEST_STEP else []
        words = [verb, override(f"{data}.path", file), *shared, *split_override, *step_override]
        commands.append((purpose, command_line(command, *words)))
    return commands


def _is_scored(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("prompt"), list) and "reward" in line


def held_out_fraction(questions: Sequence[str]) -> float:
    """The default fraction if it gives both splits a question, else another that does; needs at least two questions."""
    numbers = sorted(map(split_number, questions))
    if numbers[0] < HELD_OUT <= numbers[-1]:
        return HELD_OUT
    num_held_out = min(len(numbers) - 1, max(1, round(HELD_OUT * len(numbers))))
    return round((numbers[num_held_out - 1] + numbers[num_held_out]) / 2, 9)


def split_number(question: str) -> float:
    """A question's number in [0, 1) by its hash; it is held out if that is below the held-out fraction."""
    return int(question[:16], 16) / 2**64
