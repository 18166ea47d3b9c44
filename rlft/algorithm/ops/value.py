"""The critic's loss: half the squared errors of values, with an optional clip around the old values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None, clip: float | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Each token's 0.5 max((V - ret)^2, (V_old + clamp(V - V_old, -+c s) - ret)^2) / s^2, and where the clip binds.

    Both are `[B, T]`, the second bool. Where the clip binds, the clipped error is the larger one, and the gradient is
    0. PPO: arXiv 1707.06347; the clip is that of its reference implementation.

    Args:
        values: the current values V, `[B, T]`.
        returns: the targets, `[B, T]`.
        old_values: V_old, `[B, T]`; None: they are the current values, so that nothing is clipped.
        clip: the clip range c, in units of the scale; None: no clip.
        scale: what errors are divided by, s (`LossScale.value_scale`).
    """
    assert values.shape == returns.shape, (values.shape, returns.shape)
    errors_BT = (values - returns.detach()).square()
    if old_values is None or clip is None:
        return 0.5 * errors_BT / scale**2, torch.zeros_like(errors_BT, dtype=torch.bool)
    old_BT, max_change = old_values.detach(), clip * scale
    # With tensors as bounds, V inside the range stays exactly V; V_old + (V - V_old) would round.
    clipped_BT = (values.clamp(old_BT - max_change, old_BT + max_change) - returns.detach()).square()
    binds_BT = clipped_BT > errors_BT
    return 0.5 * torch.where(binds_BT, clipped_BT, errors_BT) / scale**2, binds_BT
