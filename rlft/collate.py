"""Groups and their scores -> Batch: right-padded rows, prompt then completion."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache

import torch
from torch import Tensor

from rlft.types import Batch, Completion, FinishReason, Group, Scores, StepScores

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, as `Completion.text` shows it."""


def collate(groups: Sequence[Group], scores: Scores, decode: Decode) -> Batch:
    """The `[B, T]` view of a step, B in the order of groups and their rollouts; group_ids are positions in `groups`.

    Token ids come from the engine as they are: text is never tokenised again. Where steps were scored, `decode` finds
    the token that each of them ends with.

    Raises:
        ValueError: a completion has not one log-prob a token, or its tokens don't decode to the text that was scored.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rows = [(*r.prompt.token_ids, *r.completion.token_ids) for r in rollouts]
    shape = len(rows), max(map(len, rows))
    token_ids_BT = torch.zeros(shape, dtype=torch.int64)
    attention_mask_BT = torch.zeros(shape, dtype=torch.bool)
    loss_mask_BT = torch.zeros(shape, dtype=torch.bool)
    logprobs_BT = torch.zeros(shape)
    for b, (rollout, row) in enumerate(zip(rollouts, rows, strict=True)):
        start, end = len(rollout.prompt.token_ids), len(row)
        token_ids_BT[b, :end] = torch.tensor(row)
        attention_mask_BT[b, :end] = True
        loss_mask_BT[b, start:end] = True
        logprobs = rollout.completion.logprobs
        if len(logprobs) != end - start:
            problem = f"{len(logprobs)} log-probs for {end - start} tokens"
            raise ValueError(f"the generator gave a completion of prompt {rollout.prompt.id} {problem}")
        logprobs_BT[b, start:end] = torch.tensor(logprobs)
    sizes = torch.tensor([len(group.rollouts) for group in groups])
    token_rewards_BT = step_ends_BT = None
    if scores.steps is not None:
        token_rewards_BT, step_ends_BT = step_rewards(groups, scores.steps, shape, decode)
    return Batch(
        token_ids=token_ids_BT,
        attention_mask=attention_mask_BT,
        loss_mask=loss_mask_BT,
        sampled_logprobs=logprobs_BT,
        rewards=(scores.total if scores.outcome is None else scores.outcome).flatten().float(),
        group_ids=torch.arange(len(groups)).repeat_interleave(sizes),
        token_rewards=token_rewards_BT,
        step_ends=step_ends_BT,
        truncated=torch.tensor([r.completion.finish_reason == FinishReason.length for r in rollouts]),
    )


def step_rewards(
    groups: Sequence[Group], steps: Sequence[Sequence[StepScores]], shape: tuple[int, int], decode: Decode
) -> tuple[Tensor, Tensor]:
    """(scores of single steps at their last tokens `[B, T]` float32, where a step ends `[B, T]` bool).

    Scores of steps that end with the same token add, in float64.
    """
    rewards_BT = torch.zeros(shape, dtype=torch.float64)
    ends_BT = torch.zeros(shape, dtype=torch.bool)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    given = [scores for row in steps for scores in row]
    for b, (rollout, scores) in enumerate(zip(rollouts, given, strict=True)):
        start = len(rollout.prompt.token_ids)
        places = last_tokens(rollout.completion, scores.ends, decode)
        if places is None:
            problem = "is not what its tokens decode to, so its scored steps cannot be placed"
            raise ValueError(f"the text of a completion of prompt {rollout.prompt.id} {problem}")
        for k, value in zip(places, scores.values, strict=True):
            rewards_BT[b, start + k] += value
            ends_BT[b, start + k] = True
    return rewards_BT.float(), ends_BT


def last_tokens(completion: Completion, ends: Sequence[int], decode: Decode) -> list[int] | None:
    """For each offset into the text, the first token with which the text up to there stands complete; None if none.

    That is the first k with `len(decode(ids[:k+1])) >= end`, and with these characters: where a character is made of
    several tokens, half of it is shown as a replacement character until the last of them. By bisection, O(log T)
    decodes an offset.
    """
    num_tokens = len(completion.token_ids)
    shown = cache(lambda k: decode(completion.token_ids[: k + 1]))
    places: list[int] = []
    for end in ends:
        text, low = completion.text[:end], places[-1] if places else 0
        places.append(bisect_left(range(num_tokens), True, lo=low, key=lambda k, text=text: shown(k).startswith(text)))
        if places[-1] == num_tokens:
            return None
    return places


def select(batch: Batch, rows: Tensor) -> Batch:
    """The batch of these rows (int64 `[N]`), in this order."""
    chosen = {f.name: value[rows] for f in fields(batch) if (value := getattr(batch, f.name)) is not None}
    return replace(batch, **chosen)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with all its tensors there."""
    if device.type == "cpu":
        return batch
    return replace(batch, **{n: v.to(device) for n in Batch.__slots__ if (v := getattr(batch, n)) is not None})
