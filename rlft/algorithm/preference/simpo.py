"""SimPO: rewards are mean log-probs, and need no reference. arXiv 2405.14734, equation 6.

    L = -(1 - label_smoothing) * log sigmoid(margin - gamma) - label_smoothing * log sigmoid(gamma - margin)
    reward = beta * log pi(y) / |y|

|y| is the number of tokens of a completion: what is compared is what decoding maximises, whatever the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlft.algorithm.ops.preference import logistic
from rlft.algorithm.preference.preference_loss import PreferenceLoss, RankedValues
from rlft.config.bounds import BelowHalf, NonNegativeFloat, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SimPo(PreferenceLoss):
    """Fields are the keys of configs/loss/simpo.yaml, which explains them."""

    beta: PositiveFloat
    gamma: NonNegativeFloat
    label_smoothing: BelowHalf

    def rewards(self, completions: RankedValues) -> Tensor:
        return self.beta * completions.mean_logprobs

    def of_margins(self, margins: Tensor) -> Tensor:
        return logistic(margins - self.gamma, self.label_smoothing)
