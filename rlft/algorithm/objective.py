"""What the algorithms share: a loss of policy, KL and entropy terms, and a KL coefficient that may change.

A family (grpo, reinforce, ppo, kimi, opd) computes advantages in `credit`; an algorithm is a YAML file of a family.
`Objective` leaves the policy term open; `RatioObjective` has the surrogates made of ratios and log-probs, and is the
base class of all families but Kimi's.

What the losses of the families have in common, as formula.py reads it. Of a policy term made of ratios:

    S = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)       if surrogate=clipped and dual_clip=null
    S = -max(C, dual_clip * min(A, 0))                              if surrogate=clipped and dual_clip!=null
    S = -r * A                                                      if surrogate=importance
    S = -A * lp                                                     if surrogate=policy_gradient
    S = -stop(clip(r, 1 - clip_low, 1 + clip_high)) * A * lp        if surrogate=cispo
    S = -gate(tau_positive) * max(A, 0) - gate(tau_negative) * min(A, 0)    if surrogate=sapo
    S = -s_high * max(A, 0) - s_low * min(A, 0)                     if surrogate=gmpo
    C = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    gate(x) = 4 / x * sigmoid(x * (r - 1))
    s_high = exp(mean_t(min(lp - lp_old, clip_high)))
    s_low = exp(mean_t(max(lp - lp_old, -clip_low)))
    r = exp(lp - lp_old)                                            if ratio=token
    r = exp(mean_t(lp - lp_old))                                    if ratio=sequence
    r = stop(exp(mean_t(lp - lp_old))) * exp(lp - stop(lp))         if ratio=sequence_token
    r = exp(sum_t(lp - lp_old))                                     if ratio=sequence_product

Weights for the mismatch between engine and trainer, and for lag; means; the KL term; scores of completions:

    w = 1                                                           if mismatch=off|auto
    w = min(v, mismatch_high)           if mismatch=token_truncate|sequence_truncate|sequence_product_truncate
    w = v * within(v, mismatch_low, mismatch_high)      if mismatch=token_mask|sequence_mask|sequence_product_mask
    v = exp(lp_old - lp_smp)                                        if mismatch=token_truncate|token_mask
    v = exp(mean_t(lp_old - lp_smp))                                if mismatch=sequence_truncate|sequence_mask
    v = exp(sum_t(lp_old - lp_smp))     if mismatch=sequence_product_truncate|sequence_product_mask
    m = 1                                                           if off_policy_limit=null
    m = max(A >= 0, mean_t(lp_smp - lp) <= off_policy_limit)        if off_policy_limit!=null

    agg(x) = sum_i(sum_t(x)) / N                                    if aggregate=token_mean
    agg(x) = sum_i(mean_t(x)) / B                                   if aggregate=sequence_mean_token_mean
    agg(x) = sum_i(sum_t(x)) / B                                    if aggregate=sequence_mean_token_sum
    agg(x) = sum_i(sum_t(x)) / (B * T_max)                          if aggregate=constant

    KL = exp(-d) - 1 + d                                            if kl_to=reference and kl_estimator=auto|k3
    KL = d                                                          if kl_estimator=k1
    KL = d ** 2 / 2                                                 if kl_estimator=k2
    KL = exp(lp - lp_old) * (exp(-d) - 1 + d)                       if kl_estimator=k3_unbiased
    KL = sum_v(pi * log(pi / pi_ref))                               if kl_to=reference and kl_estimator=exact
    KL = exp(lp - lp_old) - 1 - (lp - lp_old)                       if kl_to=old and kl_estimator=auto|k3
    KL = sum_v(pi_old * log(pi_old / pi))                           if kl_to=old and kl_estimator=exact
    d = lp - lp_ref

    R = reward + sum_t(step)
      - kl_coef * sum_t(KL_old)                                     if kl_coef > 0 and kl_in=reward

    KL_old = d_old                                                  if kl_estimator=auto|k1
    KL_old = d_old ** 2 / 2                                         if kl_estimator=k2
    KL_old = exp(-d_old) - 1 + d_old                                if kl_estimator=k3|k3_unbiased
    KL_old = sum_v(pi_old * log(pi_old / pi_ref))                   if kl_estimator=exact
    d_old = lp_old - lp_ref
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from rlft.algorithm.formula import unmet
from rlft.algorithm.ops.advantage import group_is_equal, last_of_turns, place_at_last_token, rounded, steps_are_equal
from rlft.algorithm.ops.aggregate import Aggregate, aggregate, keep, max_abs, row_sum
from rlft.algorithm.ops.kl import KLAnchor, KLController, KLEstimator, KLPlace, agreement, k3, kl, next_coefficient
from rlft.algorithm.ops.surrogate import (
    Correction,
    Mismatch,
    RatioLevel,
    Surrogate,
    SurrogateKind,
    cispo,
    clipped_surrogate,
    far_off_policy,
    gmpo,
    mismatch_correction,
    ratio,
    sapo,
    token_ratio,
)
from rlft.config.bounds import AboveOne, Fraction, NonNegativeFloat, PositiveFloat, PositiveFraction
from rlft.config.keys import Key, fields_of
from rlft.system.lazy import no_grad, torch
from rlft.types import Batch, Loss, LossScale, Outputs, require

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_COEF, LARGEST_COEF = 1e-12, 1e12
"""Limits of a KL coefficient that a controller changes: one that became 0 or inf would stay so."""

WEIGHT, WEIGHT_SQUARED = "sampler/weight", "sampler/weight_squared"
"""Means over tokens of the unclipped importance weight and of its square, which give the effective sample size."""


class CreditSpan(StrEnum):
    """The first token that a reward counts for: that of the trajectory, or that of the turn that earned it."""

    trajectory = "trajectory"
    turn = "turn"

    def ends(self, batch: Batch) -> Tensor | None:
        """The tokens that end an episode, bool `[B, T]`, as in ops/advantage.py; None: only the last of each row."""
        return last_of_turns(batch.turn_ends, batch.loss_mask) if self is CreditSpan.turn else None


SEQUENCE_CLIP_LIMIT = 0.05
"""A clip range above this hardly ever clips a length-normalised ratio (GSPO's ranges are 3e-4 and 4e-4)."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """L = agg[w * policy term] + beta agg[KL] - c_e agg[entropy]. Fields: configs/algorithm/base/objective.yaml."""

    aggregate: Aggregate
    kl_coef: Annotated[NonNegativeFloat, Key(acts="moved=true or kl_to=reference")]
    kl_to: Annotated[KLAnchor, Key(acts="kl_coef > 0")]
    kl_in: Annotated[KLPlace, Key(acts="kl=true")]
    kl_estimator: Annotated[KLEstimator, Key(acts="kl=true")]
    kl_controller: Annotated[KLController, Key(acts="kl=true")]
    kl_target: Annotated[PositiveFloat | None, Key(acts="kl=true and kl_controller!=fixed")]
    kl_tolerance: Annotated[AboveOne, Key(acts="kl=true and kl_controller=adaptive", before=1.5)]
    kl_gain: Annotated[PositiveFraction, Key(acts="kl=true and kl_controller=proportional")]
    entropy_coef: NonNegativeFloat
    mismatch: Mismatch
    mismatch_low: Annotated[NonNegativeFloat, Key(acts="mismatch=token_mask|sequence_mask|sequence_product_mask")]
    mismatch_high: Annotated[PositiveFloat, Key(acts="mismatch!=off|auto")]
    off_policy_limit: PositiveFloat | None

    def __post_init__(self) -> None:
        between = self.mismatch_low <= 1 <= self.mismatch_high
        bounds = f"{self.mismatch_low:g} .. {self.mismatch_high:g}"
        problem = "the bounds must have 1, the weight of a perfect match, between them"
        remedy = "use for instance mismatch_low=0.5 mismatch_high=2"
        require(between, "algorithm.mismatch_low", problem, got=bounds, remedy=remedy)
        to_old, in_loss = self.kl_to == KLAnchor.old, self.kl_in == KLPlace.loss
        problem = "the policy that is scored is the old one itself, so algorithm.kl_to=old can only act in the loss"
        remedy = "use algorithm.kl_in=loss, or algorithm.kl_to=reference"
        require(in_loss or not to_old, "algorithm.kl_in", problem, got=self.kl_in, remedy=remedy)
        is_true = self.kl_estimator in (KLEstimator.auto, KLEstimator.k3, KLEstimator.exact)
        problem = "KL(old || policy) is estimated by k3, whose gradient is the true one there, or computed exactly"
        remedy = "use algorithm.kl_estimator=auto or exact with algorithm.kl_to=old"
        require(is_true or not to_old, "algorithm.kl_estimator", problem, got=self.kl_estimator, remedy=remedy)
        is_fixed, controller = self.kl_controller == KLController.fixed, f"algorithm.kl_controller={self.kl_controller}"
        problem = f"{controller} steers towards a target, and there is none"
        remedy = "set algorithm.kl_target=0.01 (nats per token), or algorithm.kl_controller=fixed"
        require(is_fixed or self.kl_target is not None, "algorithm.kl_target", problem, remedy=remedy)
        problem = f"{controller} multiplies the coefficient, and 0 stays 0"
        remedy = "start for instance with algorithm.kl_coef=1, or set algorithm.kl_controller=fixed"
        require(is_fixed or self.kl_coef != 0, "algorithm.kl_coef", problem, got=self.kl_coef, remedy=remedy)

    # -- requirements --------------------------------------------------------------------------------------------------
    needs_values: ClassVar[bool] = False
    """Whether `Batch.old_values` and `Outputs.values` are required."""

    needs_teacher: ClassVar[bool] = False
    """Whether `Batch.teacher_logprobs` is required before `credit`."""

    @property
    def needs_reference(self) -> bool:
        """Whether `Batch.reference_logprobs` is required."""
        return self.kl_coef > 0 and self.kl_to == KLAnchor.reference

    @property
    def exact_kl_to(self) -> KLAnchor | None:
        """The policy to which each update computes the KL over the whole vocabulary (`Outputs.kl`); None: none."""
        return self.kl_to if self._kl_is_exact and self.kl_in == KLPlace.loss else None

    @property
    def reference_field(self) -> str | None:
        """The field of a Batch that a pass before the updates computes with the reference, if there is one."""
        if self._kl_is_exact and self.needs_reference:
            return "reference_kl" if self._kl_in_reward else None
        return "reference_logprobs"

    @property
    def learns_from_teacher_alone(self) -> bool:
        """Whether only a teacher changes the policy: no reward, no KL term, no entropy bonus."""
        return False

    @property
    def teacher_top_k(self) -> int:
        """Number of the teacher's most likely tokens whose log-probs are required at each token; 0: none are."""
        return 0

    @property
    def needs_entropy(self) -> bool:
        """Whether `Outputs.entropy` is required, with gradient."""
        return self.entropy_coef > 0

    @property
    def needs_old_in_credit(self) -> bool:
        """Whether `credit` requires `Batch.old_logprobs`."""
        return self._kl_in_reward

    @property
    def needs_steps(self) -> bool:
        """Whether `Batch.token_rewards` and `Batch.step_ends` are required."""
        return False

    @property
    def needs_text(self) -> bool:
        """Whether pretraining text is mixed in, by `text_loss`."""
        return False

    @property
    def facts(self) -> dict[str, bool]:
        """What the conditions of keys (`Key.acts`) ask besides the keys: whether there are advantages at all, whether
        those of a completion's tokens differ, and whether they come from rewards.
        """
        return {"advantages": True, "token_advantages": False, "rewards": True}

    def without_effect(self, *, moved: bool) -> dict[str, list[str]]:
        """{key: the parts of its condition that do not hold} of the keys that can change no gradient.

        moved: whether the policy that is trained ever differs from the old one; at the first update after sampling it
        does not, so that all ratios are 1.
        """
        known = {f.name: getattr(self, f.name) for f in fields(self)} | self.facts | {"moved": moved}
        of_the_kl = unmet("kl_coef > 0 and moved=true or kl_coef > 0 and kl_to=reference", known)
        lacking = {f.name: unmet(f.key.acts, known | {"kl": not of_the_kl}) for f in fields_of(type(self))}
        return {
            key: [*(of_the_kl if "kl=true" in parts else []), *(part for part in parts if part != "kl=true")]
            for key, parts in lacking.items()
            if parts
        }

    @property
    def corrects_mismatch(self) -> bool:
        """Whether there are importance weights, which require undistorted sampling (top_p = 1, top_k = 0)."""
        return self.mismatch.is_on

    @property
    def automatic_mismatch(self) -> Mismatch:
        """What `algorithm.mismatch: auto` is where the engine's log-probs differ from the trainer's by rounding."""
        return Mismatch.token_truncate

    def with_mismatch_of(self, *, rounds_apart: bool) -> Self:
        """The algorithm of a run, with `mismatch: auto` replaced by its mode.

        `rounds_apart`: whether engine and trainer compute the same policy by forwards that round differently.
        """
        if self.mismatch is not Mismatch.auto:
            return self
        return replace(self, mismatch=self.automatic_mismatch if rounds_apart else Mismatch.off)

    @property
    def min_group_size(self) -> int:
        """The smallest G from which anything can be learned."""
        return 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages about settings that are allowed but hardly ever intended."""
        if self.kl_coef > 0 and self.kl_in == KLPlace.loss and self.kl_estimator == KLEstimator.k1:
            return ("algorithm.kl_estimator: k1 has zero expected gradient as a loss, got k1; use k2 or k3_unbiased",)
        return ()

    def zero_gradient_rows(self, batch: Batch) -> Tensor:
        """Rows that add exactly 0 to loss and gradient, bool `[B]`, as known from rewards and group ids.

        They need no forward pass, but still count in `LossScale`. The batch has whole groups, credited or not.
        """
        return torch.zeros_like(batch.group_ids, dtype=torch.bool)

    def earned(self, batch: Batch) -> Tensor | None:
        """What was earned from each token on, `[B, T]`, by which a critic is judged; None: there is no critic."""
        return None

    def rows_without_signal(self, batch: Batch) -> Tensor:
        """Rows whose rewards are those of all rows that they are compared with, bool `[B]`: rewards teach them nothing.

        Rewards alone decide, whatever a KL term, an entropy bonus or a discount adds. Here, as for a critic or a
        baseline over the batch, a row is compared with the whole step.
        """
        return self._equal_rewards(batch, torch.zeros_like(batch.group_ids)) & (len(batch.rewards) > 1)

    def _equal_rewards(self, batch: Batch, group_ids: Tensor) -> Tensor:
        """Whether an entry's group has the same rewards of completions and of steps, bool `[B]`."""
        equal_B = group_is_equal(self.completion_rewards(batch), group_ids)
        if batch.token_rewards is None or batch.step_ends is None:
            return equal_B
        return equal_B & steps_are_equal(rounded(batch.token_rewards), batch.step_ends & batch.loss_mask, group_ids)

    @property
    def _kl_in_reward(self) -> bool:
        """Whether the KL to the reference is part of the scores."""
        return self.needs_reference and self.kl_in == KLPlace.reward

    @property
    def _kl_is_exact(self) -> bool:
        return self.kl_coef > 0 and self.kl_estimator == KLEstimator.exact

    @property
    def _acts_without_advantage(self) -> bool:
        """Whether a row without an advantage still has a gradient."""
        return self.kl_coef > 0 or self.needs_entropy

    # -- credit --------------------------------------------------------------------------------------------------------
    @abstractmethod
    def credit(self, batch: Batch) -> Batch:
        """A batch of whole groups, with advantages `[B, T]` (and returns) that are 0 outside the completions."""

    def completion_scores(self, batch: Batch) -> Tensor:
        """The total score of each completion, float64 `[B]`, steps' scores included.

        A KL that is part of the reward is computed from the log-probs at sampling time.
        """
        scores_B = self.completion_rewards(batch)
        if self._kl_in_reward:
            scores_B = scores_B - self.kl_coef * row_sum(self._kl_at_sampling(batch), batch.loss_mask)
        return scores_B

    def completion_rewards(self, batch: Batch) -> Tensor:
        """`completion_scores` without a KL, float64 `[B]`."""
        scores_B = batch.rewards.double()
        if batch.token_rewards is not None:
            scores_B = scores_B + row_sum(batch.token_rewards.double(), batch.loss_mask)
        return rounded(scores_B)

    def token_scores(self, batch: Batch, ends: Tensor | None = None) -> Tensor:
        """The reward of each token, float64 `[B, T]`: the completion's on the last one, steps' scores and a KL on each.

        They add up to `completion_scores`, except in an empty completion, which has no token for its reward. With
        `ends` (`ops.advantage.last_of_turns`), the completion's reward is on the last token of each turn.
        """
        mask = batch.loss_mask
        scores_BT = place_at_last_token(batch.rewards.double(), mask, ends)
        if batch.token_rewards is not None:
            scores_BT = scores_BT + keep(batch.token_rewards.double(), mask)
        if self._kl_in_reward:
            scores_BT = scores_BT - self.kl_coef * keep(self._kl_at_sampling(batch), mask)
        return scores_BT

    def _kl_at_sampling(self, batch: Batch) -> Tensor:
        if self._kl_is_exact:
            return required(batch.reference_kl, "reference_kl", "kl_estimator=exact in the reward")
        old = required(batch.old_logprobs, "old_logprobs", "the KL in the reward")
        reference = required(batch.reference_logprobs, "reference_logprobs", "kl_coef > 0")
        return kl(old, reference, old, self._kl_estimator)

    @property
    def _kl_estimator(self) -> KLEstimator:
        if self.kl_estimator != KLEstimator.auto:
            return self.kl_estimator
        return KLEstimator.k3 if self.kl_in == KLPlace.loss else KLEstimator.k1

    # -- loss ----------------------------------------------------------------------------------------------------------
    @abstractmethod
    def policy_term(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        """Each token's policy loss `[B, T]`, from its advantage; the inputs are 0 outside the mask."""

    def corrected_terms(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """{name of the metric: `[B, T]`} of terms besides the policy's that have its weights for mismatch and lag."""
        return {}

    def loss(self, outputs: Outputs, batch: Batch, scale: LossScale) -> Loss:
        """The loss of any subset of the optimizer batch's rows, divided by the whole batch's sizes (`scale`).

        If `batch.old_logprobs` is None, this is the first update on the samples, and the old policy is the current one,
        detached. Metrics `loss/*` are the terms of the sum; others are means over all completion tokens, or maxima
        (`_max`).
        """
        mask = batch.loss_mask
        logprobs = keep(outputs.logprobs, mask)
        old = logprobs.detach() if batch.old_logprobs is None else keep(batch.old_logprobs.detach(), mask)
        sampled = keep(batch.sampled_logprobs.detach(), mask)
        advantages = keep(required(batch.advantages, "advantages", "loss (call credit first)"), mask)

        low, high = self.mismatch_low, self.mismatch_high
        correction = mismatch_correction(old, sampled, mask, self.mismatch, low=low, high=high)
        surrogate = self.policy_term(logprobs, old, advantages, mask)
        policy_BT, off_policy = correction.weight * surrogate.loss, None
        if self.off_policy_limit is not None:
            off_policy = far_off_policy(logprobs, sampled, advantages, mask, self.off_policy_limit)
            policy_BT = keep(policy_BT, ~off_policy)
        terms = {"loss/policy": aggregate(policy_BT, mask, scale, self.aggregate)}
        for name, term_BT in self.corrected_terms(outputs, batch).items():
            term_BT = correction.weight * term_BT
            kept_BT = term_BT if off_policy is None else keep(term_BT, ~off_policy)
            terms[name] = aggregate(kept_BT, mask, scale, self.aggregate)
        if self.kl_coef > 0 and self.kl_in == KLPlace.loss:
            kl_BT = self._kl_loss(logprobs, old, outputs.kl, batch)
            terms["loss/kl"] = self.kl_coef * aggregate(kl_BT, mask, scale, self.aggregate)
        if self.needs_entropy:
            entropy = required(outputs.entropy, "entropy", "entropy_coef > 0")
            terms["loss/entropy"] = -self.entropy_coef * aggregate(entropy, mask, scale, self.aggregate)

        total = torch.stack(list(terms.values())).sum()
        metrics = {"loss/total": total.detach()} | {name: term.detach() for name, term in terms.items()}
        if off_policy is not None:
            dropped = aggregate(off_policy.to(logprobs.dtype), mask, scale, Aggregate.token_mean)
            metrics["waste/off_policy_dropped_fraction"] = dropped
        return Loss(total=total, metrics=metrics | self._diagnostics(outputs, batch, scale, old, surrogate, correction))

    def value_loss(self, values: Tensor, batch: Batch, scale: LossScale) -> Tensor:
        """The critic's term of the loss, `[]`: 0, as there is no critic."""
        return values.new_zeros(())

    def text_loss(self, logprobs: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
        """The term `[]` that pretraining text adds: 0, as there is no text."""
        return logprobs.new_zeros(())

    def _kl_loss(self, logprobs: Tensor, old: Tensor, exact: Tensor | None, batch: Batch) -> Tensor:
        if self._kl_is_exact:
            return keep(required(exact, "kl", "kl_estimator=exact"), batch.loss_mask)
        match self.kl_to:
            case KLAnchor.old:
                # Tokens are sampled by old, so this is KL(old || policy) with the true gradient E_old[(r - 1) grad lp].
                return k3(old, logprobs)
            case KLAnchor.reference:
                reference = required(batch.reference_logprobs, "reference_logprobs", "kl_coef > 0").detach()
                return kl(logprobs, keep(reference, batch.loss_mask), old, self._kl_estimator)

    @no_grad
    def _diagnostics(
        self,
        outputs: Outputs,
        batch: Batch,
        scale: LossScale,
        old: Tensor,
        surrogate: Surrogate,
        correction: Correction,
    ) -> dict[str, Tensor]:
        mask = batch.loss_mask
        logprobs, gap = outputs.logprobs, old - batch.sampled_logprobs
        means = self.clip_fractions(surrogate) | {
            "kl/old": k3(old, logprobs),  # KL(old || current), as the old policy sampled the tokens
            "sampler/logprob_gap_mean": gap.abs(),
            "waste/importance_dropped_fraction": correction.dropped,
        }
        if self.corrects_mismatch and self.mismatch.truncates:
            means["sampler/importance_capped_fraction"] = correction.capped
        if self.corrects_mismatch:
            ratio_BT = token_ratio(old, batch.sampled_logprobs)
            means |= {"sampler/kl": k3(batch.sampled_logprobs, old), WEIGHT: ratio_BT, WEIGHT_SQUARED: ratio_BT**2}
        if batch.reference_logprobs is not None:
            means["kl/reference"] = k3(logprobs, batch.reference_logprobs)
        if self._kl_is_exact:
            exact = batch.reference_kl if outputs.kl is None else outputs.kl
            means[f"kl/{self.kl_to}"] = required(exact, "kl", "kl_estimator=exact")
        if batch.teacher_logprobs is not None:
            means["kl/teacher"] = k3(logprobs, batch.teacher_logprobs)
            means["teacher/agreement"] = agreement(old, batch.teacher_logprobs)
        if outputs.entropy is not None:
            means["policy/entropy"] = outputs.entropy
        metrics = {
            name: aggregate(values.to(logprobs.dtype), mask, scale, Aggregate.token_mean)
            for name, values in means.items()
        }
        return metrics | {"sampler/logprob_gap_max": max_abs(gap, mask)}

    def clip_fractions(self, surrogate: Surrogate) -> dict[str, Tensor]:
        """{metric: where a clip takes effect, bool `[B, T]`}."""
        return {"ratio/clip_low_fraction": surrogate.low, "ratio/clip_high_fraction": surrogate.high}

    # -- the KL coefficient between steps ------------------------------------------------------------------------------
    def adapt(self, metrics: Mapping[str, float]) -> Self:
        """The algorithm of the next step, for which the controller changes kl_coef after a step with these metrics.

        Depending on kl_to it uses `kl/old_last`, of the step's last update, or `kl/reference`, the mean over updates,
        in nats per token. An update measures before its own gradient step, so that no pass is added for it.
        """
        if self.kl_controller == KLController.fixed:
            return self
        assert self.kl_target is not None, "refused when it was built"
        measured = metrics["kl/old_last" if self.kl_to == KLAnchor.old else "kl/reference"]
        coef = next_coefficient(
            self.kl_controller,
            self.kl_coef,
            measured,
            target=self.kl_target,
            tolerance=self.kl_tolerance,
            gain=self.kl_gain,
        )
        return replace(self, kl_coef=min(max(coef, SMALLEST_COEF), LARGEST_COEF))

    def state(self) -> dict[str, float]:
        """{name: value} of what `adapt` has changed, for a checkpoint."""
        return {} if self.kl_controller == KLController.fixed else {"kl_coef": self.kl_coef}

    def restored(self, state: Mapping[str, float]) -> Self:
        """The algorithm with the values that `state` returned."""
        return replace(self, **state)


NO_WEIGHT_OF_TOKENS = "mismatch!=token_truncate|token_mask"
"""With weights of single tokens no ratio may be one number of a completion's tokens."""


@dataclass(frozen=True, kw_only=True)
class RatioObjective(Objective):
    """An objective whose policy term is made of ratios or log-probs. Fields: configs/algorithm/base/ratio.yaml."""

    surrogate: Annotated[
        SurrogateKind,
        Key(
            acts="moved=true and advantages=true"
            f" or ratio=token|sequence and token_advantages=true and {NO_WEIGHT_OF_TOKENS}"
            f" or ratio=sequence_product and advantages=true and {NO_WEIGHT_OF_TOKENS}"
        ),
    ]
    ratio: Annotated[
        RatioLevel,
        Key(
            acts="surrogate=clipped|importance|cispo|sapo and moved=true and advantages=true"
            f" or surrogate=clipped|importance|sapo and advantages=true and {NO_WEIGHT_OF_TOKENS}"
        ),
    ]
    clip_low: Annotated[Fraction, Key(acts="surrogate=clipped|cispo|gmpo and moved=true and advantages=true")]
    clip_high: Annotated[NonNegativeFloat, Key(acts="surrogate=clipped|cispo|gmpo and moved=true and advantages=true")]
    dual_clip: Annotated[PositiveFloat | None, Key(acts="surrogate=clipped and moved=true and advantages=true")]
    tau_positive: Annotated[PositiveFloat, Key(acts="surrogate=sapo and moved=true and advantages=true")]
    tau_negative: Annotated[PositiveFloat, Key(acts="surrogate=sapo and moved=true and advantages=true")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None:
            problem = f"is an end of the clipped surrogate, and algorithm.surrogate={self.surrogate} has none"
            remedy = "use algorithm.dual_clip=null, or algorithm.surrogate=clipped"
            is_clipped = self.surrogate == SurrogateKind.clipped
            require(is_clipped, "algorithm.dual_clip", problem, got=self.dual_clip, remedy=remedy)
            problem = f"must lie above the clip range, which ends at 1 + clip_high = {1 + self.clip_high:g}"
            above, remedy = self.dual_clip > 1 + self.clip_high, "use 3, or null for no dual clip"
            require(above, "algorithm.dual_clip", problem, got=self.dual_clip, remedy=remedy)
        if self.surrogate == SurrogateKind.gmpo:
            problem = "algorithm.surrogate=gmpo clips the ratios of tokens and takes their geometric mean itself"
            remedy = "use algorithm.ratio=token, or algorithm.surrogate=clipped"
            require(self.ratio == RatioLevel.token, "algorithm.ratio", problem, got=self.ratio, remedy=remedy)
        joined = "surrogate=gmpo" if self.surrogate == SurrogateKind.gmpo else f"ratio={self.ratio}"
        problem = f"weighs single tokens, and algorithm.{joined} has one number for all of a completion's tokens"
        remedy = f"use algorithm.mismatch=sequence_{self.mismatch.removeprefix('token_')}"
        fits = not (self.mismatch.of_tokens and self.joins_tokens)
        require(fits, "algorithm.mismatch", problem, got=self.mismatch, remedy=remedy)

    @property
    def automatic_mismatch(self) -> Mismatch:
        return Mismatch.sequence_truncate if self.joins_tokens else Mismatch.token_truncate

    @property
    def joins_tokens(self) -> bool:
        """Whether a token's term has the gradients of all tokens of its completion, so no weight leaves one out."""
        if self.surrogate == SurrogateKind.gmpo:
            return True
        of_ratios = (SurrogateKind.clipped, SurrogateKind.importance, SurrogateKind.sapo)
        return self.ratio in (RatioLevel.sequence, RatioLevel.sequence_product) and self.surrogate in of_ratios

    @property
    def warnings(self) -> tuple[str, ...]:
        problems = super().warnings
        by_length = self.ratio in (RatioLevel.sequence, RatioLevel.sequence_token)
        if self.surrogate == SurrogateKind.clipped and by_length:
            problems += tuple(
                f"algorithm.{key}: {value:g} never binds with algorithm.ratio={self.ratio}, whose ratio is normalised "
                "by length; the paper's are clip_low=3e-4 clip_high=4e-4"
                for key, value in (("clip_low", self.clip_low), ("clip_high", self.clip_high))
                if value > SEQUENCE_CLIP_LIMIT
            )
        return problems

    def policy_term(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        """The chosen surrogate `[B, T]` of ratios at the chosen level."""
        ratio_BT = ratio(logprobs, old_logprobs, mask, self.ratio)
        match self.surrogate:
            case SurrogateKind.clipped:
                low, high, dual = self.clip_low, self.clip_high, self.dual_clip
                return clipped_surrogate(ratio_BT, advantages, clip_low=low, clip_high=high, dual_clip=dual)
            case SurrogateKind.importance:
                return Surrogate.unclipped(-ratio_BT * advantages)
            case SurrogateKind.policy_gradient:
                return Surrogate.unclipped(-advantages * logprobs)
            case SurrogateKind.cispo:
                return cispo(logprobs, ratio_BT, advantages, clip_low=self.clip_low, clip_high=self.clip_high)
            case SurrogateKind.sapo:
                return sapo(ratio_BT, advantages, tau_positive=self.tau_positive, tau_negative=self.tau_negative)
            case SurrogateKind.gmpo:
                low, high = self.clip_low, self.clip_high
                return gmpo(logprobs, old_logprobs, advantages, mask, clip_low=low, clip_high=high)

    def clip_fractions(self, surrogate: Surrogate) -> dict[str, Tensor]:
        dual = {} if self.dual_clip is None else {"ratio/dual_clip_fraction": surrogate.dual}
        return super().clip_fractions(surrogate) | dual


def required(tensor: Tensor | None, name: str, why: str) -> Tensor:
    """The tensor. ValueError with its name and what needs it if it is None."""
    if tensor is None:
        raise ValueError(f"{name} is None, but {why} needs it")
    return tensor
