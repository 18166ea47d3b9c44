"""PPO: a critic's advantages, a clipped ratio. arXiv 1707.06347; with KL in the reward, arXiv 2203.02155.

PPO with a penalty instead of the clip, with pretraining text, and A2C (arXiv 1602.01783) are the same class.

The loss of an update, as formula.py reads it; what is not defined here is in objective.py.

    L = agg(w * m * S)
      + kl_coef * agg(KL)                                           if kl_coef > 0 and kl_in=loss
      - entropy_coef * agg(H)                                       if entropy_coef > 0
      + value_coef * agg(E)
      - ptx_coef * mean_text(lp_text)                               if ptx_coef > 0

    E = (V - G) ** 2 / (2 * s ** 2)                                 if value_clip=null
    E = max((V - G) ** 2, (V_clipped - G) ** 2) / (2 * s ** 2)      if value_clip!=null
    V_clipped = clip(V, V_old - value_clip * s, V_old + value_clip * s)

Credit: the advantage A of a token is how much more it yielded than the critic expected, over n_steps tokens, after
which the critic's value stands in for the rest, or up to the end. G is what the critic learns: with value_lam=1 the
rewards that were really earned from the token on. With credit_span=turn each turn is a separate episode, with the
rewards of its own steps and, at its end, the reward of the completion.

    A = A_raw                                                       if whiten=false
    A = (A_raw - mean_tokens(A_raw)) / (std_tokens(A_raw) + 1e-8)   if whiten=true

    A_raw = to_go(delta, gamma * lam, n_steps)                      if estimator=gae and credit_span=trajectory
    A_raw = to_go(delta, gamma, n_steps)                            if estimator=n_step and credit_span=trajectory
    A_raw = to_go_in_turn(delta, gamma * lam, n_steps)              if estimator=gae and credit_span=turn
    A_raw = to_go_in_turn(delta, gamma, n_steps)                    if estimator=n_step and credit_span=turn
    G = A_raw + V_old                                               if value_lam=null
    G = to_go(delta, gamma * value_lam) + V_old                     if value_lam!=null and credit_span=trajectory
    G = to_go_in_turn(delta, gamma * value_lam) + V_old             if value_lam!=null and credit_span=turn
    delta = reward_t + gamma * V_next - V_old
    V_next = next_token(V_old, past)                                if credit_span=trajectory
    V_next = next_in_turn(V_old, past)                              if credit_span=turn
    past = 0                                                        if bootstrap_truncated=false
    past = truncated * last_token(V_old)                            if bootstrap_truncated=true

    reward_t = at_last(reward) + step
      - kl_coef * KL_old                                            if kl_coef > 0 and kl_in=reward
    at_last(x) = at_last_token(x)                                   if credit_span=trajectory
    at_last(x) = at_turn_ends(x)                                    if credit_span=turn

Symbols of this family:

    V: value of the critic at a token, before it is drawn
    V_old: the same when the batch was sampled, without gradient
    s: 1, or the deviation of the returns with critic.normalize_values
    truncated: 1 for a completion that the length limit ended, else 0
    next_token(x, end): x of the completion's next token, `end` at its last
    next_in_turn(x, end): x of the turn's next token, `end` at the completion's last, 0 at other turns' last
    at_turn_ends: x on the last token of each turn, 0 on the others
    last_token(x): x of the completion's last token
    lp_text: log-prob of a token of pretraining text
    mean_text: mean over the tokens of pretraining text in the update

A critic with its own adapter learns only value_coef * agg(E), at critic.lr; the other terms do not change it.

Differences from the paper: values and policy share no parameters unless `critic.kind=shared`; errors of values are
clipped and advantages whitened over the batch (as in the reference implementation); there is no entropy bonus by
default; and the value past the end of a truncated completion is 0 unless `bootstrap_truncated` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from rlft.algorithm.objective import CreditSpan, RatioObjective, required
from rlft.algorithm.ops.advantage import gae, reward_to_go, whiten
from rlft.algorithm.ops.aggregate import Aggregate, aggregate, keep, negative_log_likelihood
from rlft.algorithm.ops.surrogate import value_loss
from rlft.config.bounds import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from rlft.config.keys import Key
from rlft.system.lazy import no_grad
from rlft.types import Batch, Loss, LossScale, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class AdvantageEstimator(StrEnum):
    """How advantages are made of rewards and values: lambda-weighted over all horizons, or with a single horizon."""

    gae = "gae"
    n_step = "n_step"


@dataclass(frozen=True, kw_only=True)
class PPO(RatioObjective):
    """Proximal policy optimisation."""

    estimator: Annotated[AdvantageEstimator, Key(acts="lam < 1 and n_steps!=1")]
    gamma: Fraction
    lam: Annotated[Fraction, Key(acts="estimator=gae and n_steps!=1")]
    value_lam: Annotated[Fraction | None, Key(before=None)]
    n_steps: PositiveInt | None
    bootstrap_truncated: bool
    whiten: bool
    value_coef: NonNegativeFloat
    value_clip: Annotated[PositiveFloat | None, Key(acts="moved=true")]
    ptx_coef: NonNegativeFloat
    credit_span: CreditSpan

    needs_values: ClassVar[bool] = True

    @property
    def facts(self) -> dict[str, bool]:
        return super().facts | {"token_advantages": True}

    @property
    def needs_text(self) -> bool:
        return self.ptx_coef > 0

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages, whitened over the whole batch with `whiten`, and returns `[B, T]`; 0 outside
        completions.
        """
        mask, ends = batch.loss_mask, self.credit_span.ends(batch)
        rewards_BT = self.token_scores(batch, ends)
        values_BT = required(batch.old_values, "old_values", "a critic's advantage").to(rewards_BT)
        advantages_BT, returns_BT = gae(
            rewards_BT,
            values_BT,
            mask,
            gamma=self.gamma,
            lam=self.lam if self.estimator == AdvantageEstimator.gae else 1.0,
            n=self.n_steps,
            value_lam=self.value_lam,
            truncated=batch.truncated,
            bootstrap=self.bootstrap_truncated,
            ends=ends,
        )
        advantages_BT = whiten(advantages_BT, mask) if self.whiten else advantages_BT
        like = batch.sampled_logprobs
        return replace(batch, advantages=advantages_BT.to(like), returns=returns_BT.to(like))

    @no_grad
    def earned(self, batch: Batch) -> Tensor:
        """The rewards of each token and those after it in its episode, discounted by gamma, `[B, T]`."""
        ends = self.credit_span.ends(batch)
        return reward_to_go(self.token_scores(batch, ends), batch.loss_mask, self.gamma, ends)

    @staticmethod
    def of_older(keys: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded keys of a run from before `value_lam`, when estimator=gae did not read n_steps."""
        unread = "value_lam" not in keys and keys.get("estimator") == AdvantageEstimator.gae
        return {**keys, "n_steps": None} if unread else dict(keys)

    @property
    def warnings(self) -> tuple[str, ...]:
        problems = super().warnings
        if self.bootstrap_truncated and self.gamma == 1:
            # At the last token, d = R + V - V: its advantage is R, whatever V is, and its target is V + R.
            problem = "with algorithm.gamma=1 the value of a truncated completion's last token is its own target plus R"
            problems += (f"algorithm.bootstrap_truncated: {problem}, got true; use false, or a gamma below 1",)
        return problems

    def loss(self, outputs: Outputs, batch: Batch, scale: LossScale) -> Loss:
        """The shared loss plus the critic's term, with `loss/value` and `value/clip_fraction`."""
        loss_without_critic = super().loss(outputs, batch, scale)
        losses_BT, clipped_BT = self._value_errors(
            required(outputs.values, "values", "the critic's loss"), batch, scale
        )
        term = self.value_coef * aggregate(losses_BT, batch.loss_mask, scale, self.aggregate)
        total = loss_without_critic.total + term
        metrics = {**loss_without_critic.metrics, "loss/total": total.detach(), "loss/value": term.detach()}
        if self.value_clip is not None:
            fraction = aggregate(clipped_BT.to(losses_BT.dtype), batch.loss_mask, scale, Aggregate.token_mean)
            metrics["value/clip_fraction"] = fraction
        return Loss(total=total, metrics=metrics)

    def value_loss(self, values: Tensor, batch: Batch, scale: LossScale) -> Tensor:
        """The critic's term of the loss, `[]`."""
        losses_BT, _ = self._value_errors(values, batch, scale)
        return self.value_coef * aggregate(losses_BT, batch.loss_mask, scale, self.aggregate)

    def text_loss(self, logprobs: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
        """The term `[]` that pretraining text adds; `num_tokens` is that of the whole update."""
        return self.ptx_coef * negative_log_likelihood(logprobs, mask, num_tokens)

    def _value_errors(self, values: Tensor, batch: Batch, scale: LossScale) -> tuple[Tensor, Tensor]:
        mask = batch.loss_mask
        returns = keep(required(batch.returns, "returns", "the critic's loss (call credit first)"), mask)
        old_values = None if batch.old_values is None else keep(batch.old_values, mask)
        return value_loss(keep(values, mask), returns, old_values, self.value_clip, scale.value_scale)
