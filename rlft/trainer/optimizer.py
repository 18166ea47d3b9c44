"""AdamW over one role's parameters, with a state that saves to safetensors under the parameters' names, and its steps.

The learning rate is a function of the update, so that nothing about it needs saving.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from rlft.config.trainer import Schedule, TrainerConfig
from rlft.system.seeds import derive

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


def begin_step(optimizers: Iterable[Optimizer], seed: int, step: int) -> None:
    """Prepares the first update after `step` steps: seeds dropout, and resets the moments that are due."""
    torch.manual_seed(derive(seed, step, "dropout"))
    for optimizer in optimizers:
        if optimizer.config.reset_every and step % optimizer.config.reset_every == 0:
            optimizer.reset()


def optimizer_step(
    optimizers: Iterable[Optimizer], update: int, num_updates: int, resting: Collection[str] = ()
) -> dict[str, float]:
    """One step of every optimizer with the gradients so far; returns `<role>/lr` and `<role>/grad_norm`.

    Args:
        optimizers: the optimizers.
        update: number of this update in the run, from 0.
        num_updates: number of updates of the whole run.
        resting: roles that do not learn now; their gradients are dropped.
    """
    metrics: dict[str, float] = {}
    for optimizer in optimizers:
        rate = norm = 0.0
        if optimizer.role in resting:
            optimizer.discard()
        else:
            rate = learning_rate(optimizer.config, update, num_updates)
            norm = optimizer.update(rate)
        metrics |= {f"{optimizer.role}/lr": rate, f"{optimizer.role}/grad_norm": norm}
    return metrics


def learning_rate(config: TrainerConfig, update: int, num_updates: int) -> float:
    """The rate of this update (from 0): linear warm-up over `warmup` updates, then the schedule down to 0 at the end.

    >>> from rlft.config.trainer import Schedule
    >>> c = TrainerConfig(
    ...     lr=1.0, schedule=Schedule.linear, warmup=2,
    ...     beta1=0, beta2=0, eps=1, weight_decay=0, max_grad_norm=1, reset_every=0,
    ... )
    >>> [learning_rate(c, u, 6) for u in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    if config.schedule is Schedule.constant:
        return config.lr
    done = (update - config.warmup) / max(1, num_updates - config.warmup)
    if config.schedule is Schedule.linear:
        return config.lr * (1 - done)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
