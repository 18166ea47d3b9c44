"""The loop: sample -> score -> credit -> update -> publish. A step is a function of (config, state at its start)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlft.collate import collate, select
from rlft.metrics import Clock, UpdateMetrics, peak_memory_bytes, rollout_metrics
from rlft.seeds import derive
from rlft.session import Session, State
from rlft.trainer.schedule import learning_rate
from rlft.types import Batch, LossScale


def train(session: Session) -> State:
    """Runs steps until the last one or an interruption; returns the state it ended in."""
    run, roles, algorithm = session.config, session.roles, session.algorithm
    state = session.begin()
    while state.step < run.steps and not session.interrupted:
        clock = Clock(session.logger.stage)
        with clock("sample"):
            groups = session.sample(state.step)
        with clock("score"):
            scores = session.scorer(groups)
        with clock("credit"):
            batch = collate(groups, scores)
            inert_B = algorithm.inert(batch)
            batch = algorithm.credit(roles.annotate(batch, inert_B, needs_old=session.plan.needs_old))
        with clock("update"):
            metrics = rollout_metrics(groups, scores, batch, inert_B) | update(session, batch, inert_B, state.step)
        with clock("publish"):
            session.publish(state.step + 1)
            roles.refresh(state.step + 1)
        state = replace(state, step=state.step + 1)
        metrics |= clock.metrics() | {"memory/peak_bytes": peak_memory_bytes()}
        session.record(state.step, metrics, groups, scores, batch)
        session.evaluate_if_due(state.step)
        session.checkpoint_if_due(state)
    return state


def update(session: Session, batch: Batch, inert_B: Tensor, step: int) -> dict[str, float]:
    """Epochs x minibatches (whole groups) x micro-batches (by token budget): gradient steps on the policy adapter."""
    run, roles, algorithm, optimizer = session.config, session.roles, session.algorithm, session.optimizer
    metrics = UpdateMetrics()
    torch.manual_seed(derive(run.seed, step, "dropout"))
    trained = network = 0
    with roles.training():
        for i, rows in enumerate(
            minibatches(batch, run.epochs, run.minibatches, derive(run.seed, step, "minibatches"))
        ):
            scale = loss_scale(select(batch, rows), run.generation.max_tokens)
            live = rows[~inert_B[rows]]
            share = int(batch.loss_mask[live].sum()) / scale.num_tokens
            for part in roles.forward.micro_batches(batch, live, run.token_budget):
                micro = roles.to_device(select(batch, part))
                loss = algorithm.loss(roles.outputs(micro, algorithm.needs_entropy), micro, scale)
                loss.total.backward()
                roles.check_gradients()
                metrics.add(loss.metrics, share)
                trained += roles.forward.real_tokens(micro)
                network += roles.forward.network_tokens(micro)
            rate = learning_rate(run.trainer, step * run.updates_per_step + i, run.steps * run.updates_per_step)
            metrics.add_update(policy__grad_norm=optimizer.update(rate), policy__lr=rate)
    return metrics.mean() | {"tokens/trained": trained, "waste/padding_fraction": (network - trained) / max(1, network)}


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


def loss_scale(minibatch: Batch, max_completion_tokens: int) -> LossScale:
    """Sizes of the whole optimizer batch; rows that are never forwarded count too."""
    return LossScale(
        num_tokens=int(minibatch.loss_mask.sum()),
        num_sequences=len(minibatch.rewards),
        max_completion_tokens=max_completion_tokens,
    )
