"""A process reward for conversations: each turn that calls tools is a step, scored by whether they answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rlft.keys.bounds import PositiveInt
from rlft.types import Completion, Group, StepScores, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Step scores of each completion: 1.0 for a turn all of whose calls were answered, 0.0 for one with a failed call.

    A turn without calls is no step. What is called, and what for, is not looked at: combine it with a reward of what
    the conversation comes to.

    max_turns: further turns with calls are no steps.
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
    """Each turn with the offset into the completion's text at which it ends, exclusive.

    What the environment said stands between turns, and may repeat them: it is passed over before the next is sought.
    """
    at = 0
    for turn in completion.turns:
        at = _behind(completion.text, turn.text, at)
        yield turn, at
        at = _behind(completion.text, turn.answer, at)


def _behind(text: str, part: str, at: int) -> int:
    """The offset behind the first such part from `at` on; `at` if there is none, as where the text was cut."""
    found = text.find(part, at)
    return at if found < 0 else found + len(part)
