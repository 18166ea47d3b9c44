"""Controllers of a KL coefficient, which compute beta for the next step from the measured KL of the last."""

from __future__ import annotations

from enum import StrEnum

TOLERANCE = 1.5
"""An adaptive coefficient does not change if the KL is from target / 1.5 to 1.5 target (PPO, section 4)."""

LARGEST_ERROR = 0.2
"""A proportional controller clips the relative error of the KL to +-0.2."""


class KLController(StrEnum):
    """How the KL coefficient changes: never, by factors of 2 (PPO), or in proportion to the error (Ziegler)."""

    fixed = "fixed"
    adaptive = "adaptive"
    proportional = "proportional"


def next_coefficient(controller: KLController, coef: float, kl: float, *, target: float, gain: float) -> float:
    """The coefficient of the next step.

    Args:
        controller: fixed: beta. adaptive: beta / 2 if kl < target / 1.5, 2 beta if kl > 1.5 target, else beta (arXiv
            1707.06347, section 4). proportional: beta (1 + gain clip(kl / target - 1, -0.2, 0.2)) (arXiv 1909.08593).
        coef: the coefficient beta of the last step.
        kl: measured KL, in nats per token.
        target: its target, in nats per token, above 0.
        gain: the gain of a proportional controller.
    """
    match controller:
        case KLController.fixed:
            return coef
        case KLController.adaptive:
            if kl < target / TOLERANCE:
                return coef / 2
            return 2 * coef if kl > TOLERANCE * target else coef
        case KLController.proportional:
            error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            return coef * (1 + gain * error)
