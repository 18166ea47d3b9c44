"""The learning rate as a function of the update, so that nothing about it needs saving."""

from __future__ import annotations

import math

from rlft.config.trainer import Schedule, TrainerConfig


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
