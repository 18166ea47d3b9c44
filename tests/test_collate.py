from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from rlft.collate import collate, select
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Scores


def group(prompt_ids, *completions):
    """A group from prompt ids and (completion ids, log-probs)."""
    prompt = Prompt(id="p", messages=(), answer="", token_ids=tuple(prompt_ids))
    rollouts = [
        Completion(text="", token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.stop)
        for ids, logprobs in completions
    ]
    return Group(
        prompt=prompt, rollouts=tuple(Rollout(prompt=prompt, completion=c, policy_version=1) for c in rollouts)
    )


@pytest.fixture
def batch():
    groups = [
        group([5, 6], ((7,), (-0.5,)), ((8, 9, 2), (-1.0, -2.0, -3.0))),
        group([4, 4, 4], ((), ()), ((3, 2), (-0.1, -0.2))),
    ]
    return collate(groups, Scores(total=torch.tensor([[1, 0], [2, 3]]), by_reward={}))


def test_rows_are_prompt_then_completion_padded_on_the_right(batch):
    assert batch.token_ids.tolist() == [[5, 6, 7, 0, 0], [5, 6, 8, 9, 2], [4, 4, 4, 0, 0], [4, 4, 4, 3, 2]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 1, 1, 0, 0], [1] * 5]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1], [0] * 5, [0, 0, 0, 1, 1]]


def test_a_logprob_stands_where_its_token_stands(batch):
    expected = [[0, 0, -0.5, 0, 0], [0, 0, -1, -2, -3], [0] * 5, [0, 0, 0, -0.1, -0.2]]
    assert torch.equal(batch.sampled_logprobs, torch.tensor(expected))


def test_rewards_and_group_ids_follow_the_rows(batch):
    assert torch.equal(batch.rewards, torch.tensor([1.0, 0.0, 2.0, 3.0]))
    assert batch.group_ids.tolist() == [0, 0, 1, 1]


def test_dtypes_are_those_the_types_promise(batch):
    kinds = {f.name: value.dtype for f in fields(batch) if (value := getattr(batch, f.name)) is not None}
    assert kinds == {
        "token_ids": torch.int64,
        "attention_mask": torch.bool,
        "loss_mask": torch.bool,
        "sampled_logprobs": torch.float32,
        "rewards": torch.float32,
        "group_ids": torch.int64,
    }


def test_a_completion_with_another_number_of_logprobs_than_tokens_is_an_error():
    for logprobs in ((-0.5,), (-0.5, -0.1, -0.2), ()):
        with pytest.raises(ValueError, match=f"{len(logprobs)} log-probs for 2 tokens"):
            collate([group([5], ((7, 8), logprobs))], Scores(total=torch.zeros(1, 1), by_reward={}))


def test_select_takes_rows_of_every_field_in_the_order_asked_for(batch):
    batch = replace(batch, advantages=torch.arange(20.0).view(4, 5))
    part = select(batch, torch.tensor([3, 1]))
    assert part.rewards.tolist() == [3, 0]
    assert part.token_ids.tolist() == [[4, 4, 4, 3, 2], [5, 6, 8, 9, 2]]
    assert part.advantages[:, 0].tolist() == [15, 5]
    assert part.group_ids.tolist() == [1, 0]
    assert part.old_logprobs is None
