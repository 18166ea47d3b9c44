"""Completions with log-probs by hand, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rlft.algorithm.preference.preference_loss import RankedValues, RankingLoss

Computed = tuple[float, list[float], dict[str, float]]
"""(loss, its gradient by the log-probs, metrics)."""


def ranked(
    logprobs: Tensor | Sequence[float], lengths: Sequence[int], reference: Sequence[float] | None
) -> RankedValues:
    """Of completions with these log-probs in nats, summed over their tokens."""
    double = torch.float64
    return RankedValues(
        values=torch.as_tensor(logprobs, dtype=double),
        lengths=torch.tensor(lengths, dtype=double),
        reference=None if reference is None else torch.tensor(reference, dtype=double),
    )


@pytest.fixture
def compute() -> Callable[..., Computed]:
    """Computes a loss: `compute(loss, logprobs, lengths, reference, ranks)`."""

    def computed(
        loss: RankingLoss,
        logprobs: Sequence[float],
        lengths: Sequence[int],
        reference: Sequence[float] | None,
        ranks: Sequence[float] = (1.0, 0.0),
    ) -> Computed:
        leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
        total, metrics = loss(ranked(leaf, lengths, reference), ranks)
        (gradient,) = torch.autograd.grad(total, leaf)
        return total.item(), gradient.tolist(), {name: value.item() for name, value in metrics.items()}

    return computed
