"""Losses of rankings; those of `rlft dpo` share rewards of completions, the margins of pairs, and a term of imitation.

Of K ranked completions of one prompt, each has a reward that the policy implies; a pair's margin is the reward of its
better completion less that of the worse one. The loss of a ranking is

    mean over its pairs of of_margins(margin) + sft_coef * mean over its best completions of -log pi(y) / |y|

so that a prompt with many ranked completions weighs no more than one with a pair. The second term keeps the likelihood
of the best ones from falling along with that of the others (arXiv 2404.19733, equation 2).

Of a completion y, log pi(y) is summed over its tokens, and |y| is their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from rlft.config.bounds import BelowHalf, NonNegativeFloat, PositiveFloat
from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedValues:
    """What a head makes of K completions of one prompt, `[K]` each."""

    values: Tensor  # the score of the completion; or, of a policy, its log-prob in nats, summed over its tokens
    lengths: Tensor  # number of its tokens
    reference: Tensor | None  # as values, by the reference; None for losses without one

    @property
    def mean_logprobs(self) -> Tensor:
        """The log-prob of a token `[K]`, mean over each completion."""
        return self.values / self.lengths

    def log_ratios(self, *, per_token: bool) -> Tensor:
        """log(pi / reference) `[K]` of each completion, or its mean over the tokens."""
        assert self.reference is not None, "plan/rules.py gives a reference to every loss that needs one"
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

    `sft_coef` weighs the negative log-prob per token of the best completions.
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
        better, worse = (constant(tuple(places), rewards_K.device, torch.int64) for places in (better, worse))
        margins_N = rewards_K[better] - rewards_K[worse]
        preference = self.of_margins(margins_N).mean()
        best = [i for i, rank in enumerate(ranks) if rank == max(ranks)]
        sft = -mean_logprobs_K[constant(tuple(best), rewards_K.device, torch.int64)].mean()
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


# -- the losses ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class BradleyTerry(RankingLoss):
    """The loss of a reward model: the better completion gets the higher score. Bradley and Terry (1952).

        L = -log sigmoid(margin - m * (rank of the better - rank of the worse))
        reward = score(y)

    Attributes:
        margin: m, how far two scores should be apart for each unit of the difference of their ranks (m(r) in arXiv
            2307.09288, equation 2, for a linear m); 0 in arXiv 2203.02155, equation 1. An evaluation measures the loss
            without it.
    """

    margin: float

    def __call__(self, completions: RankedValues, ranks: Sequence[float]) -> tuple[Tensor, dict[str, Tensor]]:
        scores = completions.values
        better, worse = pairs_of_ranking(ranks)
        gaps = None
        if self.margin:
            numbers = (self.margin * (ranks[i] - ranks[j]) for i, j in zip(better, worse, strict=True))
            gaps = constant(tuple(numbers), scores.device, scores.dtype)
        better, worse = (constant(tuple(places), scores.device, torch.int64) for places in (better, worse))
        loss = bradley_terry(scores[better], scores[worse], gaps)
        return loss, {"accuracy/pairs": accuracy(scores.detach()[better], scores.detach()[worse])}

    def evaluated(self, completions: RankedValues, ranks: Sequence[float]) -> dict[str, Tensor]:
        loss, metrics = replace(self, margin=0.0)(completions, ranks)
        return {"loss": loss, **metrics, "score_best": completions.values[0], "score_worst": completions.values[-1]}


@dataclass(frozen=True, kw_only=True)
class LogRatioLoss(PreferenceLoss):
    """A loss whose rewards compare the policy with a reference.

    reward = beta * (log pi(y) - log reference(y))                 if per_token is false
    reward = beta * (log pi(y) - log reference(y)) / |y|           if per_token is true
    """

    beta: PositiveFloat
    per_token: bool

    needs_reference: ClassVar[bool] = True

    def rewards(self, completions: RankedValues) -> Tensor:
        return self.beta * completions.log_ratios(per_token=self.per_token)


@dataclass(frozen=True, kw_only=True)
class Dpo(LogRatioLoss):
    """Direct preference optimisation: the policy is its own reward model. arXiv 2305.18290, equation 7.

        L = -(1 - label_smoothing) * log sigmoid(margin) - label_smoothing * log sigmoid(-margin)

    With label smoothing this is conservative DPO (Mitchell 2023), with per_token length-normalised DPO (arXiv
    2411.15124, equation 6).
    """

    label_smoothing: BelowHalf

    def of_margins(self, margins: Tensor) -> Tensor:
        return logistic(margins, self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class Ipo(LogRatioLoss):
    """Identity preference optimisation: margins are led to a finite value. arXiv 2310.12036, equation 17.

        L = ((margin - 1 / 2) / beta) ** 2

    With h the difference of the two log-ratios, margin = beta h, so that L = (h - 1 / (2 beta)) ** 2 as in the paper,
    whose tau is beta: log-ratios of a pair that is never labelled otherwise stay finite. The paper writes log pi of a
    whole completion; its authors have told TRL that its results are those of means over tokens, which is per_token.
    """

    def of_margins(self, margins: Tensor) -> Tensor:
        return ((margins - 0.5) / self.beta).square()


@dataclass(frozen=True, kw_only=True)
class Orpo(PreferenceLoss):
    """ORPO: imitation of the better completion, and the odds ratio of both, without a reference. arXiv 2403.07691.

        L = sft_coef * (-log pi(best) / |best|) - beta * log sigmoid(margin)                             (equation 6)
        reward = log(p / (1 - p)), p = exp(log pi(y) / |y|)                                              (equation 4)

    The paper's lambda is beta, its sft_coef is 1.
    """

    beta: PositiveFloat

    def rewards(self, completions: RankedValues) -> Tensor:
        return log_odds(completions.mean_logprobs)

    def of_margins(self, margins: Tensor) -> Tensor:
        return self.beta * logistic(margins)


@dataclass(frozen=True, kw_only=True)
class SimPo(PreferenceLoss):
    """SimPO: rewards are mean log-probs, and need no reference. arXiv 2405.14734, equation 6.

    L = -(1 - label_smoothing) * log sigmoid(margin - gamma) - label_smoothing * log sigmoid(gamma - margin)
    reward = beta * log pi(y) / |y|
    """

    beta: PositiveFloat
    gamma: NonNegativeFloat
    label_smoothing: BelowHalf

    def rewards(self, completions: RankedValues) -> Tensor:
        return self.beta * completions.mean_logprobs

    def of_margins(self, margins: Tensor) -> Tensor:
        return logistic(margins - self.gamma, self.label_smoothing)


# -- of pairs, from the scores of both members or from the margin between them, `[N]` ---------------------------------
def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Mean over the pairs of -log sigmoid(s_chosen - s_rejected - margin), `[]`; 0 without pairs.

    For any difference it is finite, with a gradient of at most 1 per pair.
    """
    assert chosen.shape == rejected.shape, (chosen.shape, rejected.shape)
    differences = chosen - rejected if margin is None else chosen - rejected - margin
    return -torch.nn.functional.logsigmoid(differences).sum() / max(len(chosen), 1)


def logistic(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m) of each pair, `[N]`; e is the share of pairs labelled wrongly.

    Without smoothing it is the Bradley-Terry loss of a pair; with it, the minimum is at m = log((1 - e) / e).
    Mitchell (2023), A note on DPO with noisy preferences, equation 3.
    """
    loss_N = -torch.nn.functional.logsigmoid(margins)
    if not label_smoothing:
        return loss_N
    return (1 - label_smoothing) * loss_N - label_smoothing * torch.nn.functional.logsigmoid(-margins)


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) `[K]` with p = exp(mean log-prob of a token), `[K]` in nats. arXiv 2403.07691, equation 4.

    p is clamped below 1 - eps of the dtype, so that the result is finite, without gradient, if every token is certain.
    """
    clamped = mean_logprobs.clamp(max=-torch.finfo(mean_logprobs.dtype).eps)
    return clamped - (-torch.expm1(clamped)).log()


def accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Share `[]` of the pairs whose chosen member has the higher score; a tie counts half. 0 without pairs."""
    assert chosen.shape == rejected.shape, (chosen.shape, rejected.shape)
    return torch.heaviside(chosen - rejected, chosen.new_full((), 0.5)).sum() / max(len(chosen), 1)


@lru_cache(maxsize=4096)
def constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The numbers `[N]` on a device: those of most rankings are the same, and a GPU gets them once."""
    return torch.tensor(numbers, device=device, dtype=dtype)


def pairs_of_ranking(ranks: Sequence[float]) -> tuple[list[int], list[int]]:
    """(better, worse): the indices of the two members of every pair of unequal ranks; a higher rank is better.

    >>> pairs_of_ranking([2.0, 1.0, 1.0])
    ([0, 0], [1, 2])
    """
    pairs = [(i, j) for i, j in product(range(len(ranks)), repeat=2) if ranks[i] > ranks[j]]
    return [i for i, _ in pairs], [j for _, j in pairs]
