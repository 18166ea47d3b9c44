"""Checks before a run's first step that decoding gives each token the log-prob of the forward that updates compute.

The freshness check compares two forwards over whole sequences, so it sees no fault of decoding: a cache that mixes up
rows or forgets a state, padding that leaks into one, a model that reads tokens behind. Nor does it see what is random
in training alone. Here a few completions are sampled by the engine itself, and compared with the trainer's forward over
the whole rows, in the mode in which updates run.

The first step's own completions would do for the plainest run. But with a lag, in conversations, at temperature 0 or
with top_p their log-probs differ for good reasons, and with one update a step the trainer's first log-probs are those
of a gradient. So these are samples of their own: 60 tokens, once. They draw from no random numbers of the run, and
begin with a prompt's second token, so that no later prompt finds its first blocks in an engine's prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch

from rlft.batch import collate
from rlft.data.prompts import PromptSet
from rlft.generation.pool import EnginePool
from rlft.loop.freshness import REMEDY, Gap, Limits
from rlft.model.full_weights import WholeModel
from rlft.model.roles import Roles
from rlft.types import Batch, Generator, Group, Ongoing, Prompt, Sampling, Scores, UserError

NUM_SAMPLES = 2
"""Completions of each prompt."""

LENGTHS = ((33, 4), (5, 16), (18, 10))
"""(tokens, the most tokens of a completion) of each prompt: they are padded, and rows leave the batch in between."""


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
    if isinstance(generator, EnginePool):
        samples = generator.sample_each(probes, NUM_SAMPLES, seeds, sampling)
    else:
        samples = [generator.sample(probes, NUM_SAMPLES, seeds, sampling)]
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
            ongoing=Ongoing(turn=0, seed=0, max_tokens=min(limit, max_tokens)),
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
