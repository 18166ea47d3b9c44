"""The longest shapes that a run allows, tried before its first step: memory runs out then, not a hundred steps later.

Nothing of it is kept: gradients are dropped, no optimizer steps, no random number of the run is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rlft.algorithm.protocol import Algorithm
from rlft.collate import select
from rlft.decodings import of_training, rehearse_decoding
from rlft.fitting import in_words
from rlft.footprint import longest_rows
from rlft.metrics import peak_memory_bytes
from rlft.model.roles import Roles
from rlft.types import Batch, LossScale

if TYPE_CHECKING:
    from rlft.session import Session

Backward = Callable[[Roles, Algorithm, Batch, LossScale, bool], object]


def rehearse(session: Session, backward: Backward) -> None:
    """A prefill and a decoding step of the longest completions, and the largest micro-batch forward and backward.

    backward: the update's own. Pretraining text (PPO-ptx) and a reward model's own training are not rehearsed: their
    batches are cut to the same token budget, whose activations are in the update's.
    """
    run, roles, plan = session.config, session.roles, session.plan
    decodings = of_training(plan.train_prompts, plan.held_out, run)
    with told(session.logger.note):
        session.logger.stage("rehearse sampling")
        rehearse_decoding(session.generator, decodings, run.generation.max_tokens)
        session.logger.stage("rehearse update")
        micro = roles.to_device(largest_micro_batch(session, decodings[0].longest))
        scale = LossScale(
            num_tokens=int(micro.loss_mask.sum()),
            num_sequences=len(micro.rewards),
            max_completion_tokens=run.generation.max_tokens,
        )
        with torch.random.fork_rng(), roles.training():
            backward(roles, session.plan.algorithm, micro, scale, True)
    for role in roles.learning_roles:
        for _, parameter in roles.named_parameters(role):
            parameter.grad = None


@contextmanager
def told(note: Callable[[str], None]) -> Iterator[None]:
    """On leaving, a note says what the rehearsal inside took."""
    start = time.monotonic()
    yield
    taken = f"{time.monotonic() - start:.1f} s, {in_words(peak_memory_bytes())} at most so far"
    note(f"the longest rows of this run fit into memory ({taken})")


def largest_micro_batch(session: Session, prompt: tuple[int, ...]) -> Batch:
    """Rows of the longest prompt and completions of the greatest length, as many as enter the network at once."""
    run, forward = session.config, session.roles.forward
    shape = (len(prompt), run.generation.max_tokens, run.group_size, run.completions_per_step // run.minibatches)
    batch = longest_rows(*shape, run.token_budget)
    batch.token_ids[:, : len(prompt)] = torch.tensor(prompt)
    parts = forward.micro_batches(batch, torch.arange(len(batch.rewards)), run.token_budget)
    micro = select(batch, max(parts, key=len))
    zeros = torch.zeros_like(micro.sampled_logprobs)
    return replace(
        micro,
        old_logprobs=zeros,
        reference_logprobs=zeros,
        old_values=zeros,
        advantages=zeros + 1,
        returns=zeros,
    )
