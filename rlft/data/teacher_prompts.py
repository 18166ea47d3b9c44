"""Prompts with a hint that only the teacher reads: a base that has read the answer teaches itself without it.

This is self-distillation as in "context distillation" (Snell 2022, arXiv 2209.15189), on the student's own samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlft.config.model import ANSWER
from rlft.data.prompts import token_ids, tokenised
from rlft.types import Group, Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_hint(prompt: Prompt, hint: str) -> Prompt:
    """The prompt with the hint at the end of its last message, after a blank line; not tokenised."""
    last = prompt.messages[-1]
    text = f"{last['content']}\n\n{hint.replace(ANSWER, prompt.answer)}"
    return replace(prompt, messages=(*prompt.messages[:-1], {**last, "content": text}), token_ids=())


def teacher_prompts(groups: Sequence[Group], hint: str, tokenizer: PreTrainedTokenizerBase, style: str) -> Tensor:
    """int64 `[B, P]`: for each row of a Batch, the tokens of its prompt with the hint, padded with -1."""
    ids = token_ids([with_hint(group.prompt, hint) for group in groups], tokenizer, style)
    rows = [prompt_ids for group, prompt_ids in zip(groups, ids, strict=True) for _ in group.rollouts]
    prompts_BP = torch.full((len(rows), max(map(len, rows))), -1)
    for b, row in enumerate(rows):
        prompts_BP[b, : len(row)] = torch.tensor(row)
    return prompts_BP


def longest_with_hint(prompts: Iterable[Prompt], hint: str, tokenizer: PreTrainedTokenizerBase, style: str) -> int:
    """Number of tokens of the longest of these prompts with the hint.

    Raises:
        UserError: the hint shows the answer, and some of the prompts have none.
    """
    longest, without = 0, []
    for prompt in tokenised((with_hint(prompt, hint) for prompt in prompts), tokenizer, style):
        longest = max(longest, len(prompt.token_ids))
        if ANSWER in hint and not prompt.answer.strip():
            without.append(prompt.id)
    if without:
        problem = f"shows the prompt's answer, and {len(without)} train prompts have none, first {without[0]}"
        remedy = f"leave {ANSWER} out, or name the field that has the answer (data.answer_field)"
        raise UserError("snapshot.teacher_hint", problem, got=repr(hint), remedy=remedy)
    return longest
