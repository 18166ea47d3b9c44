"""Rehearses the longest shapes of a run before its first step, so that memory runs out then and not many steps later.

Nothing is kept: gradients are dropped, no optimizer steps, no random number of the run is drawn. A teacher reads the
same rows, or with a hint rows as long as its longest. Pretraining text (PPO-ptx) and a reward model's own training are
not rehearsed: their batches fit the same token budget as the update's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from rlft.batch import select
from rlft.config.schema import RunConfig
from rlft.loop.metrics import peak_memory_bytes
from rlft.model.forward import Forward
from rlft.plan.fit import in_words
from rlft.plan.memory_parts import longest_rows
from rlft.types import Batch


@contextmanager
def noting_what_it_took(note: Callable[[str], None]) -> Iterator[None]:
    """Notes how much time and memory the rehearsal inside took."""
    start = time.monotonic()
    yield
    time_and_memory = f"{time.monotonic() - start:.1f} s, {in_words(peak_memory_bytes())} at most so far"
    note(f"the longest rows of this run fit into memory ({time_and_memory})")


def largest_micro_batch(run: RunConfig, forward: Forward, prompt: tuple[int, ...], hinted_tokens: int = 0) -> Batch:
    """A micro-batch of the longest prompt with completions of full length, with as many rows as a micro-batch can have.

    Args:
        run: the run's config.
        forward: splits a batch into micro-batches.
        prompt: token ids of the longest prompt.
        hinted_tokens: number of tokens of the longest prompt with a hint that a teacher reads; 0 without a hint.
    """
    shape = (len(prompt), run.generation.max_tokens, run.group_size, run.completions_per_step // run.minibatches)
    batch = longest_rows(*shape, run.token_budget)
    batch.token_ids[:, : len(prompt)] = torch.tensor(prompt)
    parts = forward.micro_batches(batch, torch.arange(len(batch.rewards)), run.token_budget)
    micro = select(batch, max(parts, key=len))
    zeros = torch.zeros_like(micro.sampled_logprobs)
    if hinted_tokens:
        hinted_P = torch.tensor(prompt).repeat(-(-hinted_tokens // len(prompt)))[:hinted_tokens]
        micro = replace(micro, teacher_prompts=hinted_P.expand(len(micro.rewards), -1))
    return replace(
        micro,
        old_logprobs=zeros,
        reference_logprobs=zeros,
        old_values=zeros,
        advantages=zeros + 1,
        returns=zeros,
    )
