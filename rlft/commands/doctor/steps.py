"""Rows about the trial's run: its engine follows the trainer, its steps are fast, its memory is what was planned.

Each verdict is a function of measured numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlft.commands.doctor.supervise import judged
from rlft.commands.doctor.trial import MachineTrial
from rlft.commands.doctor.work import Shape, step_flops
from rlft.config.schema import AUTO
from rlft.generation.adapter_files import memory_folder
from rlft.generation.engine import Generator
from rlft.generation.memory import peak
from rlft.loop.freshness import Gap, Limits, flatten
from rlft.model.activations import is_checkpointed
from rlft.model.roles import POLICY, Roles
from rlft.plan.fit import in_words
from rlft.plan.memory_parts import OF_THE_MARGIN, OF_THE_PROCESS, parts
from rlft.plan.sizes import on_a_gpu, sizes_of
from rlft.system.check_rows import CheckRow, Status
from rlft.system.device import has_own_memory, total_bytes

SCORED_SEQUENCES, SCORED_TOKENS = 4, 64
FIRST_SPREAD = 0.01
"""Standard deviation of the first noise added to an adapter's B; it is doubled until log-probs move enough."""
MAX_DOUBLINGS = 12
MIN_MOVE = 0.1
"""Nats by which the changed adapter must move a log-prob, besides twice the threshold of the freshness check."""
MAX_SAMPLING_RATIO = 20.0
"""Sampling may take this many times as long as the update."""
MIN_SHARE = {"cpu": 0.05, "cuda": 0.2}
"""{kind of device: lowest share of the product rate that an update should reach}; 0.5B on an H100 reaches 0.2."""
MAX_PUBLISH_SHARE, MIN_PUBLISH_S = 0.1, 1.0
"""The share of a step that a publish may take; one of at most MIN_PUBLISH_S seconds is always fine."""
MAX_PLAN_ERROR = 0.15
"""Largest allowed relative difference between the planned and the measured peak."""


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
    return [CheckRow("model", Status.ok, value, numbers=numbers)]


def engine_rows(trial: MachineTrial) -> list[CheckRow]:
    """Loads the model, starts the engine, and has it take the first adapter."""
    start = time.monotonic()
    trial.start()
    trial.publish()
    seconds = time.monotonic() - start
    value = f"{trial.plan.engine} started and took an adapter in {seconds:.1f} s"
    return [CheckRow("engine", Status.ok, value, numbers={"seconds": seconds})]


def gap_rows(trial: MachineTrial) -> list[CheckRow]:
    """The log-prob gap of fixed tokens, as in the freshness check, and that of sampled tokens."""
    session = trial.session
    sequences = fixed_sequences(trial)
    expected, freshness = flatten(session.trainer.score(sequences)), session.freshness
    fixed = Gap.between(flatten(session.generator.score(sequences)), expected)
    if not freshness.limits.allow(fixed):
        freshness.measure_roundings(session.trainer, expected)
    batch = trial.collated(session.sample(0))
    logprobs = trial.roles.logprobs(batch, POLICY)[batch.loss_mask]
    sampled = Gap.between(batch.sampled_logprobs[batch.loss_mask].tolist(), logprobs.tolist())
    alarms = trial.config.alarms
    return [gap_row(fixed, sampled, freshness.model_limits, None if alarms is None else alarms.logprob_gap)]


def gap_row(fixed: Gap, sampled: Gap, limits: Limits, alarm: float | None) -> CheckRow:
    """Whether a run with these gaps, in nats, would be stopped by its freshness check, or raise an alarm.

    `limits` are what that check allows the fixed tokens, `alarm` is the mean gap of sampled ones that raises an alarm.
    """
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


def swap_rows(trial: MachineTrial) -> list[CheckRow]:
    session = trial.session
    return [swap_row(session.generator, trial.roles, fixed_sequences(trial), session.freshness.model_limits)]


def swap_row(generator: Generator, roles: Roles, sequences: list[list[int]], limits: Limits) -> CheckRow:
    """Publishes a changed adapter, then the original one again; leaves the policy as it was.

    The changed adapter moves log-probs by at least two thresholds. After each publish, the engine's log-probs must be
    within one threshold of the trainer's, which those of an engine with the other adapter are not.
    """
    weights = roles.weights(POLICY)
    logprobs = flatten(roles.score(sequences))
    try:
        moved_logprobs = _moved_logprobs(roles, weights, sequences, logprobs, limits)
        generator.load(roles.publish(10**6))
        gap = Gap.between(flatten(generator.score(sequences)), moved_logprobs)
    finally:
        roles.restore_role(POLICY, weights)
    generator.load(roles.publish(10**6 + 1))
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
    roles: Roles,
    weights: Mapping[str, Tensor],
    sequences: list[list[int]],
    logprobs: Sequence[float],
    limits: Limits,
) -> list[float]:
    """The trainer's log-probs with an adapter whose B is changed; that adapter stays loaded.

    Raises:
        RuntimeError: log-probs do not move by twice the limits of the freshness check, or none by MIN_MOVE.
    """
    spread = FIRST_SPREAD
    for _ in range(MAX_DOUBLINGS):
        roles.restore_role(POLICY, with_noise(weights, spread))
        moved_logprobs = flatten(roles.score(sequences))
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


# -- speed and memory --------------------------------------------------------------------------------------------------
def step_rows(trial: MachineTrial) -> list[CheckRow]:
    measured, roles, work = trial.measured, trial.roles, trial.work
    sample, update, publish = (measured.fastest(stage) for stage in ("sample", "update", "publish"))
    shape = Shape.of_model(trial.session.backbone.model, sizes_of(trial.config.model, trial.config.lora).lora)
    longest = trial.plan.train_prompts.lengths.longest
    flops = step_flops(shape, replace(work, prompt_tokens=longest))
    tokens = measured.prompt_tokens + measured.completion_tokens
    if not roles.forward.packed:
        tokens = work.group * measured.prompt_tokens + measured.completion_tokens
    kind = "cuda" if trial.device.type == "cuda" else "cpu"
    return [
        sampling_row(measured.completion_tokens, sample, update, str(trial.plan.engine)),
        update_row(tokens, update, flops, trial.product_rate, MIN_SHARE[kind]),
        publish_row(publish, sample + update + publish),
    ]


def sampling_row(tokens: int, seconds: float, update_s: float, engine: str) -> CheckRow:
    """The speed of sampling so many tokens, compared with the update on them (`update_s` seconds)."""
    ratio = seconds / update_s
    value = f"{tokens / seconds:,.0f} tokens/s by {engine}; {ratio:.1f} times as long as the update on them"
    numbers = {"tokens_per_s": tokens / seconds, "seconds": seconds, "times_the_update": ratio}
    remedy = "on a GPU use generation=vllm without enforce_eager; on a CPU look at what else runs"
    return judged("sampling", value, remedy, numbers, wrong=False, slow=ratio > MAX_SAMPLING_RATIO)


def update_row(tokens: int, seconds: float, flops: float, rate: float, least_share: float) -> CheckRow:
    """Tokens/s, and the share of the machine's arithmetic that credit and update reach.

    `flops` is the number of floating-point operations that they need, `rate` the FLOP/s of a large product in the same
    dtype, `least_share` the share of it below which the update is slow.
    """
    share = flops / seconds / rate
    value = f"{tokens / seconds:,.0f} tokens/s, {share:.0%} of {rate / 1e9:,.0f} GFLOP/s, the rate of a large product"
    numbers = {"tokens_per_s": tokens / seconds, "seconds": seconds, "share": share, "product_flops_per_s": rate}
    remedy = "look at what else runs here, at model.kernels (row kernels), and raise token_budget"
    return judged("update", value, remedy, numbers, wrong=False, slow=share < least_share)


def publish_row(seconds: float, step_s: float) -> CheckRow:
    """The seconds of a publish with its freshness check, and their share of the step's."""
    share = seconds / step_s
    value = f"{1000 * seconds:.0f} ms with the freshness check, {share:.0%} of the step"
    remedy = f"make room in memory for adapters (now {memory_folder()}), or lower lora.rank"
    slow = seconds > MIN_PUBLISH_S and share > MAX_PUBLISH_SHARE
    return judged("publish", value, remedy, {"seconds": seconds, "share": share}, wrong=False, slow=slow)


def memory_rows(trial: MachineTrial) -> list[CheckRow]:
    """The trial's peak compared with that of `rlft plan`: on a CPU the process's, on a GPU the allocator's."""
    model = sizes_of(trial.config.model, trial.config.lora)
    asked = trial.config.model.gradient_checkpointing
    recompute = is_checkpointed(trial.session.backbone.model) if asked == AUTO else asked
    demand = trial.plan.demand(model, recompute)
    process = trial.process
    if has_own_memory(trial.device):
        total = total_bytes(trial.device)
        demand = on_a_gpu(demand, trial.plan, total, absent=False)
    apart = (OF_THE_PROCESS, OF_THE_MARGIN) if has_own_memory(trial.device) else ()
    counted = [part for part in parts(model, demand, process) if part.name not in apart]
    return [memory_row(peak(counted), trial.measured.peak)]


def memory_row(planned: int, measured: int) -> CheckRow:
    """Whether the planned peak of `rlft plan` is close to the measured one, both in bytes."""
    ratio = planned / measured
    value = f"planned {in_words(planned)}, measured {in_words(measured)} ({ratio:.2f} of it)"
    numbers = {"planned_bytes": planned, "measured_bytes": measured, "ratio": ratio}
    remedy = "do not rely on rlft plan here: leave room, lower token_budget, and report these numbers"
    return judged("memory plan", value, remedy, numbers, wrong=abs(ratio - 1) > MAX_PLAN_ERROR)
