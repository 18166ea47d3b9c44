"""Direct preference optimisation: the policy is its own reward model. arXiv 2305.18290, equation 7.

    L = -(1 - label_smoothing) * log sigmoid(margin) - label_smoothing * log sigmoid(-margin)
    reward = beta * (log pi(y) - log reference(y))                 if per_token is false
    reward = beta * (log pi(y) - log reference(y)) / |y|           if per_token is true

log pi(y) is summed over the tokens of a completion, |y| is their number. With label smoothing this is conservative DPO
(Mitchell 2023), with per_token length-normalised DPO (arXiv 2411.15124, equation 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlft.algorithm.ops.preference import logistic
from rlft.algorithm.preference.preference_loss import PreferenceLoss, RankedValues
from rlft.config.bounds import BelowHalf, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Dpo(PreferenceLoss):
    """Fields are the keys of configs/loss/dpo.yaml, which explains them."""

    beta: PositiveFloat
    label_smoothing: BelowHalf
    per_token: bool

    needs_reference: ClassVar[bool] = True

    def rewards(self, completions: RankedValues) -> Tensor:
        return self.beta * completions.log_ratios(per_token=self.per_token)

    def of_margins(self, margins: Tensor) -> Tensor:
        return logistic(margins, self.label_smoothing)
