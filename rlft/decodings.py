"""What a run has its engine decode: the groups of a step, and the samples of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlft.generation.transformers import TransformersGenerator
from rlft.prompts import PromptSet
from rlft.roots import EvalConfig, RunConfig
from rlft.types import Generator, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """`samples` completions of each of `num_prompts` prompts. longest: the token ids of the longest of them."""

    num_prompts: int
    samples: int
    longest: tuple[int, ...]


def of_training(prompts: PromptSet, held_out: PromptSet | None, run: RunConfig) -> list[Decoding]:
    """A step's groups, and an evaluation where there is one."""
    longest = _longest(prompts.prompts)
    step = Decoding(num_prompts=run.prompts_per_step, samples=run.group_size, longest=longest)
    return [step, *of_evaluation(held_out, run.eval)]


def of_evaluation(held_out: PromptSet | None, settings: EvalConfig) -> list[Decoding]:
    """One, or none where nothing is held out."""
    if held_out is None:
        return []
    asked = held_out.prompts[: settings.num_prompts]
    return [Decoding(num_prompts=len(asked), samples=settings.num_samples, longest=_longest(asked))]


def rehearse_decoding(generator: Generator, found: Iterable[Decoding], max_tokens: int) -> None:
    """A prefill and a decoding step of the longest rows, of each. An engine of its own has taken its memory already."""
    if isinstance(generator, TransformersGenerator):
        for decoding in found:
            generator.rehearse([decoding.longest] * decoding.num_prompts, decoding.samples, max_tokens)


def _longest(prompts: Sequence[Prompt]) -> tuple[int, ...]:
    return max(prompts, key=lambda prompt: len(prompt.token_ids)).token_ids
