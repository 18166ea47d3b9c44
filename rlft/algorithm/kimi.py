"""Kimi k1.5: mirror descent, a squared log-ratio in place of a clip. arXiv 2501.12599, section 2.3.

The loss of an update, as formula.py reads it; what is not defined here is in objective.py.

    L = agg(S)
      + kl_coef * agg(KL)                                           if kl_coef > 0 and kl_in=loss
      - entropy_coef * agg(H)                                       if entropy_coef > 0

    S = -A * lp + tau / 2 * sum_t(lp - lp_old) ** 2 / n

Credit: the advantage A of all tokens of a completion is its score minus its group's baseline. Summed over a
completion, S is then -(R - b) log pi(o) + tau / 2 (log pi / pi_old (o))^2.

    A = R - b
    b = mean_group(R)                                               if baseline=mean
    b = tau * log(mean_group(exp(R / tau)))                         if baseline=soft

Symbols of this family:

    n: the number of the completion's tokens

Differences from the paper: the loss is the paper's surrogate (R - b - tau log pi/pi_old)^2 over 2 tau, up to a
constant, so that its scale does not depend on tau; its gradient is the paper's update. The baseline is by default the
group's mean, as in the paper's update; the paper's tau log Z is `baseline: soft`. Whether the optimizer is reset in
each iteration is a key of the run (trainer.reset_every).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from rlft.algorithm.objective import Objective
from rlft.algorithm.ops.advantage import Std, group_is_equal, group_mean, group_zscore
from rlft.algorithm.ops.aggregate import keep
from rlft.algorithm.ops.surrogate import Mismatch, Surrogate, mirror_descent
from rlft.config.bounds import NonNegativeFloat
from rlft.config.keys import Key
from rlft.system.lazy import no_grad
from rlft.types import Batch, require

if TYPE_CHECKING:
    from torch import Tensor


class Baseline(StrEnum):
    """What is subtracted from a score: the group's mean, or tau log mean exp(R / tau)."""

    mean = "mean"
    soft = "soft"


@dataclass(frozen=True, kw_only=True)
class Kimi(Objective):
    """Online mirror descent."""

    tau: Annotated[NonNegativeFloat, Key(acts="moved=true or baseline=soft")]
    baseline: Baseline

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = "weighs the policy gradient of single tokens, and the squared log-ratio is of a whole completion"
        remedy = "use algorithm.mismatch=auto, which is off here, or off"
        require(not self.mismatch.is_on, "algorithm.mismatch", problem, got=self.mismatch, remedy=remedy)
        problem = "drops tokens of a policy gradient, and the squared log-ratio is of a whole completion"
        limit, remedy = self.off_policy_limit, "use algorithm.off_policy_limit=null"
        require(limit is None, "algorithm.off_policy_limit", problem, got=limit, remedy=remedy)
        divides, problem = self.baseline == Baseline.soft, "algorithm.baseline=soft divides by it"
        remedy = "use algorithm.baseline=mean, or a tau above 0"
        require(self.tau != 0 or not divides, "algorithm.tau", problem, got=self.tau, remedy=remedy)

    @property
    def automatic_mismatch(self) -> Mismatch:
        return Mismatch.off

    @property
    def min_group_size(self) -> int:
        """A single completion is its own baseline."""
        return 2

    def zero_gradient_rows(self, batch: Batch) -> Tensor:
        """Rows of groups whose rewards are all equal, bool `[B]`; none if another term acts on them.

        With tau > 0 the squared log-ratio acts on all rows, from the second update on the same samples.
        """
        if self._acts_without_advantage or self.tau > 0:
            return super().zero_gradient_rows(batch)
        return self.rows_without_signal(batch)

    def rows_without_signal(self, batch: Batch) -> Tensor:
        return group_is_equal(self.completion_rewards(batch), batch.group_ids)

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages on completion tokens, 0 elsewhere; exactly 0 in a group of equal scores."""
        scores_B, group_ids, mask = self.completion_scores(batch), batch.group_ids, batch.loss_mask
        match self.baseline:
            case Baseline.mean:
                advantages_B = group_zscore(scores_B, group_ids, Std.none, eps=0.0)
            case Baseline.soft:
                advantages_B = scores_B - soft_mean(scores_B, group_ids, self.tau)
        advantages_BT = keep(advantages_B.unsqueeze(-1).expand(mask.shape), mask)
        return replace(batch, advantages=advantages_BT.to(batch.sampled_logprobs))

    def policy_term(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        """The row's squared log-ratio spread over its tokens, without a clip."""
        return Surrogate.unclipped(mirror_descent(logprobs, old_logprobs, advantages, mask, self.tau))


def soft_mean(scores: Tensor, group_ids: Tensor, tau: float) -> Tensor:
    """tau log mean exp(R / tau) over each entry's group, `[B]`: the mean for large tau, the maximum for small."""
    groups, index = group_ids.unique(return_inverse=True)
    maximum_B = scores.new_zeros(len(groups)).scatter_reduce(0, index, scores, "amax", include_self=False)[index]
    # With the maximum subtracted, no exp overflows, and their mean is at least 1 / G; for equal scores it is exactly 1.
    return maximum_B + tau * group_mean(((scores - maximum_B) / tau).exp(), group_ids).log()
