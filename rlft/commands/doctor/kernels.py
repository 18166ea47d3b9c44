"""The row about kernels: rlft's compared with those of transformers and PEFT, on this device in the run's dtype."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlft.commands.doctor.command import NotReadyError, judged
from rlft.commands.doctor.trial import MachineTrial, with_noise
from rlft.config.model import KernelChoice
from rlft.model.backbone import read_backbone
from rlft.model.kernels.selection import decide
from rlft.model.roles import POLICY, Roles, policy_alone
from rlft.plan.sizes import sizes_of
from rlft.system.device import free_bytes
from rlft.system.terminal import CheckRow, Status
from rlft.types import Batch

ALLOWED_DEVIATIONS = 4.0  # number of standard deviations of the rounding error that are allowed
ROUNDINGS_OF_A_LAYER = 8  # results in sequence: two norms, three products, rotation, attention, two sums
LORA_B_SPREAD = 0.02  # standard deviation of the adapter's B: with 0, as in a new adapter, A would get no gradient
PASSES = 3  # number of passes, of which the first is not timed
TOKENS = 2048  # most tokens of a pass, without padding; plain kernels hold the logits of all of them
PROMPTS, GROUP = 2, 4
MAX_RATIO_TO_PLAIN = 2.0  # of differences from float32, rlft's to those of plain kernels, which round in other orders
FLOAT32 = 4  # bytes of a float32 number
MIN_SPEED = 0.9  # share of plain kernels' speed below which rlft's kernels are reported as slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The results of a forward and backward pass, float32 on the CPU."""

    logprobs: Tensor  # log-probs of the completion tokens, `[tokens]`
    gradients: Mapping[str, Tensor]  # {parameter: gradient} of the adapter
    seconds: float
    are_plain: bool  # whether the kernels were those of transformers and PEFT
    is_packed: bool  # whether rows were packed
    reason: str  # why the kernels were plain, or else why rows were packed or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The differences between two passes, or the largest that are allowed."""

    logprobs: float  # largest difference between log-probs, in nats
    mean: float  # mean difference between log-probs, in nats
    gradients: float  # largest norm of the difference between two gradients, as a share of the expected one's norm
    where: str = ""  # name of the parameter whose gradients differ most; "" in bounds


def kernel_rows(trial: MachineTrial) -> list[CheckRow]:
    settings = trial.config.model
    known = decide(settings.kernels, trial.config_of_model.model_type)
    if settings.kernels is KernelChoice.plain:
        raise NotReadyError("model.kernels=plain: there is nothing to compare")
    if known.choice is KernelChoice.plain:
        return [CheckRow("kernels", Status.skipped, f"are plain: {known.reason}", "use model.kernels=plain")]
    batch = random_batch(trial)
    rlft_pass = measured_pass(trial, KernelChoice.auto, batch)
    if rlft_pass.are_plain or (sizes_of(settings, trial.config.lora).packed and not rlft_pass.is_packed):
        # They were tried on this model, and disagreed.
        return [CheckRow("kernels", Status.wrong, rlft_pass.reason, "use model.kernels=plain")]
    plain_pass = measured_pass(trial, KernelChoice.plain, batch)
    speed = plain_pass.seconds / rlft_pass.seconds
    config = trial.config_of_model.get_text_config()
    bound = rounding(torch.float32, config.num_hidden_layers, config.hidden_size)
    parameters = sizes_of(settings, None).parameters
    # of the weights in float32, with as much again for a pass
    has_room = settings.quantization is None and 2 * FLOAT32 * parameters <= free_bytes(trial.device)
    if trial.dtype.itemsize >= FLOAT32 or not has_room:
        bound = rounding(trial.dtype, config.num_hidden_layers, config.hidden_size)
        bounds = Differences(logprobs=bound, mean=bound, gradients=bound)
        return [kernel_row(differences(rlft_pass, plain_pass), speed, bounds)]
    exact_pass = measured_pass(trial, KernelChoice.plain, batch, dtype="float32")
    bounds = bounds_of(differences(plain_pass, exact_pass), bound)
    return [kernel_row(differences(rlft_pass, exact_pass), speed, bounds)]


def bounds_of(plain: Differences, least: float) -> Differences:
    """The bounds for rlft's kernels in 16 bits, none of them below `least`.

    `plain` are the differences of plain kernels in 16 bits from plain kernels in float32.
    """
    logprobs, mean, gradients = (
        max(least, MAX_RATIO_TO_PLAIN * difference) for difference in (plain.logprobs, plain.mean, plain.gradients)
    )
    return Differences(logprobs=logprobs, mean=mean, gradients=gradients)


def kernel_row(measured: Differences, speed: float, bound: Differences) -> CheckRow:
    """Whether rlft's kernels compute the same as plain ones within bounds, and `speed` times as fast."""
    value = (
        f"log-probs differ by up to {measured.logprobs:.1e} nats, {measured.mean:.1e} in the mean, gradients by "
        f"{measured.gradients:.1e} of their norm "
        f"(bounds {bound.logprobs:.1e}, {bound.mean:.1e}, {bound.gradients:.1e}); {speed:.2f} times as fast as plain"
    )
    numbers = {
        "logprobs_nats": measured.logprobs,
        "logprobs_bound_nats": bound.logprobs,
        "mean_nats": measured.mean,
        "mean_bound_nats": bound.mean,
        "gradients_share": measured.gradients,
        "gradients_bound_share": bound.gradients,
        "speed": speed,
    }
    is_within = measured.logprobs <= bound.logprobs and measured.mean <= bound.mean
    wrong = not (is_within and measured.gradients <= bound.gradients)
    remedy = f"use model.kernels=plain and report it (worst: {measured.where})" if wrong else "use model.kernels=plain"
    return judged("kernels", value, remedy, numbers, wrong=wrong, slow=speed < MIN_SPEED)


def rounding(dtype: torch.dtype, layers: int, width: int) -> float:
    """A bound on the relative difference between two ways to compute the same network in this dtype.

    Every result is rounded, by at most u, half of the dtype's eps. Sums over `width` products are kept in float32, with
    an error of about sqrt(width) times its u. Rounding errors are independent, so that R of them in sequence add up to
    sqrt(R) times one. The forward and backward of a layer have 2 x ROUNDINGS_OF_A_LAYER of them. ALLOWED_DEVIATIONS
    times that sum is allowed.
    """
    u = torch.finfo(dtype).eps / 2
    accumulated = math.sqrt(width) * torch.finfo(torch.float32).eps / 2
    return ALLOWED_DEVIATIONS * math.sqrt(2 * ROUNDINGS_OF_A_LAYER * layers) * (u + accumulated)


def differences(measured: Pass, expected: Pass) -> Differences:
    """The differences of a pass from the expected one; NaN counts as infinite."""
    worst, where = 0.0, "log-probs"
    for name, gradient in expected.gradients.items():
        share = finite((measured.gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-30))
        if share > worst:
            worst, where = share, name
    distances = (measured.logprobs - expected.logprobs).abs()
    return Differences(logprobs=finite(distances.max()), mean=finite(distances.mean()), gradients=worst, where=where)


def finite(value: Tensor) -> float:
    return value.item() if bool(value.isfinite()) else math.inf


def measured_pass(trial: MachineTrial, kernels: KernelChoice, batch: Batch, dtype: str | None = None) -> Pass:
    """A pass of the model, which is loaded for it and released afterwards; `dtype` None is that of the run."""
    config = trial.config
    settings = replace(config.model, kernels=kernels, gradient_checkpointing=False, dtype=dtype or config.model.dtype)
    backbone = read_backbone(settings)
    assert config.lora is not None, "the command refuses lora=null"
    roles = policy_alone(backbone, replace(config.lora, dropout=0.0), token_budget=TOKENS, seed=config.seed)
    roles.restore_role(POLICY, with_noise(roles.weights(POLICY), LORA_B_SPREAD))
    decision, seconds, logprobs = backbone.kernels.decision, [], torch.empty(0)
    for _ in range(PASSES):
        start = time.perf_counter()
        logprobs = one_pass(roles, batch)
        seconds.append(time.perf_counter() - start)
    gradients = {name: p.grad.float().cpu() for name, p in roles.named_parameters() if p.grad is not None}
    result = Pass(
        logprobs=logprobs,
        gradients=gradients,
        seconds=min(seconds[1:]),
        are_plain=backbone.kernels.are_plain,
        is_packed=roles.forward.packed,
        reason=f"are plain: {decision.reason}" if backbone.kernels.are_plain else roles.forward.reason,
    )
    roles.close()
    del roles, backbone
    gc.collect()
    if trial.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def one_pass(roles: Roles, batch: Batch) -> Tensor:
    """Log-probs of the completion tokens; leaves the gradients of their mean on the parameters."""
    for _, parameter in roles.named_parameters():
        parameter.grad = None
    logprobs_BT = torch.zeros_like(batch.sampled_logprobs)
    total = int(batch.loss_mask.sum())
    for part, micro in roles.forward.parts(batch, TOKENS):
        logprobs = roles.outputs(micro.batch, entropy=False, layout=micro.layout).logprobs
        (logprobs.sum() / total).backward()
        logprobs_BT[part] = logprobs.detach().float().cpu()
    return logprobs_BT[batch.loss_mask]


def random_batch(trial: MachineTrial) -> Batch:
    """Groups of random tokens: with the trial's lengths, but at most TOKENS tokens per group."""
    work = trial.work
    prompt, completion = min(work.prompt_tokens, TOKENS // 4), min(work.completion_tokens, TOKENS // 8)
    rng, rows = torch.Generator().manual_seed(0), PROMPTS * GROUP
    vocabulary = trial.config_of_model.get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (PROMPTS, prompt), generator=rng).repeat_interleave(GROUP, 0)
    completions = torch.randint(vocabulary, (rows, completion), generator=rng)
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
