"""A teacher's log-probs of the student's tokens, in passes without gradient, at temperature 1.

It reads the rows that the student wrote: the same packed rows as the reference, or, with a hint, rows whose prompt is
another one and whose completion is the same. One that an engine computes gets each row by itself, and of a conversation
that forks each path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlft.batch import batch_of_rows
from rlft.model.forward import Forward, MicroBatch
from rlft.model.packing import PackedRows, paths_of, prompt_lengths
from rlft.types import Batch

Part = tuple[Tensor, MicroBatch]  # indices of rows in the batch, and the micro-batch of these rows


def teacher_logprobs(
    forward: Forward, batch: Batch, parts: Sequence[Part], *, top_k: int, vocabulary: int, token_budget: int
) -> dict[str, Tensor]:
    """{field of a Batch: float32 `[B, T]`, with top_k also int64 and float32 `[B, T, K]`}, 0 outside the completions.

    Args:
        forward: of the teacher, whose adapter is the active one if it has one.
        parts: micro-batches of them, which fit the token budget of the student's forward; other rows are 0.
        top_k: of how many of its most likely tokens the teacher is asked, 0 for none.
        vocabulary: tokens from this one on are not among them.
        token_budget: the most tokens that enter the teacher's network at a time.
    """
    result = _no_logprobs(batch, top_k)
    for rows, micro in parts:
        if micro.batch.teacher_prompts is None and forward.packed == isinstance(micro.layout, PackedRows):
            for name, values in _in_one_pass(forward, micro, top_k, vocabulary).items():
                result[name][rows] = values.to(result[name])
            continue
        for part, asked in forward.parts(_as_read(batch.select(rows)), token_budget):
            for name, values in _in_one_pass(forward, asked, top_k, vocabulary).items():
                sampled = values[asked.batch.loss_mask]
                _put(result[name], rows[part], batch.select(rows[part]).loss_mask, sampled)
    return result


def teacher_logprobs_by_engine(
    engine: Any, batch: Batch, micro_batches: Sequence[Tensor], *, top_k: int, vocabulary: int
) -> dict[str, Tensor]:
    """As `teacher_logprobs`, with all rows in order in one call, so that no number depends on the token budget.

    engine: what computes the teacher (`rlft.generation.vllm.teacher`).

    A row without a sampled token is not asked for. `micro_batches` are the indices of rows; other rows are 0.
    """
    result = _no_logprobs(batch, top_k)
    if not micro_batches:
        return result
    rows = torch.cat(list(micro_batches)).sort().values
    micro = batch.select(rows)
    read = _as_read(micro)
    paths = None if read.previous is None else paths_of(read)
    linear = read if paths is None else paths.batch
    lengths, sampled = linear.attention_mask.sum(1).tolist(), linear.loss_mask.any(1).nonzero()[:, 0].tolist()
    asked = [linear.token_ids[b, : lengths[b]].tolist() for b in sampled]
    made = _no_logprobs(linear, top_k)
    for b, row_logprobs in zip(sampled, engine.logprobs(asked, top_k, vocabulary), strict=True):
        for values, of_row in zip(made.values(), row_logprobs, strict=False):  # without top_k the log-probs alone
            values[b, 1 : lengths[b]] = of_row
    for name, values in made.items():
        of_rows = values if paths is None else paths.fold(values)
        _put(result[name], rows, micro.loss_mask, of_rows[read.loss_mask])
    return result


def _no_logprobs(batch: Batch, top_k: int) -> dict[str, Tensor]:
    result = {"teacher_logprobs": torch.zeros_like(batch.sampled_logprobs)}
    if top_k:
        shape = *batch.token_ids.shape, top_k
        result["teacher_top_k_ids"] = batch.token_ids.new_zeros(shape)
        result["teacher_top_k_logprobs"] = batch.sampled_logprobs.new_zeros(shape)
    return result


def _put(target: Tensor, rows: Tensor, mask: Tensor, values: Tensor) -> None:
    """Puts values of these rows' sampled tokens, which are the same as the teacher reads them, in their places."""
    of_rows = target[rows]
    of_rows[mask.to(target.device)] = values.to(target)
    target[rows] = of_rows


def _as_read(batch: Batch) -> Batch:
    return batch if batch.teacher_prompts is None else with_other_prompts(batch, batch.teacher_prompts)


def _in_one_pass(forward: Forward, micro: MicroBatch, top_k: int, vocabulary: int) -> dict[str, Tensor]:
    if not top_k:
        return {"teacher_logprobs": forward(micro.batch, 1.0, layout=micro.layout).logprobs}
    logprobs, ids, of_ids = forward.most_likely(micro.batch, top_k, vocabulary, micro.layout)
    return {"teacher_logprobs": logprobs, "teacher_top_k_ids": ids, "teacher_top_k_logprobs": of_ids}


def with_other_prompts(batch: Batch, prompts_BP: Tensor) -> Batch:
    """The rows with these prompts (int64 `[B, P]`, -1 after their end) before the same completions.

    Only what a forward reads of rows without branches is kept. ValueError for branches, which may go on from inside of
    a prompt.
    """
    if batch.previous is not None:
        raise ValueError("a row with branches cannot be read with another prompt")
    completions = [slice(*ends) for ends in zip(prompt_lengths(batch), batch.attention_mask.sum(1), strict=True)]
    rows = [
        (int(batch.group_ids[b]), prompt[prompt >= 0].tolist(), batch.token_ids[b, own].tolist())
        for b, (prompt, own) in enumerate(zip(prompts_BP, completions, strict=True))
    ]
    result = batch_of_rows(rows)
    for b, own in enumerate(completions):  # not all of a completion's tokens are sampled
        result.loss_mask[b, result.loss_mask[b].clone()] = batch.loss_mask[b, own]
    return replace(result, rewards=batch.rewards)
