"""A game of two turns, for `environment=game`: whom to ask decides, and only the answer at the end is rewarded.

The question is one of `data=arithmetic`. A adds its numbers, B subtracts and C multiplies them, whatever the question
says, and nothing tells the policy who does what. It asks one of them, reads a number, and answers. Whoever asks at
random is right in a third of the games at most; whom to ask for which question can only be learned from the end.
"""

from __future__ import annotations

import re

from rlft.data.arithmetic import OPERATIONS

HELPERS = dict(zip("ABC", OPERATIONS.values(), strict=True))
RULES = "Ask A, B or C, then answer."
NOBODY = "Nobody was asked."

_QUESTION = re.compile(r"What is ([0-9]+) \S ([0-9]+)\?")
_ASK = re.compile(rf"<ask>([{''.join(HELPERS)}])</ask>")
_ANSWER = re.compile(r"<answer>(-?[0-9]+)</answer>")


class OracleGame:
    """The first turn asks by `<ask>A</ask>`, and the next answers by `<answer>132</answer>`; so may the first."""

    def reset(self, prompt: list[dict[str, str]], answer: str, **row: object) -> str:
        """Begins with a question of `data=arithmetic`, else ValueError; returns what the policy may do."""
        question = _QUESTION.search(prompt[-1]["content"])
        if question is None:
            raise ValueError("this game is about questions such as 'What is 47 + 85?'; use data=arithmetic")
        self.numbers = int(question[1]), int(question[2])
        self.answer, self.asked = int(answer), False
        return RULES

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """(what was heard, the reward, whether the game is over): 1 for the right answer and 0 for any other end."""
        answer = _ANSWER.search(text)
        if answer is not None or self.asked:
            return "", float(answer is not None and int(answer[1]) == self.answer), True
        self.asked = True
        ask = _ASK.search(text)
        return (str(HELPERS[ask[1]](*self.numbers)) if ask else NOBODY), None, False
