"""The updates of one step: gradient steps on whatever learns, from one batch whose advantages are known.

A function of its arguments alone: the adapters in their roles, an optimizer for each that learns, the algorithm, the
batch and the number of finished steps. Minibatches and dropout derive from (seed, step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.batch import select
from rlft.model.critic import CRITIC
from rlft.model.roles import POLICY, Roles
from rlft.system.seeds import derive
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.schedule import learning_rate
from rlft.trainer.update_metrics import UpdateMetrics
from rlft.types import Batch, LossScale


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """Keys of the run's config that the updates depend on.

    Attributes:
        seed: the run's seed.
        steps: number of steps of the whole run.
        epochs: number of passes over a step's batch.
        minibatches: number of updates in an epoch.
        token_budget: the most tokens that enter one forward and backward pass.
        max_completion_tokens: generation.max_tokens.
        warmup_steps: critic.warmup_steps, in which only the critic learns.
        reset_every: trainer.reset_every.
    """

    seed: int
    steps: int
    epochs: int
    minibatches: int
    token_budget: int
    max_completion_tokens: int
    warmup_steps: int
    reset_every: int

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


class UpdateText(Protocol):
    """Pretraining text of each update (`PretrainText`), for algorithms that mix it in."""

    def batch(self, seed: int, step: int, update: int) -> Batch: ...


def update(
    roles: Roles,
    optimizers: Mapping[str, Optimizer],
    algorithm: Objective,
    batch: Batch,
    zero_gradient_B: Tensor,
    step: int,
    settings: UpdateSettings,
    text: UpdateText | None = None,
) -> dict[str, float]:
    """Epochs x minibatches (whole groups) x micro-batches (by token budget); returns the updates' mean metrics.

    Args:
        roles: the adapters on their base.
        optimizers: {role: optimizer} for every role that learns.
        algorithm: the algorithm whose loss is minimised.
        batch: `[B, T]`, with advantages.
        zero_gradient_B: bool `[B]`, rows that add nothing to the gradient and are not forwarded.
        step: number of finished steps.
        settings: how the batch is divided into updates, and the schedule.
        text: gives each update's text, if the algorithm needs text.
    """
    metrics, learns = UpdateMetrics(), policy_learns(roles, settings, step)
    begin_step(roles, optimizers, batch, step, settings)
    order = derive(settings.seed, step, "minibatches")
    with roles.training():
        for i, rows in enumerate(minibatches(batch, settings.epochs, settings.minibatches, order)):
            scale = loss_scale(select(batch, rows), settings.max_completion_tokens, roles)
            live = rows[~zero_gradient_B[rows]]
            share = int(batch.loss_mask[live].sum()) / scale.num_tokens
            for part in roles.forward.micro_batches(batch, live, settings.token_budget):
                micro = roles.to_device(select(batch, part))
                metrics.add(backward(roles, algorithm, micro, scale, learns), share)
                metrics.add_tokens(roles.forward.real_tokens(micro), roles.forward.network_tokens(micro))
            if algorithm.needs_text and learns:
                assert text is not None, "plan/roles.py refuses algorithms that need text without any"
                text_batch = text.batch(settings.seed, step, i)
                metrics.add(text_backward(roles, algorithm, text_batch, settings.token_budget), 1.0)
            metrics.add_update(optimizer_step(optimizers, settings, step, i, learns))
    return metrics.mean()


def begin_step(
    roles: Roles, optimizers: Mapping[str, Optimizer], batch: Batch, step: int, settings: UpdateSettings
) -> None:
    """Prepares a step's first update: seeds dropout, updates the critic's statistics, resets the moments if due."""
    torch.manual_seed(derive(settings.seed, step, "dropout"))
    if roles.critic is not None and batch.returns is not None:
        roles.critic.observe(batch.returns, batch.loss_mask)
    if settings.reset_every and step % settings.reset_every == 0:
        for optimizer in optimizers.values():
            optimizer.reset()


def policy_learns(roles: Roles, settings: UpdateSettings, step: int) -> bool:
    """False in the first steps, in which only the critic learns."""
    return roles.critic is None or step >= settings.warmup_steps


def backward(
    roles: Roles, algorithm: Objective, micro: Batch, scale: LossScale, policy_learns: bool
) -> Mapping[str, Tensor]:
    """Adds a micro-batch's gradients to the critic's and, if it learns, to the policy's; returns the loss's metrics.

    A critic with an adapter of its own goes first, forward and backward, so that only one network's activations are
    alive at a time; the policy's loss then sees its values as constants.
    """
    values, layout = None, roles.forward.layout(micro)
    if algorithm.needs_values and roles.critic_adapter is not None:
        with roles.learning(roles.critic_adapter):
            values = roles.values(micro, layout)
            algorithm.value_loss(values, micro, scale).backward()
        roles.check_gradients(roles.critic_adapter)
    with torch.set_grad_enabled(policy_learns or values is None):
        outputs = roles.outputs(micro, algorithm.needs_entropy, layout, top_k=algorithm.teacher_top_k > 0)
        outputs = outputs if values is None else replace(outputs, values=values.detach())
        loss = algorithm.loss(outputs, micro, scale)
    if loss.total.requires_grad:
        loss.total.backward()
        roles.check_gradients()
        if algorithm.needs_values and values is None:
            roles.check_gradients(CRITIC)
    return loss.metrics


def text_backward(
    roles: Roles, algorithm: Objective, text: Batch, token_budget: int, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Adds the gradient of an update's pretraining text to the policy's; returns its loss.

    Args:
        roles: the adapters on their base.
        algorithm: the algorithm, which has a loss of text.
        text: the whole text of the update.
        token_budget: the most tokens that enter one forward and backward pass.
        rows: int64 `[N]`, the rows to forward, None for all; the loss is their part of the whole text's loss.
    """
    total = torch.zeros(())
    rows = torch.arange(len(text.rewards)) if rows is None else rows
    for part in roles.forward.micro_batches(text, rows, token_budget):
        micro = roles.to_device(select(text, part))
        logprobs = roles.forward(micro, temperature=1.0).logprobs
        loss = algorithm.text_loss(logprobs, micro.loss_mask, int(text.loss_mask.sum()))
        loss.backward()
        total += loss.detach().cpu()
    return {"loss/text": total, "loss/total": total}


def optimizer_step(
    optimizers: Mapping[str, Optimizer], settings: UpdateSettings, step: int, update: int, policy_learns: bool
) -> dict[str, float]:
    """One step of every optimizer with the gradients so far; returns `<role>/lr` and `<role>/grad_norm`.

    Args:
        optimizers: {role: optimizer}.
        settings: how steps are divided into updates, and the schedule.
        step: number of finished steps.
        update: number of this update in its step, from 0.
        policy_learns: whether the policy learns; if not, its gradients are dropped.
    """
    metrics: dict[str, float] = {}
    done, total = step * settings.updates_per_step + update, settings.steps * settings.updates_per_step
    for role, optimizer in optimizers.items():
        if role == POLICY and not policy_learns:
            optimizer.discard()
            metrics |= {f"{role}/lr": 0.0, f"{role}/grad_norm": 0.0}
            continue
        rate = learning_rate(optimizer.config, done, total)
        metrics |= {f"{role}/lr": rate, f"{role}/grad_norm": optimizer.update(rate)}
    return metrics


def minibatches(batch: Batch, epochs: int, num_minibatches: int, seed: int) -> list[Tensor]:
    """Row indices (int64) of each update: every epoch deals the groups, shuffled, to `num_minibatches` updates."""
    if num_minibatches == 1:
        return [torch.arange(len(batch.group_ids))] * epochs
    generator = torch.Generator().manual_seed(seed)
    groups = batch.group_ids.unique()
    return [
        torch.isin(batch.group_ids, dealt).nonzero()[:, 0]
        for _ in range(epochs)
        for dealt in groups[torch.randperm(len(groups), generator=generator)].chunk(num_minibatches)
    ]


def loss_scale(minibatch: Batch, max_completion_tokens: int, roles: Roles) -> LossScale:
    """Sizes of the whole minibatch; rows that are never forwarded count, too."""
    return LossScale(
        num_tokens=int(minibatch.loss_mask.sum()),
        num_sequences=len(minibatch.rewards),
        max_completion_tokens=max_completion_tokens,
        value_scale=1.0 if roles.critic is None else roles.critic.value_scale,
    )
