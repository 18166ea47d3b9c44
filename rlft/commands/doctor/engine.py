"""Rows about the engine: it starts, its log-probs equal the trainer's, and a published adapter takes effect."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlft.commands.doctor.row import CheckRow, Status, judged
from rlft.commands.doctor.trial import MachineTrial
from rlft.generation.engine import Generator
from rlft.loop.freshness import Gap, Limits, flatten
from rlft.model.roles import POLICY
from rlft.types import Adapter

SCORED_SEQUENCES, SCORED_TOKENS = 4, 64
FIRST_SPREAD = 0.01
"""Standard deviation of the first noise added to an adapter's B; it is doubled until log-probs move enough."""
MAX_DOUBLINGS = 12
MIN_MOVE = 0.1
"""Nats by which the changed adapter must move a log-prob, besides twice the threshold of the freshness check."""


def model_rows(trial: MachineTrial) -> list[CheckRow]:
    """Makes or reads the model's config, and plans the trial."""
    plan, work = trial.plan, trial.work
    makes_model = trial.settings.makes_model
    model = "made here with random weights" if makes_model else trial.settings.plain["model"]["path"]
    dtype = str(trial.dtype).removeprefix("torch.")
    shape = f"{work.prompts} prompts x {work.group}, {work.prompt_tokens}+{work.completion_tokens} tokens"
    value = f"{model}, {dtype} on {trial.device}; {shape}; engine {plan.engine} ({plan.engine_reason})"
    numbers = {"prompts": work.prompts, "group": work.group, "prompt_tokens": work.prompt_tokens}
    numbers["completion_tokens"] = work.completion_tokens
    return [CheckRow(name="model", status=Status.ok, value=value, numbers=numbers)]


def engine_rows(trial: MachineTrial) -> list[CheckRow]:
    """Loads the model, starts the engine, and has it take the first adapter."""
    start = time.monotonic()
    trial.start()
    trial.publish()
    seconds = time.monotonic() - start
    value = f"{trial.plan.engine} started and took an adapter in {seconds:.1f} s"
    return [CheckRow(name="engine", status=Status.ok, value=value, numbers={"seconds": seconds})]


def gap_rows(trial: MachineTrial) -> list[CheckRow]:
    """The log-prob gap of fixed tokens, as in the freshness check, and that of sampled tokens."""
    session = trial.session
    sequences = fixed_sequences(trial)
    fixed = Gap.between(flatten(session.generator.score(sequences)), flatten(session.trainer.score(sequences)))
    batch = trial.collated(session.sample(0))
    logprobs = trial.roles.logprobs(batch, POLICY)[batch.loss_mask]
    sampled = Gap.between(batch.sampled_logprobs[batch.loss_mask].tolist(), logprobs.tolist())
    alarms = trial.config.alarms
    return [gap_row(fixed, sampled, session.freshness.limits, None if alarms is None else alarms.logprob_gap)]


def gap_row(fixed: Gap, sampled: Gap, threshold: float | Limits, alarm: float | None) -> CheckRow:
    """Whether a run with this gap would be stopped by its freshness check, or raise an alarm.

    Args:
        fixed: gap of fixed tokens, as in the freshness check.
        sampled: gap of sampled tokens.
        threshold: the gap that the freshness check allows; a number is the largest one's, nats.
        alarm: the mean gap of sampled tokens that raises an alarm, nats; None if there is none.
    """
    limits = Limits.of(threshold)
    value = (
        f"fixed tokens: mean {fixed.mean:.1e}, largest {fixed.largest:.1e} (a run stops above {limits}); "
        f"sampled ones: mean {sampled.mean:.1e}, largest {sampled.largest:.1e} nats"
    )
    numbers = {
        "fixed_mean_nats": fixed.mean,
        "fixed_max_nats": fixed.largest,
        "sampled_mean_nats": sampled.mean,
        "sampled_max_nats": sampled.largest,
        "threshold_nats": limits.threshold,
    }
    exceeds_threshold = not limits.allow(fixed)
    would_alarm = not sampled.mean <= (limits.threshold if alarm is None else min(alarm, limits.threshold))
    remedy = "compare with generation=transformers and with model.dtype=float32: one of them names the part that is off"
    return judged("log-prob gap", value, remedy, numbers, wrong=exceeds_threshold or would_alarm)


class Adapters(Protocol):
    """The part of `Roles` that the swap needs."""

    def weights(self, role: str) -> dict[str, Tensor]: ...
    def restore_role(self, role: str, weights: Mapping[str, Tensor]) -> None: ...
    def publish(self, version: int) -> Adapter: ...
    def score(self, sequences: list[list[int]]) -> list[list[float]]: ...


def swap_rows(trial: MachineTrial) -> list[CheckRow]:
    session = trial.session
    return [swap_row(session.generator, trial.roles, fixed_sequences(trial), session.freshness.limits)]


def swap_row(
    generator: Generator, adapters: Adapters, sequences: list[list[int]], threshold: float | Limits
) -> CheckRow:
    """Publishes a changed adapter, then the original one again; leaves the policy as it was.

    The changed adapter moves log-probs by at least two thresholds. After each publish, the engine's log-probs must be
    within one threshold of the trainer's, which those of an engine with the other adapter are not.
    """
    limits = Limits.of(threshold)
    weights = adapters.weights(POLICY)
    logprobs = flatten(adapters.score(sequences))
    try:
        moved_logprobs = _moved_logprobs(adapters, weights, sequences, logprobs, limits)
        generator.load(adapters.publish(10**6))
        gap = Gap.between(flatten(generator.score(sequences)), moved_logprobs)
    finally:
        adapters.restore_role(POLICY, weights)
    generator.load(adapters.publish(10**6 + 1))
    gap_back = Gap.between(flatten(generator.score(sequences)), logprobs)
    move = Gap.between(logprobs, moved_logprobs).largest
    value = (
        f"moved by up to {move:.1e} nats the engine follows to {gap.largest:.1e}, and back to {gap_back.largest:.1e}"
        f" (allowed {limits})"
    )
    numbers = {
        "move_nats": move,
        "gap_nats": gap.largest,
        "gap_back_nats": gap_back.largest,
        "threshold_nats": limits.threshold,
    }
    wrong = not (limits.allow(gap) and limits.allow(gap_back))
    remedy = "the engine samples from a stale adapter: use generation=transformers, or another version of the engine"
    return judged("adapter swap", value, remedy, numbers, wrong=wrong)


def _moved_logprobs(
    adapters: Adapters,
    weights: Mapping[str, Tensor],
    sequences: list[list[int]],
    logprobs: Sequence[float],
    limits: Limits,
) -> list[float]:
    """The trainer's log-probs with an adapter whose B is changed; that adapter stays loaded.

    Args:
        adapters: the roles of the trial.
        weights: weights of the policy.
        sequences: the sequences to score.
        logprobs: the trainer's log-probs with these weights.
        limits: of the freshness check, of which log-probs must move by more than twice.

    Raises:
        RuntimeError: log-probs do not move by that much, or none by MIN_MOVE.
    """
    spread = FIRST_SPREAD
    for _ in range(MAX_DOUBLINGS):
        adapters.restore_role(POLICY, with_noise(weights, spread))
        moved_logprobs = flatten(adapters.score(sequences))
        move = Gap.between(logprobs, moved_logprobs)
        if move.largest >= max(MIN_MOVE, 2 * limits.threshold) and limits.judged(move) >= 2 * limits.threshold:
            return moved_logprobs
        spread *= 2
    raise RuntimeError(
        f"the adapter has no effect in the trainer: no log-prob moves by {max(MIN_MOVE, 2 * limits.threshold):g} nats"
    )


def with_noise(weights: Mapping[str, Tensor], spread: float) -> dict[str, Tensor]:
    """The adapter with normal noise of standard deviation `spread` added to every B; the noise is always the same."""
    rng, noisy = torch.Generator().manual_seed(1), dict(weights)
    for name, tensor in weights.items():
        if ".lora_B" in name:
            noise: Any = torch.randn(tensor.shape, generator=rng)
            noisy[name] = tensor + spread * noise.to(tensor)
    return noisy


def fixed_sequences(trial: MachineTrial) -> list[list[int]]:
    """The first tokens of a few prompts, which are always the same."""
    prompts = trial.plan.train_prompts.prompts[:SCORED_SEQUENCES]
    return [list(prompt.token_ids[:SCORED_TOKENS]) for prompt in prompts]
