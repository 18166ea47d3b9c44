"""Losses of pairs with a preferred member, from the scores of both or from the margin between them, `[N]`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Mean over the pairs of -log sigmoid(s_chosen - s_rejected - margin), `[]`; 0 without pairs.

    For any difference it is finite, with a gradient of at most 1 per pair. K ranked answers are K(K-1)/2 pairs. Bradley
    and Terry (1952); arXiv 2203.02155, equation 1.

    Args:
        chosen: scores of the chosen ones, `[N]`.
        rejected: scores of the rejected ones, `[N]`.
        margin: by how much the chosen ones should be better, `[N]`; None: 0.
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
    return torch.heaviside(chosen - rejected, chosen.new_tensor(0.5)).sum() / max(len(chosen), 1)


def pairs_of_ranking(ranks: Sequence[float]) -> tuple[list[int], list[int]]:
    """(better, worse): the indices of the two members of every pair of unequal ranks; a higher rank is better.

    >>> pairs_of_ranking([2.0, 1.0, 1.0])
    ([0, 0], [1, 2])
    """
    pairs = [(i, j) for i, j in product(range(len(ranks)), repeat=2) if ranks[i] > ranks[j]]
    return [i for i, _ in pairs], [j for _, j in pairs]
