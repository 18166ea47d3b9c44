"""Groups and their scores -> Batch: right-padded rows, prompt then completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from rlft.types import Batch, Group, Scores


def collate(groups: Sequence[Group], scores: Scores) -> Batch:
    """The `[B, T]` view of a step, B in the order of groups and their rollouts; group_ids are positions in `groups`.

    Token ids come from the engine as they are: text is never tokenised again.

    Raises:
        ValueError: a completion has not one log-prob a token.
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
    return Batch(
        token_ids=token_ids_BT,
        attention_mask=attention_mask_BT,
        loss_mask=loss_mask_BT,
        sampled_logprobs=logprobs_BT,
        rewards=scores.total.flatten().float(),
        group_ids=torch.arange(len(groups)).repeat_interleave(sizes),
    )


def select(batch: Batch, rows: Tensor) -> Batch:
    """The batch of these rows (int64 `[N]`), in this order."""
    chosen = {f.name: value[rows] for f in fields(batch) if (value := getattr(batch, f.name)) is not None}
    return replace(batch, **chosen)
