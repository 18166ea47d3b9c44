"""Losses of rankings; those of `rlft dpo` share rewards of completions, the margins of pairs, and a term of imitation.

Of K ranked completions of one prompt, each has a reward that the policy implies; a pair's margin is the reward of its
better completion less that of the worse one. The loss of a ranking is

    mean over its pairs of of_margins(margin) + sft_coef * mean over its best completions of -log pi(y) / |y|

so that a prompt with many ranked completions weighs no more than one with a pair. The second term keeps the likelihood
of the best ones from falling along with that of the others (arXiv 2404.19733, equation 2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlft.algorithm.ops.preference import accuracy, pairs_of_ranking
from rlft.config.bounds import NonNegativeFloat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedValues:
    """What a head makes of K completions of one prompt, `[K]` each.

    Attributes:
        values: the score of the completion; or, of a policy, its log-prob in nats, summed over its tokens.
        lengths: number of its tokens.
        reference: as values, by the reference; None for losses without one.
    """

    values: Tensor
    lengths: Tensor
    reference: Tensor | None

    @property
    def mean_logprobs(self) -> Tensor:
        """The log-prob of a token `[K]`, mean over each completion."""
        return self.values / self.lengths

    def log_ratios(self, *, per_token: bool) -> Tensor:
        """log(pi / reference) `[K]` of each completion, or its mean over the tokens."""
        assert self.reference is not None, "plan/config_checks.py gives a reference to every loss that needs one"
        gaps_K = self.values - self.reference
        return gaps_K / self.lengths if per_token else gaps_K


class RankingLoss(ABC):
    """The loss of one ranking: a mean over its pairs, so that many ranked completions weigh no more than a pair."""

    needs_reference: ClassVar[bool] = False
    """Whether it compares the policy with a reference."""

    @abstractmethod
    def __call__(self, completions: RankedValues, ranks: Sequence[float]) -> tuple[Tensor, dict[str, Tensor]]:
        """(the loss of one ranking `[]`, {metric: its mean over the pairs `[]`, log-probs in nats per token}).

        ranks: a number for each completion; higher is better, equal ones are no pair, and there is at least one pair.
        """

    def evaluated(self, completions: RankedValues, ranks: Sequence[float]) -> dict[str, Tensor]:
        """{metric of an evaluation: its value `[]`} of one held-out ranking: loss, accuracy/pairs and others."""
        loss, metrics = self(completions, ranks)
        return {"loss": loss} | {name.removeprefix("pairs/"): value for name, value in metrics.items()}


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(RankingLoss):
    """The loss of a ranking. A subclass says what the reward of a completion is, and what a margin costs.

    Attributes:
        sft_coef: weight of the negative log-prob per token of the best completions.
    """

    sft_coef: NonNegativeFloat

    @abstractmethod
    def rewards(self, completions: RankedValues) -> Tensor:
        """`[K]`: the reward that the policy implies for each completion."""

    @abstractmethod
    def of_margins(self, margins: Tensor) -> Tensor:
        """`[N]`: the loss of each pair, of its margin `[N]`."""

    def __call__(self, completions: RankedValues, ranks: Sequence[float]) -> tuple[Tensor, dict[str, Tensor]]:
        better, worse = pairs_of_ranking(ranks)
        rewards_K, mean_logprobs_K = self.rewards(completions), completions.mean_logprobs
        margins_N = rewards_K[better] - rewards_K[worse]
        preference = self.of_margins(margins_N).mean()
        best = [i for i, rank in enumerate(ranks) if rank == max(ranks)]
        sft = -mean_logprobs_K[best].mean()
        metrics = {
            "loss/preference": preference,
            "loss/sft": sft,
            "accuracy/pairs": accuracy(rewards_K[better], rewards_K[worse]),
            "pairs/margin": margins_N.mean(),
            "pairs/chosen_reward": rewards_K[better].mean(),
            "pairs/rejected_reward": rewards_K[worse].mean(),
            "pairs/chosen_logprob": mean_logprobs_K[better].mean(),
            "pairs/rejected_logprob": mean_logprobs_K[worse].mean(),
        }
        total = preference + self.sft_coef * sft if self.sft_coef else preference
        return total, {name: value.detach() for name, value in metrics.items()}
