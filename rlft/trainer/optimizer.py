"""AdamW over one role's parameters, with a state that saves to safetensors under the parameters' names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from rlft.config.trainer import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class NonFiniteGradientError(RuntimeError):
    """The gradient holds NaN or infinity; it was not applied."""


class Optimizer:
    """AdamW for one role. Gradients start at zero, not at None: an update without any gradient still counts as one."""

    def __init__(
        self, parameters: Sequence[tuple[str, Parameter]], config: TrainerConfig, role: str = "policy"
    ) -> None:
        self.role, self.config = role, config
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.max_grad_norm = config.max_grad_norm
        self.adamw = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def update(self, lr: float) -> float:
        """One step at this rate with the gradients so far; returns their norm before clipping.

        Raises:
            NonFiniteGradientError: the norm is NaN or infinite; no parameter has been changed.
        """
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm).item()
        if not math.isfinite(norm):
            section = self.role if self.role in ("critic", "reward_model") else "trainer"
            raise NonFiniteGradientError(
                f"{self.role}/grad_norm is {norm}: stopped before it reached the weights; the newest checkpoint is "
                f"good. Lower {section}.lr or use model.dtype=float32"
            )
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return norm

    def discard(self) -> None:
        """Drops the gradients so far."""
        self.adamw.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """Drops all moments: the next update is like the first one of a new optimizer."""
        self.adamw.state.clear()

    def state(self) -> dict[str, Tensor]:
        """{"<moment>/<parameter name>": tensor}; empty before the first update."""
        return {
            f"{moment}/{name}": self.adamw.state[p][moment].detach().clone()
            for name, p in zip(self.names, self.parameters, strict=True)
            if p in self.adamw.state
            for moment in MOMENTS
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, p in zip(self.names, self.parameters, strict=True):
            if f"step/{name}" in state:
                moments = {moment: state[f"{moment}/{name}"].clone() for moment in MOMENTS}
                self.adamw.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in moments.items()}
