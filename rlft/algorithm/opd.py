"""On-policy distillation: the student samples, and a teacher gives the log-prob of each of its tokens.

The loss of an update, as formula.py reads it; what is not defined here is in grpo.py and objective.py.

    L = agg(w * m * S)
      + agg(w * m * teacher_coef * D)                               if teacher_in=loss
      + kl_coef * agg(KL)                                           if kl_coef > 0 and kl_in=loss
      - entropy_coef * agg(H)                                       if entropy_coef > 0

    D = sum_top(p * log(p / q))                                       if divergence=reverse
    D = sum_top(q * log(q / p))                                       if divergence=forward
    D = jsd_beta * sum_top(q * log(q / M)) + (1 - jsd_beta) * sum_top(p * log(p / M))    if divergence=jensen_shannon
    M = jsd_beta * q + (1 - jsd_beta) * p

Credit: the advantage A of a token is the teacher's log-prob of it minus the student's, in nats, without a
discount or a baseline, plus GRPO's advantage of the rewards where they count.

    A = teacher_coef * (lp_teacher - lp_old)                        if teacher_in=advantage
      + reward_coef * A_rewards                                     if reward_coef > 0
    A = 0                                                           if teacher_in=loss
      + reward_coef * A_rewards                                     if reward_coef > 0

    A_rewards = z(R)                    if supervision=outcome and reward_aggregation=sum_then_normalize
    A_rewards = Z / (std_all(Z) + eps)  if supervision=outcome and reward_aggregation=normalize_then_sum
    A_rewards = z(reward) + to_go(z(step), 1)                       if supervision=process and credit_span=trajectory
    A_rewards = z(reward) + to_go_in_turn(z(step), 1)               if supervision=process and credit_span=turn

Symbols of this family:

    lp_teacher: log-prob of a completion's token by the teacher (snapshot.teacher), without gradient
    p: probabilities, by the trained policy, of the teacher's top_k most likely tokens, and of all others together
    q: the same probabilities by the teacher, without gradient
    sum_top: sum over these top_k + 1 outcomes, whose probabilities add up to 1

Sources: A is the reverse KL of Thinking Machines, "On-Policy Distillation" (2025), and the single-step part of MiniLLM
(arXiv 2306.08543, section 2.2); D is GKD's divergence (arXiv 2306.13649), whose data are on-policy here (lambda = 1).
Differences: GKD sums over the whole vocabulary; here all tokens but the teacher's top_k are one outcome, so that D is
at most GKD's, and the teacher does not say which of the others it prefers;
MiniLLM's long part (returns of later tokens) and its mixing of the teacher into sampling are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar

from rlft.algorithm.grpo import GRPO
from rlft.algorithm.objective import required
from rlft.algorithm.ops.aggregate import keep
from rlft.algorithm.ops.kl import Divergence, teacher_advantages, top_k_divergence
from rlft.algorithm.ops.surrogate import RatioLevel
from rlft.config.bounds import Decay, NonNegativeFloat, PositiveFloat, PositiveInt
from rlft.config.keys import Key
from rlft.system.lazy import no_grad, torch
from rlft.types import Batch, Outputs, require

if TYPE_CHECKING:
    from torch import Tensor


class TeacherPlace(StrEnum):
    """Where the teacher acts: in the advantage of the tokens that were sampled, or as a term of the loss."""

    advantage = "advantage"
    loss = "loss"


@dataclass(frozen=True, kw_only=True)
class OPD(GRPO):
    """On-policy distillation."""

    teacher_coef: PositiveFloat
    teacher_in: TeacherPlace
    divergence: Annotated[Divergence, Key(acts="teacher_in=loss")]
    jsd_beta: Annotated[Decay, Key(acts="divergence=jensen_shannon")]
    top_k: Annotated[PositiveInt, Key(acts="teacher_in=loss")]
    reward_coef: NonNegativeFloat

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_in == TeacherPlace.advantage:
            problem = "from sampled tokens only the reverse KL can be estimated"
            remedy = "set algorithm.teacher_in=loss, or algorithm.divergence=reverse"
            is_reverse = self.divergence == Divergence.reverse
            require(is_reverse, "algorithm.divergence", problem, got=self.divergence, remedy=remedy)
        if self.divergence == Divergence.jensen_shannon:
            problem = "the divergence is 0 there, whatever the student does"
            remedy = "use 0.5, or algorithm.divergence=forward, which it goes to for small values"
            require(self.jsd_beta != 0, "algorithm.jsd_beta", problem, got=self.jsd_beta, remedy=remedy)
        if self.teacher_in == TeacherPlace.loss and self.reward_coef == 0:
            problem = (
                "drops tokens of a negative advantage, and without rewards algorithm.teacher_in=loss has no advantage"
            )
            remedy = "use null, algorithm.mismatch=sequence_mask, or algorithm.teacher_in=advantage"
            limit = self.off_policy_limit
            require(limit is None, "algorithm.off_policy_limit", problem, got=limit, remedy=remedy)
        if self.reward_coef == 0:
            problem = "the KL would be a part of the rewards, which algorithm.reward_coef=0 leaves out"
            remedy = "use algorithm.kl_in=loss, or a reward_coef above 0"
            require(not self._kl_in_reward, "algorithm.kl_in", problem, got=self.kl_in, remedy=remedy)

    needs_teacher: ClassVar[bool] = True

    @property
    def facts(self) -> dict[str, bool]:
        has_rewards, has_teachers = self.reward_coef > 0, self.teacher_in == TeacherPlace.advantage
        of_tokens = has_teachers or (has_rewards and super().facts["token_advantages"])
        return {"advantages": has_rewards or has_teachers, "token_advantages": of_tokens, "rewards": has_rewards}

    @property
    def learns_from_teacher_alone(self) -> bool:
        return self.reward_coef == 0 and not self._acts_without_advantage

    @property
    def warnings(self) -> tuple[str, ...]:
        if self.teacher_in == TeacherPlace.loss or not self.joins_tokens:
            return super().warnings
        key, got = ("surrogate", self.surrogate) if self.ratio == RatioLevel.token else ("ratio", self.ratio)
        problem = "gives each token the mean of its completion's advantages, and the teacher's are of single tokens"
        remedy = "use algorithm.surrogate=importance algorithm.ratio=sequence_token"
        return (*super().warnings, f"algorithm.{key}: {problem}, got {got}; {remedy}")

    @property
    def teacher_top_k(self) -> int:
        return self.top_k if self.teacher_in == TeacherPlace.loss else 0

    @property
    def needs_old_in_credit(self) -> bool:
        return super().needs_old_in_credit or self.teacher_in == TeacherPlace.advantage

    @property
    def needs_steps(self) -> bool:
        return super().needs_steps and self.reward_coef > 0

    @property
    def min_group_size(self) -> int:
        """A teacher needs no siblings, rewards do."""
        return super().min_group_size if self.reward_coef > 0 else 1

    def zero_gradient_rows(self, batch: Batch) -> Tensor:
        """No row, bool `[B]`: the teacher has a log-prob for the tokens of each."""
        return torch.zeros_like(batch.group_ids, dtype=torch.bool)

    def rows_without_signal(self, batch: Batch) -> Tensor:
        """As GRPO's; no row where the teacher is the only signal (reward_coef=0)."""
        return super().rows_without_signal(batch) if self.reward_coef > 0 else self.zero_gradient_rows(batch)

    @no_grad
    def credit(self, batch: Batch) -> Batch:
        """The batch with advantages `[B, T]`, 0 outside the completions: GRPO's of the rewards, and the teacher's.

        The teacher's compare with the policy that sampled, not with the one that is being updated.
        """
        advantages_BT = torch.zeros_like(batch.sampled_logprobs)
        if self.reward_coef > 0:
            of_rewards_BT = required(super().credit(batch).advantages, "advantages", "the rewards' part")
            advantages_BT = self.reward_coef * of_rewards_BT
        if self.teacher_in == TeacherPlace.advantage:
            old = required(batch.old_logprobs, "old_logprobs", "the teacher's advantage")
            teacher = required(batch.teacher_logprobs, "teacher_logprobs", "the teacher's advantage")
            advantages_BT = advantages_BT + self.teacher_coef * teacher_advantages(old, teacher, batch.loss_mask)
        return replace(batch, advantages=advantages_BT)

    def corrected_terms(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """With teacher_in=loss c D of the teacher's top k, as `loss/teacher`."""
        if self.teacher_in == TeacherPlace.advantage:
            return {}
        mask, why = batch.loss_mask, "teacher_in=loss"
        student = keep(required(outputs.top_k_logprobs, "top_k_logprobs", why), mask.unsqueeze(-1))
        teacher = keep(required(batch.teacher_top_k_logprobs, "teacher_top_k_logprobs", why), mask.unsqueeze(-1))
        divergence_BT = top_k_divergence(student, teacher.detach(), self.divergence, self.jsd_beta)
        return {"loss/teacher": self.teacher_coef * divergence_BT}
