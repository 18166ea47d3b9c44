"""Samples the groups of a step; its prompts and seeds are functions of (seed, step)."""

from __future__ import annotations

from collections.abc import Sequence

from rlft.config.schema import RunConfig
from rlft.data.prompts import permutation, prompts_for_step
from rlft.system.seeds import derive, sampling_seeds
from rlft.types import Generator, Group, Prompt


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
