"""Samples the groups of a step; its prompts and seeds are functions of (seed, step).

With a curriculum its prompts are functions of (seed, step) and of what was counted before (rlft/data/curriculum.py).
With dynamic sampling, groups of fresh prompts replace groups that are all right or all wrong (arXiv 2503.14476).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlft.config.model import RoutingSource
from rlft.config.schema import RunConfig
from rlft.data.curriculum import Curriculum
from rlft.data.prompts import permutation, prompts_for_step
from rlft.generation.drafts import Drafts
from rlft.generation.engine import Generator
from rlft.loop.metrics import Clock
from rlft.system.seeds import derive, sampling_seeds
from rlft.types import Group, Prompt, Rollouts, Sampling, Scores


class StepSampler:
    """Samples the groups of each step from the training prompts, with the adapter that the generator has loaded."""

    def __init__(
        self, generator: Generator, prompts: Sequence[Prompt], config: RunConfig, curriculum: Curriculum | None = None
    ) -> None:
        self.generator, self.prompts, self.config, self.curriculum = generator, prompts, config, curriculum
        self.drafts: Drafts | None = None
        self._index_of: dict[str, int] = {}  # with a curriculum, of each prompt that was taken: {id: index}

    @property
    def sampling(self) -> Sampling:
        """How the completions of a step are drawn."""
        notes_experts = self.config.snapshot.routing is RoutingSource.engine
        return replace(self.config.generation.sampling, notes_experts=notes_experts, drafts=self.drafts)

    def prompts_at(self, step: int) -> list[Prompt]:
        """The prompts of the step that follows `step` finished steps; no cursor is needed.

        With a curriculum the first call decides, by what has been counted up to then.
        """
        number = self.config.prompts_per_step
        if self.curriculum is None:
            indices = prompts_for_step(len(self.prompts), number, self.config.seed, step)
        else:
            indices = self.curriculum.of_step(step, number)
        return list(self._taken(indices))

    def _taken(self, indices: Iterable[int]) -> Iterator[Prompt]:
        for index in indices:
            prompt = self.prompts[index]
            if self.curriculum is not None:
                self._index_of[prompt.id] = index
            yield prompt

    def count(self, groups: Sequence[Group], scores: Scores) -> None:
        """Counts the right completions of these groups for the curriculum, if there is one."""
        if self.curriculum is not None:
            right_PG = _right(scores, self.config.eval.correct_at)
            indices = [self._index_of[group.prompt.id] for group in groups]
            self.curriculum.count(indices, right_PG.sum(1).tolist(), right_PG.shape[1])

    def sample(self, step: int) -> list[Group]:
        """The groups of the step that follows `step` finished steps."""
        return self.sample_prompts(self.prompts_at(step), step, "sample")

    def sample_prompts(self, prompts: Sequence[Prompt], step: int, purpose: str) -> list[Group]:
        """Groups of these prompts, sampled with seeds that derive from (seed, step, purpose).

        Afterwards the engine sleeps, because it is usually not used again before the next publish.
        """
        run = self.config
        seeds = sampling_seeds(run.seed, step, len(prompts), run.group_size, purpose)
        groups = self.generator.sample(prompts, run.group_size, seeds, self.sampling)
        self.generator.sleep()
        return groups

    def fresh_prompts(self, step: int, purpose: str, num: int, used_ids: set[str]) -> list[Prompt]:
        """Up to `num` prompts whose ids are not in `used_ids`, in an order that derives from (seed, step, purpose)."""
        order: Iterable[int]
        if self.curriculum is None:
            order = permutation(len(self.prompts), derive(self.config.seed, step, purpose), 0)
        else:
            order = self.curriculum.order(step, purpose)
        fresh = (prompt for prompt in self._taken(order) if prompt.id not in used_ids)
        return list(islice(fresh, num))


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
    right_PG = _right(scores, correct_at)
    return (right_PG.all(1) | ~right_PG.any(1)).nonzero()[:, 0].tolist()


def _right(scores: Scores, correct_at: float) -> Tensor:
    """Whether each completion is right by the first reward, bool `[P, G]`."""
    return next(iter(scores.by_reward.values())) >= correct_at


def replaced(scores: Scores, positions: Sequence[int], new: Scores, rows: Sequence[int]) -> Scores:
    """`scores` with the rows at `positions` replaced by `rows` of `new`."""
    targets, sources = torch.tensor(positions, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)
    source_of = dict(zip(positions, rows, strict=True))

    def chosen(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        return [after[source_of[p]] if p in source_of else row for p, row in enumerate(before)]

    steps = None if scores.steps is None or new.steps is None else chosen(scores.steps, new.steps)
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
        answers={name: chosen(rows, new.answers[name]) for name, rows in scores.answers.items()},
    )
