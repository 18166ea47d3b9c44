"""The shapes of the sequences that an engine decodes in a run: a step's groups, and an evaluation's samples."""

from __future__ import annotations

from collections.abc import Iterable

from rlft.config.schema import EvalConfig, RunConfig
from rlft.data.prompts import PromptSet
from rlft.generation.engine import Generator
from rlft.generation.memory import Decoding


def of_training(prompts: PromptSet, held_out: PromptSet | None, run: RunConfig) -> list[Decoding]:
    """The decodings of a step's groups and, if there is one, of an evaluation."""
    longest = prompts.longest().token_ids
    step = Decoding(num_prompts=run.prompts_per_step, samples=run.group_size, longest=longest)
    decodings = [step, *of_evaluation(held_out, run.eval)]
    if run.environment:
        decodings += [of_a_later_round(decoding, run.generation.max_tokens) for decoding in decodings]
    return decodings


def of_a_later_round(first: Decoding, max_tokens: int) -> Decoding:
    """The decoding of a later turn of these conversations, when half of `max_tokens` is sampled already.

    Each conversation is then a prompt of its own.
    """
    sampled = tuple(first.longest[i % len(first.longest)] for i in range(max_tokens // 2))
    longest = (*first.longest, *sampled)
    return Decoding(num_prompts=first.num_prompts * first.samples, samples=1, longest=longest)


def of_evaluation(held_out: PromptSet | None, settings: EvalConfig) -> list[Decoding]:
    """The decoding of an evaluation; none if nothing is held out."""
    if held_out is None:
        return []
    number = len(held_out.prompts[: settings.num_prompts])
    longest = held_out.longest(settings.num_prompts).token_ids
    return [Decoding(num_prompts=number, samples=settings.num_samples, longest=longest)]


def rehearse_decoding(generator: Generator, decodings: Iterable[Decoding], max_tokens: int) -> None:
    """Has the engine allocate as much memory as the longest rows of each decoding need."""
    for decoding in decodings:
        generator.rehearse([decoding.longest] * decoding.num_prompts, decoding.samples, max_tokens)
