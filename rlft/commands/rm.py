"""`rlft rm`: trains a reward model from preferences, an adapter with a scalar head on the frozen base.

`reward=learned` and `critic.init` accept the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rlft.algorithm.ops.preference import accuracy, pairs_of_ranking, ranking_loss
from rlft.data.examples import RankedTokens
from rlft.loop.engines import Engines
from rlft.loop.evaluate import mean_and_error
from rlft.loop.lessons.ranking_lesson import RankingLesson, Terms, of_each, rows_of
from rlft.loop.lessons.supervised import learn, open_policy
from rlft.loop.outcome import Outcome
from rlft.model.adapter_folder import has_head
from rlft.model.reward_model import last_scores, score_rows, scoring_batch
from rlft.model.roles import Roles
from rlft.plan.rm_plan import RmPlan
from rlft.runs.checkpoint import Checkpoint
from rlft.system.terminal import Say, command_line, override, overrides, program
from rlft.types import Batch, Evaluation

REWARD = "reward"
BIAS = f"{REWARD}.head.bias"


class RewardLesson(RankingLesson[RmPlan]):
    """The lesson of a reward model: the better completion gets the higher score.

    The head's bias is not trained, because no difference of scores depends on it. It is 0 during the run; only the
    saved head has the value that `center` requires, so that centring does not change what is learned.
    """

    ending = 1

    def __init__(self, plan: RmPlan, roles: Roles) -> None:
        super().__init__(plan, roles, REWARD)
        self._reset_bias()

    def parameters(self) -> list[tuple[str, Parameter]]:
        return [(name, p) for name, p in super().parameters() if name != BIAS]

    def backward(self, step: int) -> dict[str, float]:
        """Adds the gradient of the mean ranking loss over the step's prompts."""
        return self.learn(self.plan.at(step))

    def rehearse(self) -> None:
        self.learn(self.largest_part())

    def batch_of(self, rankings: Sequence[RankedTokens]) -> Batch:
        return scoring_batch(rows_of(rankings))

    def terms(self, rankings: Sequence[RankedTokens], batch: Batch) -> list[Terms]:
        scores = of_each(last_scores(self.roles, REWARD, batch), rankings)
        return [
            (ranking_loss(s, r.scores, self.config.margin), {"accuracy/pairs": pair_accuracy(s.detach(), r)})
            for s, r in zip(scores, rankings, strict=True)
        ]

    def evaluate(self, step: int) -> Evaluation:
        """Accuracy on the held-out pairs (mean over each ranking, then over rankings), and the loss without margin."""
        rankings = self.plan.held_out.rankings[: self.config.eval.num_rankings]
        scores = self._scores(rankings)
        value, error = mean_and_error([pair_accuracy(s, r).item() for s, r in zip(scores, rankings, strict=True)])
        losses = [ranking_loss(s, r.scores, 0.0).item() for s, r in zip(scores, rankings, strict=True)]
        metrics = {
            "eval/pairs": value,
            "eval/pairs_se": error,
            "eval/loss": sum(losses) / len(losses),
            "eval/score_best": sum(s[0].item() for s in scores) / len(scores),
            "eval/score_worst": sum(s[-1].item() for s in scores) / len(scores),
        }
        return Evaluation(step=step, accuracy=value, accuracy_se=error, metrics=metrics, examples=())

    def _scores(self, rankings: Sequence[RankedTokens]) -> Sequence[Tensor]:
        scores = score_rows(self.roles, REWARD, rows_of(rankings), self.config.token_budget)
        return of_each(torch.tensor(scores, dtype=torch.float64), rankings)

    def saved(self, step: int, optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> Checkpoint:
        head = self.roles.heads[REWARD].weights()
        if self.config.center:
            best = [replace(r, completions=r.completions[:1], scores=r.scores[:1]) for r in self.plan.held_out.rankings]
            scores = self._scores(best[: self.config.eval.num_rankings])
            head["bias"] = head["bias"] - torch.stack(list(scores)).mean().to(head["bias"])
        return replace(super().saved(step, optimizer, state), heads={REWARD: head})

    def restore(self, saved: Checkpoint) -> None:
        super().restore(saved)
        self.roles.heads[REWARD].restore(saved.heads[REWARD])
        self._reset_bias()

    def _reset_bias(self) -> None:
        with torch.no_grad():
            self.roles.heads[REWARD].bias.zero_()


def pair_accuracy(scores: Tensor, ranking: RankedTokens) -> Tensor:
    """The share `[]` of the ranking's pairs whose better completion scores higher; equal scores count half."""
    better, worse = pairs_of_ranking(ranking.scores)
    return accuracy(scores[better], scores[worse])


def open_lesson(plan: RmPlan, stack: ExitStack) -> RewardLesson:
    """Loads the model with the reward's adapter and head."""
    config = plan.config
    roles = open_policy(config, replace(config.lora, path=None), stack)
    path = config.lora.path
    if path is None or has_head(path):
        roles.add_scalar_role(REWARD, path, "lora.path", learns=True)
    else:  # a policy's adapter, for instance from supervised fine-tuning: the head starts at zero
        roles.add_scalar_role(REWARD, None, "lora.path", learns=True)
        roles.load_role(REWARD, path, "lora.path")
    return RewardLesson(plan, roles)


def run(plan: RmPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    """Trains to the last step or an interruption."""
    return learn(plan, folder, lambda stack: open_lesson(plan, stack), say)


def closing(plan: RmPlan, folder: Path) -> None:
    """Prints the page at the end of a run."""
    from rlft.logger.summary import print_summary

    words = ["train", "+recipe=ppo_arithmetic", override("model.path", plan.config.model.path)]
    words += [*overrides(plan.config.lora.keys_of_shape), "reward=[exact_match,learned]"]
    words += [override("reward.learned.path", folder), "critic.init=reward"]
    print_summary(folder, [("train a policy with it, its critic begun from it", command_line(program(), *words))])
