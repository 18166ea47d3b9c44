"""Losses of pairs of which one is preferred to the other: of their scores, or of the margin between these, `[N]`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from rlft.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Mean over the pairs of -log sigmoid(s_chosen - s_rejected - margin), `[]`; 0 without pairs.

    Finite, with a gradient of at most 1 a pair, at any difference. margin `[N]`: by how much the chosen one should win;
    None: 0. K ranked answers are K(K-1)/2 pairs. Bradley and Terry (1952); arXiv 2203.02155, equation 1.
    """
    assert chosen.shape == rejected.shape, (chosen.shape, rejected.shape)
    differences = chosen - rejected if margin is None else chosen - rejected - margin
    return -torch.nn.functional.logsigmoid(differences).sum() / max(len(chosen), 1)


def logistic(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m) of each pair, `[N]`; e: the share of pairs labelled wrongly.

    Without smoothing it is the Bradley-Terry loss of a pair; with it, the least loss is at m = log((1 - e) / e).
    Mitchell (2023), A note on DPO with noisy preferences, equation 3.
    """
    loss_N = -torch.nn.functional.logsigmoid(margins)
    if not label_smoothing:
        return loss_N
    return (1 - label_smoothing) * loss_N - label_smoothing * torch.nn.functional.logsigmoid(-margins)


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) `[K]` of p = exp(mean log-prob of a token), `[K]` in nats. arXiv 2403.07691, equation 4.

    p is held below 1 - eps of the dtype: finite, and without gradient, where every token is certain.
    """
    below_0 = mean_logprobs.clamp(max=-torch.finfo(mean_logprobs.dtype).eps)
    return below_0 - (-torch.expm1(below_0)).log()


def accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Share `[]` of the pairs whose chosen one has the higher score; a tie counts half. 0 without pairs."""
    assert chosen.shape == rejected.shape, (chosen.shape, rejected.shape)
    return torch.heaviside(chosen - rejected, chosen.new_tensor(0.5)).sum() / max(len(chosen), 1)


def pairs_of_ranking(ranks: Sequence[float]) -> tuple[list[int], list[int]]:
    """(better, worse): the two ends of every pair of unequal rank, as indices in the ranking; a higher rank is better.

    >>> pairs_of_ranking([2.0, 1.0, 1.0])
    ([0, 0], [1, 2])
    """
    pairs = [(i, j) for i, j in product(range(len(ranks)), repeat=2) if ranks[i] > ranks[j]]
    return [i for i, _ in pairs], [j for _, j in pairs]


def ranking_loss(scores: Tensor, ranks: Sequence[float], margin: float) -> Tensor:
    """Mean of the Bradley-Terry loss over all pairs of one ranking, `[]`; scores `[K]`, ranks: which order them.

    K different ranks are K(K-1)/2 pairs, divided by their number, so that a prompt with many ranked completions weighs
    no more than one with a pair (arXiv 2203.02155, section 3.5). margin: how far apart two scores should be, per unit
    of the difference of their ranks (arXiv 2307.09288, equation 2, whose m(r) it is for a linear m).
    """
    better, worse = pairs_of_ranking(ranks)
    gaps = scores.new_tensor([margin * (ranks[i] - ranks[j]) for i, j in zip(better, worse, strict=True)])
    return bradley_terry(scores[better], scores[worse], gaps)
