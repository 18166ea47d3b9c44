"""Evaluates on a held-out set: samples, scores, and computes mean@k and pass@k with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlft.loop.metrics import turn_metrics
from rlft.model.roles import POLICY, Roles
from rlft.ops.kl import k3
from rlft.ops.mask import row_sum
from rlft.ops.pass_at import pass_at, pass_sizes
from rlft.ops.seeds import sampling_seeds
from rlft.types import Batch, Evaluation, Generator, Group, Prompt, Sampling, Scores


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
