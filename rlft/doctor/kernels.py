"""The row about kernels: rlft's against those of transformers and PEFT, on this device and in the run's dtype."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlft.batch import select
from rlft.doctor.engine import with_noise
from rlft.doctor.row import NotReadyError, Row, Status, judged
from rlft.doctor.trial import Trial
from rlft.loop.base_loading import free_bytes
from rlft.model.backbone import read_backbone
from rlft.model.config import KernelChoice
from rlft.model.kernels.selection import decide
from rlft.model.roles import POLICY, Roles, policy_alone
from rlft.planning.memory_demand import sizes_of
from rlft.types import Batch

TIMES = 4.0
"""How many standard deviations of rounding are allowed."""
ROUNDINGS_OF_A_LAYER = 8
"""Results that a layer rounds one after the other: two norms, three products, rotation, attention, two sums."""
SPREAD = 0.02
"""Standard deviation of the adapter's B: a fresh one is 0, and its A would get no gradient."""
PASSES = 3
"""The first one is not timed."""
TOKENS = 2048
"""Of a pass without padding; plain kernels hold logits of all of them."""
PROMPTS, GROUP = 2, 4
TIMES_PLAIN = 2.0
"""How much farther than plain kernels rlft's may be from float32: both round, each in its own order."""
FLOAT32 = 4
LEAST_SPEED = 0.9
"""Of plain kernels' speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward and backward: log-probs `[tokens]`, the adapter's gradients by name, float32 on the CPU, and seconds.

    reason: why these kernels were chosen. layout: how rows were laid out, and why.
    """

    logprobs: Tensor
    gradients: Mapping[str, Tensor]
    seconds: float
    are_plain: bool
    reason: str
    is_packed: bool
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Of two passes: the largest and the mean of log-probs (nats), and of gradients' norms (a share of the plain ones).

    where: the name of the gradient that differs most.
    """

    logprobs: float
    mean: float
    gradients: float
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of these differences."""

    logprobs: float
    mean: float
    gradients: float


def kernel_rows(trial: Trial) -> list[Row]:
    settings = trial.config.model
    if settings.kernels is KernelChoice.plain:
        raise NotReadyError("model.kernels=plain: there is nothing to compare")
    batch = random_batch(trial)
    ours = measured_pass(trial, KernelChoice.auto, batch)
    if ours.are_plain:
        known = decide(settings.kernels, trial.config_of_model.model_type).choice is KernelChoice.plain
        status = Status.skipped if known else Status.wrong  # wrong: they were tried on this model and disagreed
        return [Row(name="kernels", status=status, value=f"are plain: {ours.reason}", remedy="use model.kernels=plain")]
    if sizes_of(settings, trial.config.lora).packed and not ours.is_packed:
        return [Row(name="kernels", status=Status.wrong, value=ours.layout, remedy="use model.kernels=plain")]
    plain = measured_pass(trial, KernelChoice.plain, batch)
    speed = plain.seconds / ours.seconds
    config = trial.config_of_model.get_text_config()
    bound = rounding(torch.float32, config.num_hidden_layers, config.hidden_size)
    if trial.dtype.itemsize >= FLOAT32 or not has_room_for_exact(trial):
        bound = rounding(trial.dtype, config.num_hidden_layers, config.hidden_size)
        return [kernel_row(differences(ours, plain), speed, Bounds(logprobs=bound, mean=bound, gradients=bound))]
    exact = measured_pass(trial, KernelChoice.plain, batch, dtype="float32")
    return [kernel_row(differences(ours, exact), speed, bounds_of(differences(plain, exact), bound))]


def bounds_of(plain: Differences, least: float) -> Bounds:
    """What 16 bits may do: TIMES_PLAIN what they do to plain kernels, by float32 ones, but not less than `least`."""
    allowed = (max(least, TIMES_PLAIN * lost) for lost in (plain.logprobs, plain.mean, plain.gradients))
    return Bounds(**dict(zip(("logprobs", "mean", "gradients"), allowed, strict=True)))


def has_room_for_exact(trial: Trial) -> bool:
    """Whether the same weights can be loaded in float32, with as much again for a pass."""
    model = trial.config.model
    parameters = sizes_of(model, None).parameters
    return model.quantization is None and 2 * FLOAT32 * parameters <= free_bytes(trial.device)


def kernel_row(found: Differences, speed: float, bound: Bounds) -> Row:
    """Whether rlft's kernels compute what plain ones do, and sooner.

    Args:
        found: the differences.
        speed: seconds of a plain pass / seconds of ours.
        bound: of these differences.
    """
    value = (
        f"log-probs differ by up to {found.logprobs:.1e} nats, {found.mean:.1e} in the mean, gradients by "
        f"{found.gradients:.1e} of their norm (bounds {bound.logprobs:.1e}, {bound.mean:.1e}, {bound.gradients:.1e}); "
        f"{speed:.2f} times as fast as plain"
    )
    numbers = {
        "logprobs_nats": found.logprobs,
        "logprobs_bound_nats": bound.logprobs,
        "mean_nats": found.mean,
        "mean_bound_nats": bound.mean,
        "gradients_share": found.gradients,
        "gradients_bound_share": bound.gradients,
        "speed": speed,
    }
    wrong = not (found.logprobs <= bound.logprobs and found.mean <= bound.mean and found.gradients <= bound.gradients)
    remedy = f"use model.kernels=plain and report it (worst: {found.where})" if wrong else "use model.kernels=plain"
    return judged("kernels", value, remedy, numbers, wrong=wrong, slow=speed < LEAST_SPEED)


def rounding(dtype: torch.dtype, layers: int, width: int) -> float:
    """A bound of the relative difference of two ways to compute the same network in this dtype.

    Every result is rounded, by at most u, half of the dtype's eps; sums over `width` products are kept in float32 and
    are off by about sqrt(width) of its u. Roundings are independent: R of them in a row add up to sqrt(R) as much. A
    forward and a backward of each layer have 2 x ROUNDINGS_OF_A_LAYER. TIMES that spread is allowed.
    """
    u = torch.finfo(dtype).eps / 2
    accumulated = math.sqrt(width) * torch.finfo(torch.float32).eps / 2
    return TIMES * math.sqrt(2 * ROUNDINGS_OF_A_LAYER * layers) * (u + accumulated)


def differences(ours: Pass, plain: Pass) -> Differences:
    """The largest differences; a NaN counts as infinite."""
    worst, where = 0.0, "log-probs"
    for name, gradient in plain.gradients.items():
        share = finite((ours.gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-30))
        if share > worst:
            worst, where = share, name
    off = (ours.logprobs - plain.logprobs).abs()
    return Differences(logprobs=finite(off.max()), mean=finite(off.mean()), gradients=worst, where=where)


def finite(value: Tensor) -> float:
    return value.item() if bool(value.isfinite()) else math.inf


def measured_pass(trial: Trial, kernels: KernelChoice, batch: Batch, dtype: str | None = None) -> Pass:
    """Loads the model with these kernels, and lets go of it afterwards. dtype: None for that of the run."""
    config = trial.config
    settings = replace(config.model, kernels=kernels, gradient_checkpointing=False, dtype=dtype or config.model.dtype)
    backbone = read_backbone(settings)
    roles = policy_alone(backbone, replace(config.lora, dropout=0.0), token_budget=TOKENS, seed=config.seed)
    roles.restore_role(POLICY, with_noise(roles.weights(POLICY), SPREAD))
    seconds, logprobs = [], torch.empty(0)
    for _ in range(PASSES):
        start = time.perf_counter()
        logprobs = one_pass(roles, batch)
        seconds.append(time.perf_counter() - start)
    gradients = {name: p.grad.float().cpu() for name, p in roles.named_parameters() if p.grad is not None}
    made = Pass(
        logprobs=logprobs,
        gradients=gradients,
        seconds=min(seconds[1:]),
        are_plain=backbone.kernels.are_plain,
        reason=backbone.kernels.decision.reason,
        is_packed=roles.forward.packed,
        layout=roles.forward.reason,
    )
    roles.close()
    del roles, backbone
    gc.collect()
    if trial.device.type == "cuda":
        torch.cuda.empty_cache()
    return made


def one_pass(roles: Roles, batch: Batch) -> Tensor:
    """Log-probs of the completion tokens; the gradients of their mean are left on the parameters."""
    for _, parameter in roles.named_parameters():
        parameter.grad = None
    logprobs_BT = torch.zeros_like(batch.sampled_logprobs)
    total = int(batch.loss_mask.sum())
    for part in roles.forward.micro_batches(batch, torch.arange(len(batch.rewards)), TOKENS):
        micro = roles.to_device(select(batch, part))
        logprobs = roles.outputs(micro, entropy=False).logprobs
        (logprobs.sum() / total).backward()
        logprobs_BT[part] = logprobs.detach().float().cpu()
    return logprobs_BT[batch.loss_mask]


def random_batch(trial: Trial) -> Batch:
    """Groups of random tokens, as long as the trial's, but at most TOKENS in a row."""
    work = trial.work
    prompt, completion = min(work.prompt_tokens, TOKENS // 4), min(work.completion_tokens, TOKENS // 8)
    dice, rows = torch.Generator().manual_seed(0), PROMPTS * GROUP
    vocabulary = trial.config_of_model.get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (PROMPTS, prompt), generator=dice).repeat_interleave(GROUP, 0)
    completions = torch.randint(vocabulary, (rows, completion), generator=dice)
    loss_mask = torch.zeros(rows, prompt + completion, dtype=torch.bool)
    loss_mask[:, prompt:] = True
    return Batch(
        token_ids=torch.cat([prompts, completions], 1),
        attention_mask=torch.ones_like(loss_mask),
        loss_mask=loss_mask,
        sampled_logprobs=torch.zeros(rows, prompt + completion),
        rewards=torch.zeros(rows),
        group_ids=torch.arange(PROMPTS).repeat_interleave(GROUP),
    )
