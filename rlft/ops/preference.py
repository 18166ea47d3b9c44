"""Losses of scores `[N]` from pairs of which one is preferred to the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Mean over the pairs of -log sigmoid(s_chosen - s_rejected - margin), `[]`; 0 without pairs.

    Finite, with a gradient of at most 1 a pair, at any difference. margin `[N]`: by how much the chosen one should win;
    None: 0. K ranked answers are K(K-1)/2 pairs. Bradley and Terry (1952); arXiv 2203.02155, equation 1.
    """
    assert chosen.shape == rejected.shape, (chosen.shape, rejected.shape)
    differences = chosen - rejected if margin is None else chosen - rejected - margin
    return -logsigmoid(differences).sum() / max(len(chosen), 1)


def accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Share `[]` of the pairs whose chosen one has the higher score; a tie counts half. 0 without pairs."""
    assert chosen.shape == rejected.shape, (chosen.shape, rejected.shape)
    return torch.heaviside(chosen - rejected, chosen.new_tensor(0.5)).sum() / max(len(chosen), 1)
