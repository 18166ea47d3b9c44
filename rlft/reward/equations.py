"""A process reward for written working: each equation is a step, right or wrong, and the answer is the last step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from rlft.config.bounds import PositiveInt
from rlft.reward.answer import AnswerKeys, reference_answers
from rlft.reward.exact_match import normal
from rlft.types import Group, StepScores

MAX_EQUATION_CHARS = 100

# The longest run joined by operators, from the start of a word: `x+3=4` does not hold the equation `3=4`. Words end at
# white space, commas, semicolons and tags. A run begins only where a word does, so a text is read once.
_RUN = re.compile(r"(?<![^\s,;<>])[^\s,;<>+*/=-]*(?: ?[+*/=-] ?[^\s,;<>+*/=-]*)+")
_EQUATION = re.compile(r"(?:[+*-] )?(-?[0-9]+(?: ?[+*-] ?[0-9]+)+) ?= ?(-?[0-9]+)\.?")
_PART = re.compile(r"([+-]?)([0-9]+(?:\*[0-9]+)*)")


def equations(text: str) -> Iterator[tuple[int, bool]]:
    """(the offset at which it ends, exclusive; whether it holds) for each equation in the text.

    An equation is a sum, difference or product of plain whole numbers with at least one operator, `=`, and one number:
    `4+8+1=13`, `12 - 17 = -5`. Numbers are digits only (not 1,000 or 1.5), and nothing may be attached to the equation
    (`x+1+2=3`, `1+2=3+0`) but white space, commas, semicolons, tags, the full stop of a sentence, or the bullet of a
    list.
    """
    for run in _RUN.finditer(text):
        match = _EQUATION.fullmatch(run[0]) if len(run[0]) <= MAX_EQUATION_CHARS else None
        if match is not None:
            yield run.start() + match.end(2), value(match[1]) == int(match[2])


def value(expression: str) -> int:
    """The value of whole numbers joined by + - *, products first."""
    parts = _PART.findall(expression.replace(" ", ""))
    return sum((-1 if sign == "-" else 1) * math.prod(map(int, factors.split("*"))) for sign, factors in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equations(AnswerKeys):
    """Step scores of each completion: `equation_weight` for an equation that holds, `answer_weight` for a right answer.

    Wrong ones are steps of score 0. The answer's step ends with the text. A text with neither equations nor an answer
    has no steps: its total is 0, but with process supervision it has no advantage at all: combine it with a reward of
    completions as a whole (exact_match, format), so that saying nothing is not better than saying something wrong.
    """

    scores_steps: ClassVar[bool] = True
    reads_answers: ClassVar[bool] = False  # its steps have none

    equation_weight: float
    answer_weight: float
    max_equations: PositiveInt

    def __call__(self, group: Group) -> list[StepScores]:
        references = reference_answers(group.prompt)
        return [self._steps(rollout.completion.text, references) for rollout in group.rollouts]

    def normal(self, answer: str) -> str:
        return normal(answer, numeric=True, ignore_case=False)

    def _steps(self, text: str, references: Sequence[str]) -> StepScores:
        steps = islice(equations(text), self.max_equations)
        by_end = {end: self.equation_weight * holds for end, holds in steps}
        answer = self.extract(text)
        if answer is not None:
            right = any(self.is_right(answer, reference) for reference in references)
            # If the text ends with an equation, both are the same step.
            by_end[len(text)] = by_end.get(len(text), 0.0) + self.answer_weight * right
        return StepScores(values=tuple(by_end.values()), ends=tuple(by_end))
