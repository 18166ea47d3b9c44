"""The loss of a reward model: the better completion gets the higher score. Bradley and Terry (1952).

    L = -log sigmoid(margin - m * (rank of the better - rank of the worse))
    reward = score(y)

m is how far two scores should be apart for each unit of the difference of their ranks (m(r) in arXiv 2307.09288,
equation 2, for a linear m); 0 in arXiv 2203.02155, equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlft.algorithm.ops.preference import accuracy, bradley_terry, pairs_of_ranking
from rlft.algorithm.preference.preference_loss import RankedValues, RankingLoss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(RankingLoss):
    """The loss above.

    Attributes:
        margin: m in the module's docstring. An evaluation measures the loss without it.
    """

    margin: float

    def __call__(self, completions: RankedValues, ranks: Sequence[float]) -> tuple[Tensor, dict[str, Tensor]]:
        scores = completions.values
        better, worse = pairs_of_ranking(ranks)
        gaps = scores.new_tensor([self.margin * (ranks[i] - ranks[j]) for i, j in zip(better, worse, strict=True)])
        loss = bradley_terry(scores[better], scores[worse], gaps)
        return loss, {"accuracy/pairs": accuracy(scores.detach()[better], scores.detach()[worse])}

    def evaluated(self, completions: RankedValues, ranks: Sequence[float]) -> dict[str, Tensor]:
        loss, metrics = replace(self, margin=0.0)(completions, ranks)
        return {"loss": loss, **metrics, "score_best": completions.values[0], "score_worst": completions.values[-1]}
