"""A right or wrong answer's reward by the completion's length, along a cosine (arXiv 2502.03373, section 4.2).

Short right answers earn more than long ones, and short wrong answers lose more than long ones, so that thinking longer
pays if the answer is uncertain. This differs from the paper: a completion exceeds the limit if it was cut off, or has
more than max_tokens tokens; one that ends with the last allowed token is judged by its answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlft.config.bounds import PositiveInt
from rlft.reward.answer import AnswerKeys
from rlft.reward.exact_match import ExactMatch
from rlft.types import Completion, FinishReason, Group, UserError, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(ExactMatch):
    """The reward of each completion by whether its answer is right, as in exact_match, and by its length in tokens.

    The end token is included. In the paper max_tokens is L_max, the right_* are r_0^c and r_L^c, the wrong_* r_0^w and
    r_L^w, exceeded is r_e.
    """

    max_tokens: PositiveInt
    right_at_0: float
    right_at_max: float
    wrong_at_0: float
    wrong_at_max: float
    exceeded: float

    def __post_init__(self) -> None:
        AnswerKeys.__post_init__(self)  # super() doesn't know a class with slots
        least = min(self.right_at_0, self.right_at_max)
        for key in ("wrong_at_0", "wrong_at_max", "exceeded"):
            if getattr(self, key) >= least:
                problem = f"must be less than a right answer earns at least, {least:g}"
                raise UserError(key, problem, got=getattr(self, key), remedy="lower it, or raise right_at_max")

    def __call__(self, group: Group) -> list[float]:
        judged = zip(group.rollouts, self._compared(group), strict=True)
        return [Verdict(self._value(r.completion, right), answer) for r, (right, answer) in judged]

    def _value(self, completion: Completion, is_right: bool | None) -> float:
        num_tokens = completion.num_sampled
        if num_tokens > self.max_tokens or completion.finish_reason == FinishReason.length:
            return self.exceeded
        at_0, at_max = (self.right_at_0, self.right_at_max) if is_right else (self.wrong_at_0, self.wrong_at_max)
        # Along half a cosine, which is flat at both ends.
        return at_max + 0.5 * (at_0 - at_max) * (1 + math.cos(math.pi * num_tokens / self.max_tokens))
