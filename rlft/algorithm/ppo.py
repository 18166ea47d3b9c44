"""PPO: a critic's advantages, a clipped ratio. arXiv 1707.06347; with KL in the reward, arXiv 2203.02155.

PPO with a penalty instead of the clip, PPO with pretraining text, and A2C (arXiv 1602.01783) are the same class with
other keys: see configs/algorithm/.

Differences from the paper: values and policy share no parameters unless `critic.kind=shared` says so, errors of values
are clipped (as in the reference implementation), and V past the end of a truncated completion is the last one known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rlft.algorithm.objective import RatioObjective, there
from rlft.fields import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from rlft.ops.advantage import gae, n_step, whiten
from rlft.ops.aggregate import Aggregate, aggregate
from rlft.ops.lazy import no_grad
from rlft.ops.likelihood import negative_log_likelihood
from rlft.ops.mask import keep
from rlft.ops.value import value_loss
from rlft.types import Batch, Loss, LossScale, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class AdvantageEstimator(StrEnum):
    """How rewards and values make an advantage: lambda-weighted over all horizons, or with one horizon."""

    gae = "gae"
    n_step = "n_step"


@dataclass(frozen=True, kw_only=True)
class PPO(RatioObjective):
    """Proximal policy optimisation. Fields are the keys of configs/algorithm/ppo.yaml, which explains them."""

    estimator: AdvantageEstimator
    gamma: Fraction
    lam: Fraction
    n_steps: PositiveInt
    bootstrap_truncated: bool
    whiten: bool
    value_coef: NonNegativeFloat
    value_clip: PositiveFloat | None
    ptx_coef: NonNegativeFloat

    @property
    def needs_values(self) -> bool:
        """Whether `Batch.old_values` and `Outputs.values` must be there."""
        return True

    @property
    def needs_text(self) -> bool:
        """Whether pretraining text is mixed in, by `text_loss`."""
        return self.ptx_coef > 0

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages and returns `[B, T]`, 0 outside the completions.

        Advantages are whitened over the whole batch if asked; the returns, A + V, never.
        """
        mask, rewards_BT = batch.loss_mask, self.token_scores(batch)
        values_BT = there(batch.old_values, "old_values", "a critic's advantage").to(rewards_BT)
        gamma, truncated, bootstrap = self.gamma, batch.truncated, self.bootstrap_truncated
        match self.estimator:
            case AdvantageEstimator.gae:
                advantages_BT, returns_BT = gae(
                    rewards_BT, values_BT, mask, gamma=gamma, lam=self.lam, truncated=truncated, bootstrap=bootstrap
                )
            case AdvantageEstimator.n_step:
                advantages_BT, returns_BT = n_step(
                    rewards_BT, values_BT, mask, gamma=gamma, n=self.n_steps, truncated=truncated, bootstrap=bootstrap
                )
        advantages_BT = whiten(advantages_BT, mask) if self.whiten else advantages_BT
        return replace(batch, advantages=advantages_BT, returns=returns_BT)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and hardly ever meant."""
        found = super().warnings
        if self.bootstrap_truncated and self.gamma == 1:
            # At the last token d = R + V - V: its advantage is R whatever V is, and its target V + R.
            problem = "with algorithm.gamma=1 the value of a truncated completion's last token is its own target plus R"
            found += (f"algorithm.bootstrap_truncated: {problem}, got true; use false, or a gamma below 1",)
        return found

    def loss(self, outputs: Outputs, batch: Batch, scale: LossScale) -> Loss:
        """The shared loss plus c_v agg[0.5 (V - return)^2], with `loss/value` and `value/clip_fraction`."""
        others = super().loss(outputs, batch, scale)
        losses_BT, clipped_BT = self._value_errors(there(outputs.values, "values", "the critic's loss"), batch, scale)
        term = self.value_coef * aggregate(losses_BT, batch.loss_mask, scale, self.aggregate)
        total = others.total + term
        metrics = {**others.metrics, "loss/total": total.detach(), "loss/value": term.detach()}
        if self.value_clip is not None:
            fraction = aggregate(clipped_BT.to(losses_BT.dtype), batch.loss_mask, scale, Aggregate.token_mean)
            metrics["value/clip_fraction"] = fraction
        return Loss(total=total, metrics=metrics)

    def value_loss(self, values: Tensor, batch: Batch, scale: LossScale) -> Tensor:
        """The critic's term of the loss, `[]`: c_v agg[0.5 (V - return)^2], clipped if asked."""
        losses_BT, _ = self._value_errors(values, batch, scale)
        return self.value_coef * aggregate(losses_BT, batch.loss_mask, scale, self.aggregate)

    def text_loss(self, logprobs: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
        """The term `[]` that pretraining text adds: -ptx_coef * mean lp, over the `num_tokens` of the whole update."""
        return self.ptx_coef * negative_log_likelihood(logprobs, mask, num_tokens)

    def _value_errors(self, values: Tensor, batch: Batch, scale: LossScale) -> tuple[Tensor, Tensor]:
        mask = batch.loss_mask
        returns = keep(there(batch.returns, "returns", "the critic's loss (call credit first)"), mask)
        old_values = None if batch.old_values is None else keep(batch.old_values, mask)
        return value_loss(keep(values, mask), returns, old_values, self.value_clip, scale.value_scale)
