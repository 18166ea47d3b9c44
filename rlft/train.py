"""The loop: sample -> score -> credit -> update -> publish. A step is a function of (config, state at its start)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlft.algorithm.protocol import Algorithm
from rlft.collate import collate, select
from rlft.metrics import Clock, UpdateMetrics, peak_memory_bytes, rollout_metrics
from rlft.model.critic import CRITIC
from rlft.model.roles import Roles
from rlft.rehearsal import rehearse
from rlft.resample import fill
from rlft.seeds import derive
from rlft.session import Session, State
from rlft.types import Batch, LossScale


def train(session: Session) -> State:
    """Runs steps until the last one or an interruption; returns the state it ended in."""
    run, roles, plan = session.config, session.roles, session.plan
    state = session.begin(lambda: rehearse(session, backward))
    while state.step < run.steps and not session.interrupted:
        clock, algorithm = Clock(session.logger.stage), state.algorithm
        with clock("sample"):
            groups = session.sample(state.step)
        with clock("score"):
            scores = session.score(groups)
        rollouts = fill(session, state.step, clock, groups, scores)
        with clock("credit"):
            batch = collate(rollouts.groups, rollouts.scores, session.backbone.decode)
            inert_B = algorithm.inert(batch)
            batch = algorithm.credit(roles.annotate(batch, inert_B, needs_old=plan.needs_old))
        inspection = session.inspect(clock, state.step + 1, batch, inert_B)
        with clock("update"):
            metrics = rollout_metrics(rollouts, batch, inert_B) | update(session, state, batch, inert_B)
            metrics |= {f"algorithm/{name}": value for name, value in algorithm.state().items()}
        tokens = session.inspected(clock, inspection)
        with clock("publish"):
            session.publish(state.step + 1)
            roles.refresh(state.step + 1)
            metrics |= session.train_reward_model(state.step + 1, rollouts)
        # A resting policy has not moved: its KL of 0 says nothing to a controller.
        adapted = algorithm.adapt(metrics) if session.policy_learns(state.step) else algorithm
        state = State(step=state.step + 1, algorithm=adapted)
        metrics |= clock.metrics() | {"memory/peak_bytes": peak_memory_bytes()}
        session.record(state.step, metrics, rollouts, batch, tokens)
        session.evaluate_if_due(state.step)
        session.checkpoint_if_due(state)
    return state


def update(session: Session, state: State, batch: Batch, inert_B: Tensor) -> dict[str, float]:
    """Epochs x minibatches (whole groups) x micro-batches (by token budget): gradient steps on what learns."""
    run, roles, algorithm, step = session.config, session.roles, state.algorithm, state.step
    metrics = UpdateMetrics()
    torch.manual_seed(derive(run.seed, step, "dropout"))
    session.begin_updates(step, batch)
    with roles.training():
        for i, rows in enumerate(
            minibatches(batch, run.epochs, run.minibatches, derive(run.seed, step, "minibatches"))
        ):
            scale = loss_scale(select(batch, rows), run.generation.max_tokens, roles)
            live = rows[~inert_B[rows]]
            share = int(batch.loss_mask[live].sum()) / scale.num_tokens
            for part in roles.forward.micro_batches(batch, live, run.token_budget):
                micro = roles.to_device(select(batch, part))
                metrics.add(backward(roles, algorithm, micro, scale, session.policy_learns(step)), share)
                metrics.add_tokens(roles.forward.real_tokens(micro), roles.forward.network_tokens(micro))
            if algorithm.needs_text and session.policy_learns(step):
                metrics.add(text_backward(session, algorithm, step, i), 1.0)
            metrics.add_update(session.optimize(step, i))
    return metrics.mean()


def backward(
    roles: Roles, algorithm: Algorithm, micro: Batch, scale: LossScale, policy_learns: bool
) -> Mapping[str, Tensor]:
    """Adds a micro-batch's gradients to the policy's, unless it rests, and to the critic's; returns the loss's metrics.

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
        outputs = roles.outputs(micro, algorithm.needs_entropy, layout)
        outputs = outputs if values is None else replace(outputs, values=values.detach())
        loss = algorithm.loss(outputs, micro, scale)
    if loss.total.requires_grad:
        loss.total.backward()
        roles.check_gradients()
        if algorithm.needs_values and values is None:
            roles.check_gradients(CRITIC)
    return loss.metrics


def text_backward(session: Session, algorithm: Algorithm, step: int, update: int) -> dict[str, Tensor]:
    """Adds the gradient of the pretraining text that is this update's; returns its loss."""
    roles, budget = session.roles, session.config.token_budget
    batch = session.text_at(step, update)
    total = torch.zeros(())
    for part in roles.forward.micro_batches(batch, torch.arange(len(batch.rewards)), budget):
        micro = roles.to_device(select(batch, part))
        logprobs = roles.forward(micro, temperature=1.0).logprobs
        loss = algorithm.text_loss(logprobs, micro.loss_mask, int(batch.loss_mask.sum()))
        loss.backward()
        total += loss.detach().cpu()
    return {"loss/text": total, "loss/total": total}


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
    """Sizes of the whole optimizer batch; rows that are never forwarded count too."""
    return LossScale(
        num_tokens=int(minibatch.loss_mask.sum()),
        num_sequences=len(minibatch.rewards),
        max_completion_tokens=max_completion_tokens,
        value_scale=1.0 if roles.critic is None else roles.critic.value_scale,
    )
