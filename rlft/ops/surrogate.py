"""Policy-gradient surrogates: per-token losses, to be minimised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """A clipped surrogate, and where a clip *binds*: where it, not the ratio, makes the value and the gradient is 0.

    loss `[B, T]`; low, high, dual: bool `[B, T]`.
    """

    loss: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Clipped:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most -c A with a dual clip c > 1.

    Only the side that would gain is clipped: A > 0 above, A < 0 below. PPO: arXiv 1707.06347;
    two ranges: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729.
    """
    assert ratio.shape == advantages.shape, (ratio.shape, advantages.shape)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    dual = torch.zeros_like(advantages, dtype=torch.bool)
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        objective = torch.where(dual, dual_clip * advantages, objective)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    return Clipped(loss=-objective, low=low, high=high, dual=dual)
