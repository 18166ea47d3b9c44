"""Samples the groups of a step; its prompts and seeds are functions of (seed, step).

With dynamic sampling, groups of fresh prompts replace groups that are all right or all wrong (arXiv 2503.14476).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlft.config.schema import RunConfig
from rlft.data.prompts import permutation, prompts_for_step
from rlft.generation.engine import Generator
from rlft.loop.metrics import Clock
from rlft.system.seeds import derive, sampling_seeds
from rlft.types import Group, Prompt, Rollouts, Scores


class StepSampler:
    """Samples the groups of each step from the training prompts, with the adapter that the generator has loaded."""

    def __init__(self, generator: Generator, prompts: Sequence[Prompt], config: RunConfig) -> None:
        self.generator, self.prompts, self.config = generator, prompts, config

    def prompts_at(self, step: int) -> list[Prompt]:
        """The prompts of the step that follows `step` finished steps; no cursor is needed."""
        indices = prompts_for_step(len(self.prompts), self.config.prompts_per_step, self.config.seed, step)
        return [self.prompts[i] for i in indices]

    def sample(self, step: int) -> list[Group]:
        """The groups of the step that follows `step` finished steps."""
        return self.sample_prompts(self.prompts_at(step), step, "sample")

    def sample_prompts(self, prompts: Sequence[Prompt], step: int, purpose: str) -> list[Group]:
        """Groups of these prompts, sampled with seeds that derive from (seed, step, purpose).

        Afterwards the engine sleeps, because it is usually not used again before the next publish.
        """
        run = self.config
        seeds = sampling_seeds(run.seed, step, len(prompts), run.group_size, purpose)
        groups = self.generator.sample(prompts, run.group_size, seeds, run.generation.sampling)
        self.generator.sleep()
        return groups

    def fresh_prompts(self, step: int, purpose: str, num: int, seen: set[str]) -> list[Prompt]:
        """At most `num` prompts whose ids are not in `seen`, in an order that derives from (seed, step, purpose)."""
        order = permutation(len(self.prompts), derive(self.config.seed, step, purpose), 0)
        fresh: list[Prompt] = []
        for index in order:
            if len(fresh) == num:
                break
            prompt = self.prompts[index]
            if prompt.id not in seen:
                fresh.append(prompt)
        return fresh


def replace_uninformative_groups(
    sampler: StepSampler,
    score: Callable[[Sequence[Group]], Scores],
    step: int,
    clock: Clock,
    groups: list[Group],
    scores: Scores,
) -> Rollouts:
    """Replaces the step's uninformative groups, at their positions, in at most `max_rounds` rounds.

    A group is informative if some of its completions are right and some wrong, by the first reward and
    `eval.correct_at`. Each round samples one fresh prompt for every group still to be replaced; groups that are
    left at the end stay (they have no advantage, and cost no forward). Prompts and seeds of a round derive from
    (seed, step, round) alone, so a resumed run repeats them exactly.
    """
    max_rounds, correct_at = sampler.config.dynamic_sampling.max_rounds, sampler.config.eval.correct_at
    num_sampled = sum(len(group.rollouts) for group in groups)
    used_ids = {group.prompt.id for group in groups}
    for round_number in range(1, max_rounds + 1):
        lacking, purpose = uninformative(scores, correct_at), f"resample {round_number}"
        prompts = sampler.fresh_prompts(step, purpose, len(lacking), used_ids)
        if not prompts:
            break
        with clock("sample"):
            new = sampler.sample_prompts(prompts, step, purpose)
        with clock("score"):
            new_scores = score(new)
        num_sampled += sum(len(group.rollouts) for group in new)
        used_ids |= {prompt.id for prompt in prompts}
        still_uninformative = set(uninformative(new_scores, correct_at))
        informative = [i for i in range(len(new)) if i not in still_uninformative]
        positions = lacking[: len(informative)]
        for position, i in zip(positions, informative, strict=True):
            groups[position] = new[i]
        scores = replaced(scores, positions, new_scores, informative)
    return Rollouts(groups=groups, scores=scores, num_sampled=num_sampled)


def uninformative(scores: Scores, correct_at: float) -> list[int]:
    """Indices of the groups whose completions are all right, or all wrong, by the first reward."""
    right_PG = next(iter(scores.by_reward.values())) >= correct_at
    return (right_PG.all(1) | ~right_PG.any(1)).nonzero()[:, 0].tolist()


def replaced(scores: Scores, positions: Sequence[int], new: Scores, rows: Sequence[int]) -> Scores:
    """`scores` with the rows at `positions` replaced by `rows` of `new`."""
    targets, sources = torch.tensor(positions, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)
    steps = None
    if scores.steps is not None and new.steps is not None:
        source_of = dict(zip(positions, rows, strict=True))
        steps = [new.steps[source_of[p]] if p in source_of else row for p, row in enumerate(scores.steps)]
    outcome = None
    if scores.outcome is not None or new.outcome is not None:
        # Where one side has no rewards of turns, its whole total belongs to completions.
        outcomes, new_outcomes = (s.total if s.outcome is None else s.outcome for s in (scores, new))
        outcome = outcomes.index_copy(0, targets, new_outcomes[sources])
    zeros, new_zeros = torch.zeros_like(scores.total), torch.zeros_like(new.total)
    return Scores(
        total=scores.total.index_copy(0, targets, new.total[sources]),
        by_reward={
            name: scores.by_reward.get(name, zeros).index_copy(0, targets, new.by_reward.get(name, new_zeros)[sources])
            for name in {**scores.by_reward, **new.by_reward}
        },
        outcome=outcome,
        steps=steps,
        weights={**scores.weights, **new.weights},
    )
