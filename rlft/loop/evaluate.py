"""Evaluates on a held-out set: samples, scores, and computes mean@k and pass@k with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from rlft.algorithm.ops.aggregate import row_sum
from rlft.algorithm.ops.kl import k3
from rlft.algorithm.ops.pass_at import pass_at, pass_sizes
from rlft.batch import select
from rlft.generation.engine import Generator
from rlft.loop.metrics import turn_metrics
from rlft.model.forward import Forward
from rlft.model.roles import POLICY, Roles
from rlft.system.seeds import sampling_seeds
from rlft.types import Batch, Evaluation, Group, Prompt, Sampling, Scores


class Learner(Protocol):
    """A model that computes log-probs: `Roles`, with the active adapter, or `WholeModel`."""

    @property
    def forward(self) -> Forward: ...

    def to_device(self, batch: Batch) -> Batch: ...


def evaluate(
    generator: Generator,
    scorer: Callable[[Sequence[Group]], Scores],
    prompts: Sequence[Prompt],
    *,
    step: int,
    seed: int,
    num_samples: int,
    sampling: Sampling,
    correct_at: float,
    num_examples: int,
) -> tuple[Evaluation, list[Group], Scores]:
    """Samples and scores the prompts, always with the same seeds.

    A completion is right if its first reward is `correct_at` or more.
    """
    seeds = sampling_seeds(seed, 0, len(prompts), num_samples, "evaluate")
    groups = generator.sample(prompts, num_samples, seeds, sampling)
    scores = scorer(groups)
    evaluation = summarise(groups, scores, step=step, correct_at=correct_at, num_examples=num_examples)
    return evaluation, groups, scores


def summarise(
    groups: Sequence[Group], scores: Scores, *, step: int, correct_at: float, num_examples: int
) -> Evaluation:
    """The metrics of scored groups; errors are standard errors over prompts."""
    primary = next(iter(scores.by_reward))
    right = (scores.by_reward[primary] >= correct_at).tolist()
    counts, k = [sum(row) for row in right], len(right[0])
    accuracy, error = mean_and_error([count / k for count in counts])
    metrics = {f"eval/{primary}": accuracy, f"eval/{primary}_se": error}
    for size in pass_sizes(k):
        mean, se = mean_and_error([pass_at(size, k, count) for count in counts])
        metrics |= {f"eval/pass@{size}": mean, f"eval/pass@{size}_se": se}
    for name, values in scores.by_reward.items():
        metrics[f"eval/reward/{name}"] = values.float().mean().item()
    completions = [r.completion for g in groups for r in g.rollouts]
    metrics["eval/length/mean"] = sum(c.num_sampled for c in completions) / len(completions)
    metrics["eval/length/truncated_fraction"] = sum(c.finish_reason == "length" for c in completions) / len(completions)
    metrics |= {f"eval/{name}": value for name, value in turn_metrics(completions).items()}
    shown = groups[:num_examples]
    return Evaluation(
        step=step,
        accuracy=accuracy,
        accuracy_se=error,
        metrics=metrics,
        examples=tuple(g.rollouts[0] for g in shown),
        example_scores=tuple(scores.by_reward[primary][: len(shown), 0].tolist()),
    )


def kl_to_base(roles: Roles, batch: Batch) -> float:
    """KL(policy || base) on the policy's own completions, in nats, mean over tokens (k3: unbiased, never negative)."""
    gaps_BT = k3(roles.logprobs(batch, POLICY), roles.logprobs(batch, None))
    return row_sum(gaps_BT.double(), batch.loss_mask).sum().item() / max(1, int(batch.loss_mask.sum()))


def text_loss(learner: Learner, batch: Batch, token_budget: int) -> float:
    """Mean negative log-prob per token (nats) of these texts, with the active adapter, at temperature 1, no gradient.

    The mean is over learned tokens, not texts: the sum over the batch of -log p(token | earlier tokens of its text) /
    number of learned tokens.
    """
    total = 0.0
    with torch.no_grad():
        for part in learner.forward.micro_batches(batch, torch.arange(len(batch.rewards)), token_budget):
            micro = learner.to_device(select(batch, part))
            # Outside the mask the forward gives 0.
            total -= learner.forward(micro, 1.0).logprobs.double().sum().item()
    return total / int(batch.loss_mask.sum())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error of the mean); the error of a single value is 0.

    >>> mean_and_error([0.0, 1.0])
    (0.5, 0.5)
    """
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, 0.0
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
