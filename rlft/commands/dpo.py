"""`rlft dpo`: a policy learns from preferences themselves, without a reward model and without sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft.algorithm.ops.mask import row_sum
from rlft.algorithm.preference.preference_loss import Likelihoods
from rlft.commands.policy_page import print_policy_page
from rlft.data.examples import RankedTokens
from rlft.loop.engines import Engines
from rlft.loop.evaluate import mean_and_error
from rlft.loop.lessons.ranking_lesson import RankingLesson, Terms, of_each, rows_of
from rlft.loop.lessons.supervised import learn, open_policy
from rlft.loop.outcome import Outcome
from rlft.model.roles import POLICY, Roles
from rlft.model.rows import batch_of_rows, numbers_of_rows
from rlft.plan.dpo_plan import DpoPlan
from rlft.runs.checkpoint import Checkpoint
from rlft.system.terminal import Say
from rlft.types import Batch, Evaluation

REFERENCE_LOGPROBS = "reference_logprobs"
"""The file of a checkpoint that holds them, and the value of state.json that says what they are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared(RankedTokens):
    """A ranking with the log-prob of each completion by the reference, in nats; empty for a loss without one."""

    reference: tuple[float, ...]


class PreferenceLesson(RankingLesson[DpoPlan]):
    """The lesson of direct preference optimisation: margins of the rewards that the policy implies.

    Log-probs by the reference are computed once for each ranking, when an update first has it, and saved: a resumed run
    has them to the last bit, whatever micro-batch they were computed in.
    """

    def __init__(self, plan: DpoPlan, roles: Roles) -> None:
        super().__init__(plan, roles)
        self.known: dict[int, tuple[float, ...]] = {}
        self._held_out: list[Compared] | None = None

    # -- an update -----------------------------------------------------------------------------------------------------
    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the mean loss over the step's rankings."""
        positions, rankings = self.plan.positions(step), self.plan.train.rankings
        new = [i for i in dict.fromkeys(positions) if i not in self.known]
        compared = self._compared([rankings[i] for i in new])
        self.known |= {i: ranking.reference for i, ranking in zip(new, compared, strict=True)}
        return self.learn([with_reference(rankings[i], self.known[i]) for i in positions])

    def rehearse(self) -> None:
        self.learn(self._compared(self.largest_part()))

    def batch_of(self, rankings: Sequence[RankedTokens]) -> Batch:
        return batch_of_rows(rows_of(rankings))

    def terms(self, rankings: Sequence[RankedTokens], batch: Batch) -> list[Terms]:
        return self._terms(rankings, self._logprobs(batch))

    def _terms(self, rankings: Sequence[RankedTokens], logprobs_B: Tensor) -> list[Terms]:
        """Loss and metrics of each ranking from the log-probs of its completions by the policy."""
        result = []
        for logprobs_K, ranking in zip(of_each(logprobs_B, rankings), rankings, strict=True):
            assert isinstance(ranking, Compared), "all rankings here were made by `_compared` or `with_reference`"
            likelihoods = Likelihoods(
                logprobs=logprobs_K,
                lengths=logprobs_K.new_tensor([len(completion) for completion in ranking.completions]),
                reference=logprobs_K.new_tensor(ranking.reference) if ranking.reference else None,
            )
            result.append(self.plan.loss(likelihoods, ranking.scores))
        return result

    def _logprobs(self, batch: Batch) -> Tensor:
        """`[B]`: the log-prob of each completion, in nats, summed over its tokens, by the role that is active."""
        return row_sum(self.roles.forward(batch, 1.0).logprobs, batch.loss_mask)

    def _logprobs_by(self, role: str | None, rankings: Sequence[RankedTokens]) -> Tensor:
        """float64 `[rows]` on the CPU, without gradient or dropout: the same by this role (None: the bare base)."""
        batch, budget = self.batch_of(rankings), self.config.token_budget
        return numbers_of_rows(self.roles, role, batch, budget, self._logprobs)

    def _compared(self, rankings: Sequence[RankedTokens]) -> list[Compared]:
        """The rankings with the log-probs by the reference, in one pass over all of them."""
        if self.plan.reference == "none" or not rankings:
            return [with_reference(ranking, ()) for ranking in rankings]
        reference_logprobs = of_each(self._logprobs_by(self.roles.reference_role, rankings), rankings)
        return [with_reference(r, values.tolist()) for r, values in zip(rankings, reference_logprobs, strict=True)]

    # -- an evaluation -------------------------------------------------------------------------------------------------
    def evaluate(self, step: int) -> Evaluation:
        """Accuracy on the held-out pairs, and means over rankings of what an update also measures."""
        if self._held_out is None:
            self._held_out = self._compared(self.plan.held_out.rankings[: self.config.eval.num_rankings])
        terms = self._terms(self._held_out, self._logprobs_by(POLICY, self._held_out))
        losses = [{"loss": loss, **metrics} for loss, metrics in terms]
        means = {name: mean_and_error([values[name].item() for values in losses]) for name in losses[0]}
        value, error = means.pop("accuracy/pairs")
        metrics = {"eval/pairs": value, "eval/pairs_se": error}
        metrics |= {f"eval/{name.removeprefix('pairs/')}": mean for name, (mean, _) in means.items()}
        return Evaluation(step=step, accuracy=value, accuracy_se=error, metrics=metrics, examples=())

    # -- a checkpoint --------------------------------------------------------------------------------------------------
    def saved(self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> Checkpoint:
        made = super().saved(step, optimizer, state)
        if self.plan.reference == "none":
            return made
        return replace(
            made,
            state={**made.state, REFERENCE_LOGPROBS: self.plan.reference_fingerprint},
            tensors={
                REFERENCE_LOGPROBS: {
                    "positions": torch.tensor(list(self.known), dtype=torch.int64),
                    "logprobs": torch.tensor(
                        [x for values in self.known.values() for x in values], dtype=torch.float64
                    ),
                }
            },
        )

    def restore(self, saved: Checkpoint) -> None:
        """Of a fork with other preferences or another reference the log-probs are computed anew."""
        super().restore(saved)
        if saved.state.get(REFERENCE_LOGPROBS) != self.plan.reference_fingerprint:
            return
        tensors = saved.tensors[REFERENCE_LOGPROBS]
        values = iter(tensors["logprobs"].tolist())
        rankings = self.plan.train.rankings
        self.known = {i: tuple(islice(values, len(rankings[i].completions))) for i in tensors["positions"].tolist()}


def with_reference(ranking: RankedTokens, logprobs: Sequence[float]) -> Compared:
    """The ranking with these log-probs by the reference."""
    return Compared(
        prompt=ranking.prompt, completions=ranking.completions, scores=ranking.scores, reference=tuple(logprobs)
    )


def open_lesson(plan: DpoPlan, stack: ExitStack) -> PreferenceLesson:
    """Loads the model with the policy's adapter, and the reference's where it has one."""
    return PreferenceLesson(plan, open_policy(plan.config, plan.config.lora, stack, reference=plan.reference))


def run(plan: DpoPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    """Trains to the last step or an interruption."""
    return learn(plan, folder, lambda stack: open_lesson(plan, stack), say)


def closing(plan: DpoPlan, folder: Path) -> None:
    """Prints the page at the end of a run."""
    print_policy_page(plan.config, folder, has_task=False)
