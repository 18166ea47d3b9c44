"""Masked reductions: values outside the mask have no influence, not even inf and NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True and exactly 0 elsewhere, with a gradient of 0 there. Same shape.

    Apply it to the *inputs* of a formula: if only the result is masked, 0 * inf = NaN gets into the gradient.
    """
    return torch.where(mask, values, values.new_zeros(()))


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over each row's masked tokens `[B]`; 0 for a row without masked tokens."""
    return keep(values, mask).sum(-1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's masked tokens `[B]`; 0 for a row without masked tokens."""
    return row_sum(values, mask) / mask.sum(-1).clamp(min=1)


def max_abs(values: Tensor, mask: Tensor) -> Tensor:
    """Largest |value| of all masked tokens `[]`; 0 if there are none."""
    absolute = keep(values, mask).abs()
    return absolute.amax() if absolute.numel() else absolute.new_zeros(())
