"""Losses, KLs and shares of clipped tokens of a recorded step's updates, as rlft's GRPO computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlft.algorithm.grpo import GRPO, RewardAggregation, Supervision
from rlft.algorithm.objective import CreditSpan
from rlft.algorithm.ops.advantage import Std
from rlft.algorithm.ops.aggregate import Aggregate, aggregate
from rlft.algorithm.ops.kl import KLAnchor, KLController, KLEstimator, KLPlace, kl
from rlft.algorithm.ops.ratio import Mismatch, RatioLevel, ratio
from rlft.algorithm.ops.surrogate import SurrogateKind
from rlft.commands.audit.other_trainers.credit import credited, expected_mask
from rlft.commands.audit.other_trainers.numbers import LONGEST_SUM, UNIT, Compared, one, roundings
from rlft.commands.audit.other_trainers.settings import LossType, Settings
from rlft.commands.audit.other_trainers.steps import Lacking, LoggedUpdate, MicroBatch, Step
from rlft.system.lazy import no_grad, torch
from rlft.types import Batch, LossScale, Outputs

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATES = {
    LossType.grpo: Aggregate.sequence_mean_token_mean,
    LossType.sapo: Aggregate.sequence_mean_token_mean,
    LossType.bnpo: Aggregate.token_mean,
    LossType.dapo: Aggregate.token_mean,
    LossType.cispo: Aggregate.token_mean,
    LossType.dr_grpo: Aggregate.constant,
    LossType.luspo: Aggregate.sequence_mean_token_sum,
}
SURROGATES = {LossType.cispo: SurrogateKind.cispo, LossType.sapo: SurrogateKind.sapo}


def algorithm_of(settings: Settings) -> GRPO:
    """rlft's GRPO with these settings."""
    kind = SURROGATES.get(settings.loss_type, SurrogateKind.clipped)
    is_cispo = kind is SurrogateKind.cispo  # TRL's cap is epsilon_high itself, without a lower end
    return GRPO(
        supervision=Supervision.outcome,
        std=Std.sample,
        eps=settings.eps,
        credit_span=CreditSpan.trajectory,
        reward_aggregation=RewardAggregation(settings.multi_objective_aggregation),
        surrogate=kind,
        ratio=RatioLevel(settings.importance_sampling_level),
        clip_low=1.0 if is_cispo else settings.epsilon,
        clip_high=settings.clip_high - 1 if is_cispo else settings.clip_high,
        dual_clip=settings.delta if kind is SurrogateKind.clipped else None,
        tau_positive=settings.sapo_temperature_pos,
        tau_negative=settings.sapo_temperature_neg,
        aggregate=AGGREGATES[settings.loss_type],
        kl_coef=settings.beta,
        kl_to=KLAnchor.reference,
        kl_in=KLPlace.loss,
        kl_estimator=KLEstimator(settings.kl_estimator),
        kl_controller=KLController.fixed,
        kl_target=None,
        kl_gain=0.1,
        entropy_coef=0.0,
        mismatch=Mismatch.off,
        mismatch_low=0.5,
        mismatch_high=2.0,
        off_policy_limit=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A micro-batch with all that its loss depends on, `[b, T]`, and the number of tokens that divides it."""

    batch: Batch
    logprobs: Tensor
    old: Tensor
    scale: LossScale


def parts(step: Step, update: LoggedUpdate, settings: Settings) -> list[Part]:
    """The micro-batches of an update. Lacking: what is not recorded."""
    if settings.also_in_loss:
        raise Lacking(f"the loss has {', '.join(settings.also_in_loss)}, which are not recorded")
    if update.batches is None:
        raise Lacking("logprobs are not recorded of all completions")
    if step.old is None and not step.old_is_current:
        raise Lacking("old_logprobs are not recorded of all completions")
    if settings.beta and step.reference is None:
        raise Lacking("ref_logprobs are not recorded of all completions, and beta is not 0")
    if settings.beta and settings.kl_estimator == "k3_unbiased" and settings.importance_sampling_level == "sequence":
        raise Lacking("the KL is weighed by the ratios of whole completions")
    if settings.loss_type is LossType.dr_grpo and settings.max_completion_length is None:
        raise Lacking("max_completion_length is not given")
    by_settings = step.mask is None or step.right_mask is not None
    mask = expected_mask(step, settings) if by_settings else step.mask
    assert mask is not None
    advantages_B = step.advantages
    if advantages_B is None:
        if step.lacking:
            raise Lacking(step.lacking)
        advantages_B, _ = credited(step, settings)
    return [_part(step, each, mask, advantages_B, settings) for each in update.batches]


def _part(step: Step, each: MicroBatch, mask: Tensor, advantages_B: Tensor, settings: Settings) -> Part:
    rows = each.rows
    mask_BT, logprobs = mask[rows], each.logprobs
    old = logprobs if step.old is None or step.old_is_current else step.old[rows]
    num_tokens = int(mask.sum() if settings.loss_type.of_all_tokens else mask_BT.sum())
    scale = LossScale(
        num_tokens=num_tokens, num_sequences=len(rows), max_completion_tokens=settings.max_completion_length or 1
    )
    batch = Batch(
        token_ids=torch.zeros_like(mask_BT, dtype=torch.int64),
        attention_mask=mask_BT,
        loss_mask=mask_BT,
        sampled_logprobs=old,
        rewards=torch.zeros(len(rows), dtype=torch.float64),
        group_ids=step.group_ids[rows],
        old_logprobs=old,
        reference_logprobs=None if step.reference is None else step.reference[rows],
        advantages=advantages_B[each.credited].unsqueeze(-1).expand(mask_BT.shape),
    )
    return Part(batch=batch, logprobs=logprobs, old=old, scale=scale)


@no_grad
def losses(step: Step, settings: Settings) -> Iterator[Compared]:
    """The loss of each update, from its log-probs and the recorded advantages and masks."""
    logged = [(update, update.line.loss) for update in step.updates if update.line.loss is not None]
    if not logged:
        raise Lacking("no loss is recorded")
    for update, value in logged:
        found, bound = loss_of(step, update, settings)
        yield one("loss", update.place, value, found, bound)


def loss_of(step: Step, update: LoggedUpdate, settings: Settings) -> tuple[Tensor, Tensor]:
    """(an update's loss `[]`, its bound `[]`).

    A token's term has a ratio, whose error relative to 1 is that of its exponent and at most 8 u besides, and a KL
    whose summands cancel; the sums over tokens, rows and micro-batches add their roundings.
    """
    algorithm, of_batches = algorithm_of(settings), parts(step, update, settings)
    total, bound = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    rows = sum(part.scale.num_sequences for part in of_batches)
    for part in of_batches:
        batch, mask = part.batch, part.batch.loss_mask
        weight = 1 / len(of_batches) if settings.averages_micro_batches else 1.0
        if settings.loss_type.of_all_tokens:  # the step's tokens, rescaled to the rows of one update
            weight *= len(step.places) / rows
        total += weight * algorithm.loss(Outputs(logprobs=part.logprobs), batch, part.scale).total
        sizes = _sizes(part, algorithm, settings)
        sums = roundings(mask.shape[1]) + roundings(part.scale.num_sequences) + len(of_batches)
        bound += weight * UNIT * aggregate(sizes * (8 + sums), mask, part.scale, algorithm.aggregate)
    return total, bound


def _sizes(part: Part, algorithm: GRPO, settings: Settings) -> Tensor:
    """How large the summands of a token's loss are, times 1 + the size of the ratio's exponent, `[b, T]`."""
    mask, zero = part.batch.loss_mask, part.logprobs.new_zeros(())
    logprobs, old = torch.where(mask, part.logprobs, zero), torch.where(mask, part.old, zero)
    assert part.batch.advantages is not None
    term = algorithm.policy_term(logprobs, old, part.batch.advantages, mask).loss.abs()
    exponents = (logprobs - old).abs()
    exponent = exponents if settings.importance_sampling_level == "token" else exponents.amax(-1, keepdim=True)
    terms = roundings(mask.shape[1]) if settings.importance_sampling_level == "sequence" else 1
    sizes = term * (1 + exponent * terms)
    if settings.beta and part.batch.reference_logprobs is not None:
        distance = torch.where(mask, part.batch.reference_logprobs, zero) - logprobs
        cancelling = 1 + distance.abs() + distance.exp() * (1 + distance.abs())
        if settings.kl_estimator == "k3_unbiased":
            cancelling = cancelling * (logprobs - old).exp() * (1 + exponents)
        sizes = sizes + settings.beta * (cancelling + distance.square())
    return sizes


# -- ratios ------------------------------------------------------------------------------------------------------------
@no_grad
def ratios(step: Step, settings: Settings) -> Iterator[Compared]:
    """The shares of tokens at which a clip acts, and the KL to the reference: means over micro-batches."""
    lines = [
        update for update in step.updates if {update.line.kl, update.line.clip_low, update.line.clip_high} - {None}
    ]
    if not lines:
        raise Lacking("neither kl nor clip_low nor clip_high is recorded")
    for update in lines:
        yield from _ratios_of(step, update, settings)


def _ratios_of(step: Step, update: LoggedUpdate, settings: Settings) -> Iterator[Compared]:
    of_batches = parts(step, update, settings)
    for name, compute in (("clip_low", _clipped_low), ("clip_high", _clipped_high), ("kl", _kl)):
        value = getattr(update.line, name)
        if value is not None:
            pairs = [compute(part, settings) for part in of_batches]
            expected, bound = (torch.stack(list(each)).mean() for each in zip(*pairs, strict=True))
            yield one(name, update.place, value, expected, bound)


def _mean(values: Tensor, part: Part) -> Tensor:
    scale = replace(part.scale, num_tokens=int(part.batch.loss_mask.sum()))
    return aggregate(values.double(), part.batch.loss_mask, scale, Aggregate.token_mean)


def _clipped_low(part: Part, settings: Settings) -> tuple[Tensor, Tensor]:
    return _clipped(
        part, settings, 1 - settings.epsilon, lambda ratio, advantages, edge: (ratio < edge) & (advantages < 0)
    )


def _clipped_high(part: Part, settings: Settings) -> tuple[Tensor, Tensor]:
    edge = 1 + settings.clip_high
    return _clipped(part, settings, edge, lambda ratio, advantages, edge: (ratio > edge) & (advantages > 0))


def _clipped(
    part: Part, settings: Settings, edge: float, acts: Callable[[Tensor, Tensor, float], Tensor]
) -> tuple[Tensor, Tensor]:
    """(the share that is clipped, of tokens or at the level of sequences of completions; its bound).

    A ratio at the edge may be on either side of it in float32.
    """
    assert part.batch.advantages is not None
    mask = part.batch.loss_mask
    ratio_BT = ratio(part.logprobs, part.old, mask, RatioLevel(settings.importance_sampling_level))
    near = (ratio_BT - edge).abs() <= (8 + roundings(mask.shape[1])) * 2 * UNIT * edge
    clipped = acts(ratio_BT, part.batch.advantages, edge)
    if settings.importance_sampling_level == "sequence":
        share, close = clipped[:, 0].double().mean(), near[:, 0].double().mean()
    else:
        share, close = _mean(clipped, part), _mean(near, part)
    return share, close + (2 * LONGEST_SUM) * UNIT * share


def _kl(part: Part, settings: Settings) -> tuple[Tensor, Tensor]:
    reference, mask = part.batch.reference_logprobs, part.batch.loss_mask
    if reference is None:
        raise Lacking("ref_logprobs are not recorded of all completions")
    values = kl(part.logprobs, reference, part.old, KLEstimator(settings.kl_estimator))
    distance = reference - part.logprobs
    sizes = 1 + distance.abs() + distance.square() + distance.exp() * (1 + distance.abs())
    if settings.kl_estimator == "k3_unbiased":
        sizes = sizes * (part.logprobs - part.old).exp() * (1 + (part.logprobs - part.old).abs())
    sums = 8 + roundings(mask.shape[1]) + roundings(part.scale.num_sequences)
    return _mean(values, part), sums * UNIT * _mean(sizes, part)
