"""A teacher's log-probs of the student's tokens, in passes without gradient, at temperature 1.

It reads the rows that the student wrote: the same packed rows as the reference, or, with a hint, rows whose prompt is
another one and whose completion is the same. One that an engine computes gets each row by itself, and of a conversation
that forks each path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlft.batch import select
from rlft.model.branches import paths_of
from rlft.model.forward import Forward
from rlft.model.packing import PackedRows, prompt_lengths
from rlft.types import Batch


class TeacherEngine(Protocol):
    """A teacher that is no network in the trainer's hands."""

    def logprobs(
        self, rows: Sequence[Sequence[int]], top_k: int, vocabulary: int
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each row of T tokens: log-probs of its tokens but the first `[T - 1]`, the top_k most likely tokens in the
        place of each (int64 `[T - 1, K]`), and theirs `[T - 1, K]`; at temperature 1, float32, on the CPU.

        vocabulary: tokens from this one on are not among the most likely.
        """
        ...


def teacher_logprobs(
    forward: Forward,
    micro: Batch,
    layout: PackedRows | None,
    *,
    top_k: int,
    vocabulary: int,
    token_budget: int,
) -> dict[str, Tensor]:
    """{field of a Batch: float32 `[B, T]`, with top_k also int64 and float32 `[B, T, K]`}, 0 outside the completions.

    Args:
        forward: of the teacher, whose adapter is the active one if it has one.
        micro: rows that fit the token budget of the student's forward.
        layout: of these rows, where they are packed already.
        top_k: of how many of its most likely tokens the teacher is asked, 0 for none.
        vocabulary: tokens from this one on are not among them.
        token_budget: the most tokens that enter the teacher's network at a time.
    """
    read = micro if micro.teacher_prompts is None else with_other_prompts(micro, micro.teacher_prompts)
    if read is micro and forward.packed == (layout is not None):
        return _in_one_pass(forward, micro, layout, top_k, vocabulary)
    made: dict[str, Tensor] = {}
    for part in forward.micro_batches(read, torch.arange(len(read.rewards)), token_budget):
        rows = select(read, part)
        for name, values in _in_one_pass(forward, rows, None, top_k, vocabulary).items():
            whole = made.setdefault(name, values.new_zeros(*micro.token_ids.shape, *values.shape[2:]))
            of_part = select(micro, part).loss_mask
            placed = whole[part]
            placed[of_part] = values[rows.loss_mask]  # of each row the sampled tokens are the same, in the same order
            whole[part] = placed
    return made


def teacher_logprobs_by_engine(
    engine: TeacherEngine, batch: Batch, *, top_k: int, vocabulary: int
) -> dict[str, Tensor]:
    """As `teacher_logprobs`, of these rows together; a row without a sampled token is not asked for."""
    read = batch if batch.teacher_prompts is None else with_other_prompts(batch, batch.teacher_prompts)
    paths = None if read.previous is None else paths_of(read)
    linear = read if paths is None else paths.batch
    lengths, sampled_rows = linear.attention_mask.sum(1).tolist(), linear.loss_mask.any(1).nonzero()[:, 0].tolist()
    rows = [linear.token_ids[b, : lengths[b]].tolist() for b in sampled_rows]
    shape, device = linear.token_ids.shape, linear.token_ids.device
    made = {"teacher_logprobs": torch.zeros(shape, device=device)}
    if top_k:
        made["teacher_top_k_ids"] = torch.zeros(*shape, top_k, dtype=torch.int64, device=device)
        made["teacher_top_k_logprobs"] = torch.zeros(*shape, top_k, device=device)
    for b, row_logprobs in zip(sampled_rows, engine.logprobs(rows, top_k, vocabulary), strict=True):
        for values, of_row in zip(made.values(), row_logprobs, strict=False):  # without top_k the log-probs alone
            values[b, 1 : lengths[b]] = of_row
    result = {}
    for name, values in made.items():
        of_rows = values if paths is None else paths.fold(values)
        result[name] = of_rows.new_zeros(*batch.token_ids.shape, *values.shape[2:])
        result[name][batch.loss_mask] = of_rows[read.loss_mask]  # the sampled tokens are the same, in the same order
    return result


def _in_one_pass(
    forward: Forward, batch: Batch, layout: PackedRows | None, top_k: int, vocabulary: int
) -> dict[str, Tensor]:
    if not top_k:
        return {"teacher_logprobs": forward(batch, 1.0, layout=layout).logprobs.float()}
    logprobs, ids, of_ids = forward.most_likely(batch, top_k, vocabulary, layout)
    return {
        "teacher_logprobs": logprobs.float(),
        "teacher_top_k_ids": ids,
        "teacher_top_k_logprobs": of_ids.float(),
    }


def with_other_prompts(batch: Batch, prompts_BP: Tensor) -> Batch:
    """The rows with these prompts (int64 `[B, P]`, -1 after their end) before the same completions.

    Only what a forward reads of rows without branches is kept.

    Raises:
        ValueError: a row has branches, which may go on from inside of its prompt.
    """
    if batch.previous is not None:
        raise ValueError("a row with branches cannot be read with another prompt")
    own_B, lengths_B = prompt_lengths(batch), batch.attention_mask.sum(1)
    others_B = (prompts_BP >= 0).sum(1)
    shape = len(own_B), int((others_B + lengths_B - own_B).max())
    ids, attention = batch.token_ids.new_zeros(shape), batch.attention_mask.new_zeros(shape)
    sampled = batch.loss_mask.new_zeros(shape)
    for b, (own, length, other) in enumerate(zip(own_B.tolist(), lengths_B.tolist(), others_B.tolist(), strict=True)):
        end = other + length - own
        ids[b, :other] = prompts_BP[b, :other]
        ids[b, other:end] = batch.token_ids[b, own:length]
        sampled[b, other:end] = batch.loss_mask[b, own:length]
        attention[b, :end] = True
    return Batch(
        token_ids=ids,
        attention_mask=attention,
        loss_mask=sampled,
        sampled_logprobs=batch.sampled_logprobs.new_zeros(shape),
        rewards=batch.rewards,
        group_ids=batch.group_ids,
    )
