"""Rows about speed and memory of the trial's steps. Each verdict is a function of measured numbers."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlft.commands.doctor.arithmetic import Shape, step_flops
from rlft.commands.doctor.row import CheckRow, judged
from rlft.commands.doctor.trial import MachineTrial
from rlft.generation.adapter_files import memory_folder
from rlft.generation.memory import peak
from rlft.model.activations import is_checkpointed
from rlft.plan.fit import in_words
from rlft.plan.memory_parts import parts
from rlft.plan.sizes import on_a_gpu, sizes_of

MAX_SAMPLING_RATIO = 20.0
"""Sampling may take this many times as long as the update."""
MIN_SHARE = {"cpu": 0.05, "cuda": 0.2}
"""{kind of device: lowest share of the product rate that an update should reach}; not measured on a GPU yet."""
MAX_PUBLISH_SHARE, MIN_PUBLISH_S = 0.1, 1.0
"""The share of a step that a publish may take; one of at most MIN_PUBLISH_S seconds is always fine."""
MAX_PLAN_ERROR = 0.15
"""Largest allowed relative difference between the planned and the measured peak."""


def step_rows(trial: MachineTrial) -> list[CheckRow]:
    """The rows of sampling, update and publish in the trial's steps."""
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
    """The speed of sampling.

    Args:
        tokens: number of sampled tokens.
        seconds: seconds that sampling took.
        update_s: seconds that the update on them took.
        engine: name of the engine.
    """
    ratio = seconds / update_s
    value = f"{tokens / seconds:,.0f} tokens/s by {engine}; {ratio:.1f} times as long as the update on them"
    numbers = {"tokens_per_s": tokens / seconds, "seconds": seconds, "times_the_update": ratio}
    remedy = "on a GPU use generation=vllm without enforce_eager; on a CPU look at what else runs"
    return judged("sampling", value, remedy, numbers, wrong=False, slow=ratio > MAX_SAMPLING_RATIO)


def update_row(tokens: int, seconds: float, flops: float, rate: float, least_share: float) -> CheckRow:
    """Tokens/s, and the share of the machine's arithmetic that the update reaches.

    Args:
        tokens: number of tokens that entered the network.
        seconds: seconds that credit and update took.
        flops: number of floating-point operations that they need.
        rate: FLOP/s of a large product in the same dtype.
        least_share: share of the rate below which the update is slow.
    """
    share = flops / seconds / rate
    value = f"{tokens / seconds:,.0f} tokens/s, {share:.0%} of {rate / 1e9:,.0f} GFLOP/s, the rate of a large product"
    numbers = {"tokens_per_s": tokens / seconds, "seconds": seconds, "share": share, "product_flops_per_s": rate}
    remedy = "look at what else runs here, at model.kernels (row kernels), and raise token_budget"
    return judged("update", value, remedy, numbers, wrong=False, slow=share < least_share)


def publish_row(seconds: float, step_s: float) -> CheckRow:
    """The time of a publish.

    Args:
        seconds: seconds that a publish took, with its freshness check.
        step_s: seconds of the whole step.
    """
    share = seconds / step_s
    value = f"{1000 * seconds:.0f} ms with the freshness check, {share:.0%} of the step"
    remedy = f"make room in memory for adapters (now {memory_folder()}), or lower lora.rank"
    slow = seconds > MIN_PUBLISH_S and share > MAX_PUBLISH_SHARE
    return judged("publish", value, remedy, {"seconds": seconds, "share": share}, wrong=False, slow=slow)


def memory_rows(trial: MachineTrial) -> list[CheckRow]:
    """The trial's peak compared with that of `rlft plan`: on a CPU the process's, on a GPU the allocator's."""
    model = sizes_of(trial.config.model, trial.config.lora)
    recompute = is_checkpointed(trial.session.backbone.model)
    demand = trial.plan.demand(model, recompute)
    process = trial.process
    if trial.device.type == "cuda":
        total = torch.cuda.get_device_properties(trial.device).total_memory
        demand, process = on_a_gpu(demand, trial.plan, total, absent=False), 0
    return [memory_row(peak(parts(model, demand, process)), trial.measured.peak)]


def memory_row(planned: int, measured: int) -> CheckRow:
    """Whether the planned peak of `rlft plan` is close to the measured one, both in bytes."""
    ratio = planned / measured
    value = f"planned {in_words(planned)}, measured {in_words(measured)} ({ratio:.2f} of it)"
    numbers = {"planned_bytes": planned, "measured_bytes": measured, "ratio": ratio}
    remedy = "do not rely on rlft plan here: leave room, lower token_budget, and report these numbers"
    return judged("memory plan", value, remedy, numbers, wrong=abs(ratio - 1) > MAX_PLAN_ERROR)
