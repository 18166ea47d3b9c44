"""Masked reductions: what lies outside the mask has no influence, whatever it is (inf and NaN too)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlft.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask`, exactly 0 elsewhere, in the value and in the gradient. Same shape.

    Apply it to the *inputs* of a formula: masking only its result lets 0 * inf = NaN back in through the gradient.
    """
    return torch.where(mask, values, values.new_zeros(()))


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over each row's masked tokens `[B]`; 0 for a row without any."""
    return keep(values, mask).sum(-1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's masked tokens `[B]`; 0 for a row without any."""
    return row_sum(values, mask) / mask.sum(-1).clamp(min=1)


def max_abs(values: Tensor, mask: Tensor) -> Tensor:
    """Largest |value| under the mask `[]`; 0 when there is none."""
    kept = keep(values, mask).abs()
    return kept.amax() if kept.numel() else kept.new_zeros(())
