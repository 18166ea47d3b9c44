"""A process reward for conversations: each turn that calls tools is a step, scored by whether the tools answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rlft.config.bounds import PositiveInt
from rlft.types import Completion, Group, StepScores, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Step scores of each completion: 1.0 for a turn all of whose calls were answered, 0.0 for one with a failed call.

    A turn without calls is no step. Which tools are called, and why, does not matter: also reward the result.
    """

    scores_steps: ClassVar[bool] = True

    max_turns: PositiveInt

    def __call__(self, group: Group) -> list[StepScores]:
        return [self._steps(rollout.completion) for rollout in group.rollouts]

    def _steps(self, completion: Completion) -> StepScores:
        calling = [(turn, end) for turn, end in turns_in_text(completion) if turn.calls][: self.max_turns]
        values = tuple(float(not any(call.failed for call in turn.calls)) for turn, _ in calling)
        return StepScores(values=values, ends=tuple(end for _, end in calling))


def turns_in_text(completion: Completion) -> Iterator[tuple[Turn, int]]:
    """Each turn with its exclusive end in the completion's text; the environment's answers between are skipped."""
    offset = 0
    for turn in completion.turns:
        offset = _end_of(turn.text, completion.text, offset)
        yield turn, offset
        offset = _end_of(turn.answer, completion.text, offset)


def _end_of(part: str, text: str, start: int) -> int:
    """The offset at which the first such part from `start` on ends; `start` if there is none, as in a cut text."""
    position = text.find(part, start)
    return start if position < 0 else position + len(part)
