"""What a run tries before its first step: its longest rows, and whether decoding gives the trainer's log-probs.

The longest shapes of the run are rehearsed, so that memory runs out then and not many steps later. Nothing is kept:
gradients are dropped, no optimizer steps, no random number of the run is drawn. A teacher reads the same rows, or with
a hint rows as long as its longest. Pretraining text (PPO-ptx) and a reward model's own training are not rehearsed:
their batches fit the same token budget as the update's.

Then decoding is checked. The freshness check compares two forwards over whole sequences, so it sees no fault of
decoding: a cache that mixes up rows or forgets a state, padding that leaks into one, a model that reads tokens behind.
Nor does it see what is random in training alone. So a few completions are sampled by the engine itself, and compared
with the trainer's forward over the whole rows, in the mode in which updates run.

The first step's own completions would do for the plainest run. But with a lag, in conversations, at temperature 0 or
with top_p their log-probs differ for good reasons, and with one update a step the trainer's first log-probs are those
of a gradient. So these are samples of their own: 60 tokens, once. They draw from no random numbers of the run, and
begin with a prompt's second token, so that no later prompt finds its first blocks in an engine's prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Any

import torch

from rlft.batch import collate, select
from rlft.config.schema import RunConfig
from rlft.data.prompts import PromptSet
from rlft.generation.engine import Generator
from rlft.loop.freshness import REMEDY, Gap, Limits
from rlft.loop.metrics import peak_memory_bytes
from rlft.model.forward import Forward
from rlft.model.full_weights import WholeModel
from rlft.model.roles import Roles
from rlft.plan.fit import in_words
from rlft.plan.memory_parts import longest_rows
from rlft.types import Batch, Group, NextTurn, Prompt, Sampling, Scores, UserError

NUM_SAMPLES = 2
"""Completions of each prompt."""

LENGTHS = ((33, 4), (5, 16), (18, 10))
"""(tokens, the most tokens of a completion) of each prompt: they are padded, and rows leave the batch in between."""


@contextmanager
def log_peak(note: Callable[[str], None]) -> Iterator[None]:
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


def check_decoding(
    generator: Generator,
    learner: Roles | WholeModel,
    prompts: PromptSet,
    config: Any,
    limits: Limits,
) -> float | None:
    """The largest gap in nats between the engine's log-probs and the trainer's; None if the engine has no weights.

    Args:
        generator: the run's engine, with the learner's weights.
        learner: the networks that learn.
        prompts: prompts whose tokens are used.
        config: the run's config, whose limits on tokens the engine and the trainer were opened with.
        limits: those of the freshness check.

    Raises:
        UserError: the gap exceeds the limits, by the key model.path.
    """
    max_tokens, token_budget = config.generation.max_tokens, config.token_budget
    probes = _probes(prompts, config.prompts.max_tokens, max_tokens)
    if not any(generator.score([probes[0].token_ids[:2]])):
        return None
    sampling = Sampling(max_tokens=max_tokens, temperature=1.0)
    seeds = [NUM_SAMPLES * number for number in range(len(probes))]
    samples = generator.sample_each(probes, NUM_SAMPLES, seeds, sampling)
    return max(_check(groups, learner, token_budget, limits) for groups in samples)


def _probes(prompts: PromptSet, max_prompt_tokens: int, max_tokens: int) -> list[Prompt]:
    first = [prompt.token_ids for prompt in prompts.prompts[:3]]
    tokens = cycle(islice(chain.from_iterable(first), 1, None) if sum(map(len, first)) > 1 else first[0])
    return [
        Prompt(
            id=f"check of decoding {number}",
            messages=(),
            answer="",
            token_ids=tuple(islice(tokens, min(length, max_prompt_tokens))),
            next_turn=NextTurn(turn=0, seed=0, max_tokens=min(limit, max_tokens)),
        )
        for number, (length, limit) in enumerate(LENGTHS)
    ]


def _check(groups: Sequence[Group], learner: Roles | WholeModel, token_budget: int, limits: Limits) -> float:
    shape = len(groups), NUM_SAMPLES
    batch = collate(groups, Scores(total=torch.zeros(shape), by_reward={}), learner.backbone.decode)
    gap = _gap(batch, learner, token_budget, training=True)
    if limits.allow(gap):
        return gap.largest
    model, only_in_training = learner.backbone.model, ""
    if limits.allow(_gap(batch, learner, token_budget, training=False)):
        only_in_training = " in training mode, and not otherwise (its dropout, or another noise, is on there)"
    problem = (
        f"decoding does not give the log-probs of the trainer's forward for a {model.config.model_type}"
        f"{only_in_training}: {int(batch.loss_mask.sum())} sampled tokens differ by up to {gap.largest:.2g} nats, "
        f"{gap.mean:.2g} on average ({limits} is allowed); stopped rather than train on them"
    )
    remedy = f"try model.kernels=plain, another generation.engine, release of transformers or model; {REMEDY}"
    raise UserError("model.path", problem, got=learner.backbone.path, remedy=remedy)


def _gap(batch: Batch, learner: Roles | WholeModel, token_budget: int, *, training: bool) -> Gap:
    """The gap between the log-probs of all sampled tokens."""
    with torch.no_grad(), torch.random.fork_rng():
        if training:
            with learner.training(dropout=False):
                expected_BT = learner.forward.logprobs(batch, token_budget)
        else:
            expected_BT = learner.forward.logprobs(batch, token_budget)
    mask = batch.loss_mask
    return Gap.between(batch.sampled_logprobs[mask].tolist(), expected_BT[mask].tolist())
