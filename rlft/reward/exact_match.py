"""1 if the answer equals the reference answer, else 0."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context

from rlft.reward.answer import MAX_NUMBER_CHARS, AnswerKeys, plain_number

_EXACT = Context(prec=MAX_NUMBER_CHARS)


def normal(answer: str, *, numeric: bool, ignore_case: bool) -> str:
    """The text of an answer with single spaces, in lower case with `ignore_case`; with `numeric` a number's value.

    >>> [normal(text, numeric=True, ignore_case=True) for text in ("1,000.0", "-0", "New  York")]
    ['1000', '0', 'new york']
    """
    text = " ".join(answer.split())
    if numeric and (value := plain_number(text)) is not None:
        return f"{value.normalize(_EXACT):f}" if value else "0"
    return text.casefold() if ignore_case else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch(AnswerKeys):
    """1.0 for each completion whose answer is the reference answer, else 0.0."""

    numeric: bool
    ignore_case: bool

    def normal(self, answer: str) -> str:
        return normal(answer, numeric=self.numeric, ignore_case=self.ignore_case)
