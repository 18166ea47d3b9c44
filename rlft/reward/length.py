"""A reward for short completions: among siblings (Kimi k1.5), near a target length, or below a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from rlft.config.bounds import PositiveFloat, PositiveInt
from rlft.reward.answer import AnswerKeys
from rlft.reward.exact_match import ExactMatch
from rlft.types import Group, Prompt, UserError


class LengthMode(StrEnum):
    kimi = "kimi"
    target = "target"
    limit = "limit"


def among_siblings(lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
    """Kimi k1.5's length reward of each completion of a group (arXiv 2501.12599, section 2.3.3).

    lambda = 0.5 - (length - shortest) / (longest - shortest); a right answer gets lambda, a wrong one min(0, lambda):
    being short makes no wrong answer better than 0. If all are equally long, each gets 0.
    """
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    scores = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [score if is_right else min(0.0, score) for score, is_right in zip(scores, right, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Length(ExactMatch):
    """The length reward of each completion by its number of tokens, its end token included.

    Only mode `kimi` compares answers, as exact_match does; a completion without an answer is wrong. Mode `target` gives
    0 at the target length, falling linearly to -1 at no tokens and at twice the target, and -1 beyond. Mode `limit`
    gives 0 up to the limit, and `penalty` less for each token over it, down to -1.
    """

    reads_answers: ClassVar[bool] = False

    mode: LengthMode
    target: PositiveInt | None
    limit: PositiveInt | None
    penalty: PositiveFloat

    def __post_init__(self) -> None:
        AnswerKeys.__post_init__(self)  # super() doesn't know a class with slots
        for mode, value in ((LengthMode.target, self.target), (LengthMode.limit, self.limit)):
            if self.mode == mode and value is None:
                raise UserError(mode.value, f"is null, and mode={mode} needs it", remedy="give a number of tokens")

    def __call__(self, group: Group) -> list[float]:
        lengths = [rollout.completion.num_sampled for rollout in group.rollouts]
        if self.mode == LengthMode.kimi:
            return among_siblings(lengths, self.right(group))
        if self.mode == LengthMode.target:
            assert self.target is not None
            return [max(-1.0, -abs(length - self.target) / self.target) for length in lengths]
        assert self.limit is not None
        return [max(-1.0, self.penalty * min(0, self.limit - length)) for length in lengths]

    def reference_text(self, prompt: Prompt) -> str | None:
        return ExactMatch.reference_text(self, prompt) if self.mode == LengthMode.kimi else None
