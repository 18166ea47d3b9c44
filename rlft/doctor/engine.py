"""Rows about the engine: it starts, its log-probs are the trainer's, and an adapter that is published takes effect."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlft.doctor.row import Row, Status, judged
from rlft.doctor.trial import Trial
from rlft.loop.freshness import flatten, largest_gap
from rlft.model.roles import POLICY
from rlft.types import Adapter, Generator

SCORED_SEQUENCES, SCORED_TOKENS = 4, 64
FIRST_SPREAD = 0.01
"""Standard deviation of what is added to an adapter's B first; it is doubled until log-probs move enough."""
MAX_DOUBLINGS = 12
LEAST_MOVE = 0.1
"""Nats by which the moved adapter must change a log-prob, or twice the threshold if that is more."""


def model_rows(trial: Trial) -> list[Row]:
    """Makes or reads the model's config, and plans the trial."""
    plan, work = trial.plan, trial.work
    made = trial.settings.makes_model
    what = "made here with random weights" if made else trial.settings.plain["model"]["path"]
    dtype = str(trial.dtype).removeprefix("torch.")
    shape = f"{work.prompts} prompts x {work.group}, {work.prompt_tokens}+{work.completion_tokens} tokens"
    value = f"{what}, {dtype} on {trial.device}; {shape}; engine {plan.engine} ({plan.engine_reason})"
    numbers = {"prompts": work.prompts, "group": work.group, "prompt_tokens": work.prompt_tokens}
    numbers["completion_tokens"] = work.completion_tokens
    return [Row(name="model", status=Status.ok, value=value, numbers=numbers)]


def engine_rows(trial: Trial) -> list[Row]:
    """Loads the model, starts the engine, and has it take the first adapter."""
    start = time.monotonic()
    trial.start()
    trial.publish()
    seconds = time.monotonic() - start
    value = f"{trial.plan.engine} started and took an adapter in {seconds:.1f} s"
    return [Row(name="engine", status=Status.ok, value=value, numbers={"seconds": seconds})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Differences of log-probs in nats: mean and largest."""

    mean: float
    largest: float

    @classmethod
    def between(cls, one: Sequence[float], other: Sequence[float]) -> Gap:
        largest = largest_gap(one, other)[0]
        return cls(mean=sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one), largest=largest)


def gap_rows(trial: Trial) -> list[Row]:
    """The log-prob gap of fixed tokens, as the freshness check scores them, and of sampled ones."""
    session = trial.session
    sequences = fixed_sequences(trial)
    fixed = Gap.between(flatten(session.generator.score(sequences)), flatten(session.trainer.score(sequences)))
    batch = trial.collated(session.sample(0))
    logprobs = trial.roles.logprobs(batch, POLICY)[batch.loss_mask]
    sampled = Gap.between(batch.sampled_logprobs[batch.loss_mask].tolist(), logprobs.tolist())
    alarms = trial.config.alarms
    return [gap_row(fixed, sampled, session.freshness.threshold, None if alarms is None else alarms.logprob_gap)]


def gap_row(fixed: Gap, sampled: Gap, threshold: float, alarm: float | None) -> Row:
    """Whether a run with this gap would be stopped by its freshness check, or raise an alarm.

    Args:
        fixed: of tokens as the freshness check scores them.
        sampled: of sampled tokens.
        threshold: the largest gap that the freshness check allows, nats.
        alarm: the mean gap of sampled tokens that raises an alarm, nats; None if there is none.
    """
    value = (
        f"fixed tokens: mean {fixed.mean:.1e}, largest {fixed.largest:.1e} (a run stops above {threshold:g}); "
        f"sampled ones: mean {sampled.mean:.1e}, largest {sampled.largest:.1e} nats"
    )
    numbers = {
        "fixed_mean_nats": fixed.mean,
        "fixed_max_nats": fixed.largest,
        "sampled_mean_nats": sampled.mean,
        "sampled_max_nats": sampled.largest,
        "threshold_nats": threshold,
    }
    stale = not fixed.largest <= threshold  # NaN is wrong
    off = not sampled.mean <= (threshold if alarm is None else min(alarm, threshold))
    remedy = "compare with generation=transformers and with model.dtype=float32: one of them names the part that is off"
    return judged("log-prob gap", value, remedy, numbers, wrong=stale or off)


class Adapters(Protocol):
    """The part of `Roles` that the swap needs."""

    def weights(self, role: str) -> dict[str, Tensor]: ...
    def restore_role(self, role: str, weights: Mapping[str, Tensor]) -> None: ...
    def publish(self, version: int) -> Adapter: ...
    def score(self, sequences: list[list[int]]) -> list[list[float]]: ...


def swap_rows(trial: Trial) -> list[Row]:
    session = trial.session
    return [swap_row(session.generator, trial.roles, fixed_sequences(trial), session.freshness.threshold)]


def swap_row(generator: Generator, adapters: Adapters, sequences: list[list[int]], threshold: float) -> Row:
    """Publishes an adapter that says something else, then the first one again; leaves the policy as it was.

    The other adapter is at least two thresholds away, and each time the engine's log-probs must be within one of the
    trainer's: an engine that has stayed behind is not.
    """
    own = adapters.weights(POLICY)
    before = flatten(adapters.score(sequences))
    try:
        after = _moved(adapters, own, sequences, before, max(LEAST_MOVE, 2 * threshold))
        generator.load(adapters.publish(10**6))
        there = Gap.between(flatten(generator.score(sequences)), after)
    finally:
        adapters.restore_role(POLICY, own)
    generator.load(adapters.publish(10**6 + 1))
    back = Gap.between(flatten(generator.score(sequences)), before)
    move = largest_gap(before, after)[0]
    value = (
        f"moved by up to {move:.1e} nats the engine follows to {there.largest:.1e}, and back to {back.largest:.1e}"
        f" (allowed {threshold:g})"
    )
    numbers = {"move_nats": move, "gap_nats": there.largest, "gap_back_nats": back.largest, "threshold_nats": threshold}
    wrong = not (there.largest <= threshold and back.largest <= threshold)
    remedy = "the engine samples from a stale adapter: use generation=transformers, or another version of the engine"
    return judged("adapter swap", value, remedy, numbers, wrong=wrong)


def _moved(
    adapters: Adapters, own: Mapping[str, Tensor], sequences: list[list[int]], before: Sequence[float], least: float
) -> list[float]:
    """The trainer's log-probs by an adapter that differs from `own` in B, and by at least so many nats.

    Raises:
        RuntimeError: no adapter changes them by as much.
    """
    spread = FIRST_SPREAD
    for _ in range(MAX_DOUBLINGS):
        adapters.restore_role(POLICY, with_noise(own, spread))
        after = flatten(adapters.score(sequences))
        if largest_gap(before, after)[0] >= least:
            return after
        spread *= 2
    raise RuntimeError(f"the adapter has no effect in the trainer: no log-prob moves by {least:g} nats")


def with_noise(weights: Mapping[str, Tensor], spread: float) -> dict[str, Tensor]:
    """The adapter with normal noise of this standard deviation added to every B, always the same one."""
    dice, noisy = torch.Generator().manual_seed(1), dict(weights)
    for name, tensor in weights.items():
        if ".lora_B" in name:
            noise: Any = torch.randn(tensor.shape, generator=dice)
            noisy[name] = tensor + spread * noise.to(tensor)
    return noisy


def fixed_sequences(trial: Trial) -> list[list[int]]:
    """The first tokens of a few prompts."""
    prompts = trial.plan.train_prompts.prompts[:SCORED_SEQUENCES]
    return [list(prompt.token_ids[:SCORED_TOKENS]) for prompt in prompts]
