"""Identity preference optimisation: margins are led to a finite value. arXiv 2310.12036, equation 17.

    L = ((margin - 1 / 2) / beta) ** 2
    reward = beta * (log pi(y) - log reference(y)) / |y|           if per_token is true
    reward = beta * (log pi(y) - log reference(y))                 if per_token is false

With h the difference of the two log-ratios, margin = beta h, so that L = (h - 1 / (2 beta)) ** 2 as in the paper, whose
tau is beta: log-ratios of a pair that is never labelled otherwise stay finite. The paper writes log pi
of a whole completion; its authors have told TRL that its results are those of means over tokens, which is per_token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlft.algorithm.preference.preference_loss import PreferenceLoss, RankedValues
from rlft.config.bounds import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ipo(PreferenceLoss):
    """Fields are the keys of configs/loss/ipo.yaml, which explains them."""

    beta: PositiveFloat
    per_token: bool

    needs_reference: ClassVar[bool] = True

    def rewards(self, completions: RankedValues) -> Tensor:
        return self.beta * completions.log_ratios(per_token=self.per_token)

    def of_margins(self, margins: Tensor) -> Tensor:
        return ((margins - 0.5) / self.beta).square()
