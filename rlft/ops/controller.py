"""Controllers of a KL coefficient: what beta becomes after a step whose KL is known."""

from __future__ import annotations

from enum import StrEnum

TOLERANCE = 1.5
"""A KL within target / 1.5 .. 1.5 target, ends included, moves no adaptive coefficient (PPO, section 4)."""

LARGEST_ERROR = 0.2
"""The relative error of the KL that a proportional controller sees is clipped to -+0.2."""


class KLController(StrEnum):
    """How the KL coefficient moves: never, by factors of 2 (PPO), or in proportion to the error (Ziegler)."""

    fixed = "fixed"
    adaptive = "adaptive"
    proportional = "proportional"


def next_coefficient(controller: KLController, coef: float, kl: float, *, target: float, gain: float) -> float:
    """The coefficient beta of the next step. kl and target in nats a token, target > 0.

    fixed: beta. adaptive: beta / 2 where kl < target / 1.5, 2 beta where kl > 1.5 target, else beta; arXiv 1707.06347,
    section 4. proportional: beta (1 + K clip(kl / target - 1, -0.2, 0.2)) with K = gain; arXiv 1909.08593.
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
