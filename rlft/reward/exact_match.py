"""1 if the answer equals the reference answer, else 0."""

from __future__ import annotations

from dataclasses import dataclass

from rlft.reward.answer import AnswerKeys, plain_number


def matches(answer: str, reference: str, *, numeric: bool, ignore_case: bool) -> bool:
    """Whether two answers are the same text, up to the length of white space, or with `numeric` the same number."""
    if numeric and (value := plain_number(answer)) is not None and value == plain_number(reference):
        return True
    answer, reference = " ".join(answer.split()), " ".join(reference.split())
    return answer.casefold() == reference.casefold() if ignore_case else answer == reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch(AnswerKeys):
    """1.0 for each completion whose answer is the reference answer, else 0.0."""

    numeric: bool
    ignore_case: bool

    def is_right(self, answer: str, reference: str) -> bool:
        return matches(answer, reference, numeric=self.numeric, ignore_case=self.ignore_case)
