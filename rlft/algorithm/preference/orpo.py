"""ORPO: imitation of the better completion, and the odds ratio of both, without a reference. arXiv 2403.07691.

    L = sft_coef * (-log pi(best) / |best|) - beta * log sigmoid(margin)                             (equation 6)
    reward = log(p / (1 - p)), p = exp(log pi(y) / |y|)                                              (equation 4)

|y| is the number of tokens of a completion. The paper's lambda is beta, its sft_coef is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlft.algorithm.ops.preference import log_odds, logistic
from rlft.algorithm.preference.preference_loss import PreferenceLoss, RankedValues
from rlft.config.bounds import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Orpo(PreferenceLoss):
    """Fields are the keys of configs/loss/orpo.yaml, which explains them."""

    beta: PositiveFloat

    def rewards(self, completions: RankedValues) -> Tensor:
        return log_odds(completions.mean_logprobs)

    def of_margins(self, margins: Tensor) -> Tensor:
        return self.beta * logistic(margins)
