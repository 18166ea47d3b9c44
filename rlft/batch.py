"""Rows of tokens as tensors, padded on the right: a Batch of groups and their scores; a model's log-probs of rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlft.types import MAX_SCORE, Batch, Completion, Group, Rollout, Scores, StepScores, counted

T = TypeVar("T")

Decode = Callable[[Sequence[int]], str]  # decodes token ids to text, as in `Completion.text`

Row = tuple[int, Sequence[int], Sequence[int]]
"""(group, prompt ids, completion ids). Rows of a group with the same prompt share its forward where possible."""


def collate(groups: Sequence[Group], scores: Scores, decode: Decode) -> Batch:
    """The `[B, T]` view of a step, B in the order of groups and their rollouts; group_ids are positions in `groups`.

    Token ids are the engine's own: text is never tokenised again. If steps were scored, `decode` finds the last token
    of each.

    Raises ValueError: a completion is wrong (`fault`), its tokens don't decode to the text that was scored, or the
    rewards of turns are not kept apart from those of completions.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        if (problem := fault(rollout.completion)) is not None:
            raise ValueError(f"the generator gave a completion of prompt {rollout.prompt.id} {problem}")
    numbered = ((number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts)
    rows = [(number, rollout.prompt.token_ids, rollout.completion.token_ids) for number, rollout in numbered]
    batch = batch_of_rows(rows)
    for b, rollout in enumerate(rollouts):
        start, mask = len(rollout.prompt.token_ids), rollout.completion.mask
        said = slice(start, start + len(rollout.completion.token_ids))
        batch.sampled_logprobs[b, said] = torch.tensor(rollout.completion.logprobs)
        if mask is not None:
            batch.loss_mask[b, said] = torch.tensor(mask, dtype=torch.bool)
    shape = len(rows), batch.token_ids.shape[1]
    rewards_BK, weights_BK = single_rewards(scores)
    token_rewards_BT = step_ends_BT = None
    turn_ends_BT = ends_of_turns(rollouts, shape)
    turns_have_rewards = any(turn.reward is not None for r in rollouts for turn in r.completion.turns)
    if turns_have_rewards and scores.outcome is None:
        raise ValueError("turns have rewards, and the scores do not say which part of the total is of completions")
    if scores.steps is not None or turn_ends_BT is not None:  # turns may have rewards, also where these have none
        token_rewards_BT, step_ends_BT = step_rewards(groups, scores.steps, shape, decode)
    return replace(
        batch,
        rewards=(scores.total if scores.outcome is None else scores.outcome).flatten().double(),
        each_reward=rewards_BK,
        each_weight=weights_BK,
        token_rewards=token_rewards_BT,
        step_ends=step_ends_BT,
        turn_ends=turn_ends_BT,
        previous=previous_columns(rollouts, shape),
        truncated=torch.tensor([r.completion.finish_reason.is_limit for r in rollouts]),
        experts=experts_of(rollouts, shape),
    )


def batch_of_rows(rows: Sequence[Row]) -> Batch:
    """The Batch of these rows, on the CPU; sampled log-probs and rewards, which they do not have, are 0."""
    lengths_B1 = torch.tensor([[len(prompt) + len(completion)] for _, prompt, completion in rows])
    starts_B1 = torch.tensor([[len(prompt)] for _, prompt, _ in rows])
    token_ids_BT = pad_sequence(
        [torch.tensor([*prompt, *completion], dtype=torch.int64) for _, prompt, completion in rows], batch_first=True
    )
    columns_T = torch.arange(token_ids_BT.shape[1])
    attention_mask_BT = columns_T < lengths_B1
    return Batch(
        token_ids=token_ids_BT,
        attention_mask=attention_mask_BT,
        loss_mask=attention_mask_BT & (columns_T >= starts_B1),
        sampled_logprobs=torch.zeros(token_ids_BT.shape),
        rewards=torch.zeros(len(rows)),
        group_ids=torch.tensor([group for group, _, _ in rows]),
    )


def experts_of(rollouts: Sequence[Rollout], shape: tuple[int, int]) -> Tensor | None:
    """The experts that the engine has chosen, `[B, T, layers, k]`; None if it has not said any."""
    noted = [rollout.completion.experts for rollout in rollouts]
    first = next((torch.tensor(experts) for experts in noted if experts is not None), None)
    if first is None:
        return None
    experts_BTLK = first.new_full((*shape, *first.shape[1:]), unknown_expert(first.dtype))
    for b, experts in enumerate(noted):
        if experts is not None:
            experts_BTLK[b, : len(experts)] = torch.tensor(experts)
    return experts_BTLK


def unknown_expert(dtype: torch.dtype) -> int:
    """The number that stands for no expert."""
    return torch.iinfo(dtype).max


def single_rewards(scores: Scores) -> tuple[Tensor | None, Tensor | None]:
    """(each reward by itself, without its weight; the weights), both `[B, K]` float64; None where there is no reward.

    Rewards of weight 0 are only looked at and are left out.
    """
    weights = {name: scores.weights.get(name, 1.0) for name in scores.by_reward}
    columns = [scores.by_reward[name].flatten().double() for name, weight in weights.items() if weight]
    if not columns:
        return None, None
    rewards_BK = torch.stack(columns, -1)
    weights_K = torch.tensor([weight for weight in weights.values() if weight], dtype=torch.float64)
    return rewards_BK, weights_K.expand_as(rewards_BK)


def ends_of_turns(rollouts: Sequence[Rollout], shape: tuple[int, int]) -> Tensor | None:
    """Whether a turn ends with the token, `[B, T]` bool; None if no completion says where its turns end."""
    if not any(rollout.completion.turns for rollout in rollouts):
        return None
    ends_BT = torch.zeros(shape, dtype=torch.bool)
    for b, rollout in enumerate(rollouts):
        start = len(rollout.prompt.token_ids)
        ends_BT[b, [start + turn.end - 1 for turn in rollout.completion.turns]] = True
    return ends_BT


def previous_columns(rollouts: Sequence[Rollout], shape: tuple[int, int]) -> Tensor | None:
    """The column of the token that is read before each, `[B, T]` int64, -1 before the first; None without branches.

    Raises ValueError: a branch leaves its prompt before the prompt's first token.
    """
    if not any(rollout.completion.branches for rollout in rollouts):
        return None
    previous_BT = torch.arange(-1, shape[1] - 1).repeat(shape[0], 1)
    for b, rollout in enumerate(rollouts):
        start = len(rollout.prompt.token_ids)
        for branch in rollout.completion.branches:
            if start + branch.after < 0:
                problem = f"with a branch after token {branch.after} of {start}"
                raise ValueError(f"the generator gave a completion of prompt {rollout.prompt.id} {problem}")
            previous_BT[b, start + branch.start] = start + branch.after
    return previous_BT


def fault(completion: Completion) -> str | None:
    """What is wrong with a completion that an engine or an environment made, as a phrase; None if nothing is."""
    size, mask, ends = len(completion.token_ids), completion.mask, [turn.end for turn in completion.turns]
    if len(completion.logprobs) != size:
        return f"{counted(len(completion.logprobs), 'log-prob')} for {counted(size, 'token')}"
    if mask is not None and len(mask) != size:
        return f"a mask of {counted(len(mask), 'entry')} for {counted(size, 'token')}"
    if mask is not None and any(value for value, own in zip(completion.logprobs, mask, strict=True) if not own):
        return "a log-prob other than 0 for a token that was not sampled"
    if any(end <= before for before, end in pairwise([0, *ends])) or (ends and ends[-1] > size):
        return f"turns that end with tokens {ends} of {size}"
    if mask is not None and any(not mask[end - 1] for end in ends):
        return f"a turn whose last token was not sampled, among those that end with tokens {ends}"
    starts = [branch.start for branch in completion.branches]
    if any(start <= before for before, start in pairwise([0, *starts])) or (starts and starts[-1] >= size):
        return f"branches that begin with tokens {starts} of {size}"
    if starts and mask is not None and not any(mask[: starts[0]]):
        return "a branch before anything was sampled"
    if any(branch.after > branch.start - 2 for branch in completion.branches):  # one before would be no branch
        return f"a branch that continues no earlier place, among {list(completion.branches)}"
    rewards = [turn.reward for turn in completion.turns if turn.reward is not None]
    if not all(abs(reward) <= MAX_SCORE for reward in rewards):
        return f"a turn whose reward is no finite number up to {MAX_SCORE:g}, among {rewards}"
    return None


def step_rewards(
    groups: Sequence[Group], steps: Sequence[Sequence[StepScores]] | None, shape: tuple[int, int], decode: Decode
) -> tuple[Tensor, Tensor]:
    """(scores of single steps at their last tokens, `[B, T]` float64; whether a step ends there, `[B, T]` bool).

    A turn that has a reward is a step, too. Scores of steps that end with the same token are added. A step that ends
    where an environment speaks counts for the sampled token before, and one before all of them for the first.
    """
    rewards_BT = torch.zeros(shape, dtype=torch.float64)
    ends_BT = torch.zeros(shape, dtype=torch.bool)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    nothing = StepScores(values=(), ends=())
    step_scores = [nothing] * len(rollouts) if steps is None else [scores for row in steps for scores in row]
    for b, (rollout, scores) in enumerate(zip(rollouts, step_scores, strict=True)):
        start, completion = len(rollout.prompt.token_ids), rollout.completion
        places = last_tokens(completion, scores.ends, decode)
        if places is None:
            problem = "is not what its tokens decode to, so its scored steps cannot be placed"
            raise ValueError(f"the text of a completion of prompt {rollout.prompt.id} {problem}")
        of_steps = zip(sampled_at_or_before(completion, places), scores.values, strict=True)
        of_turns = [(turn.end - 1, turn.reward) for turn in completion.turns if turn.reward is not None]
        for k, value in (*of_steps, *of_turns):
            rewards_BT[b, start + k] += value
            ends_BT[b, start + k] = True
    return rewards_BT, ends_BT


def sampled_at_or_before(completion: Completion, places: Sequence[int]) -> Sequence[int]:
    """For each index of a token the nearest sampled one at or before it; the first sampled one if there is none.

    Where nothing was sampled they stay.
    """
    if completion.mask is None or not any(completion.mask):
        return places
    sampled = [k for k, own in enumerate(completion.mask) if own]
    return [sampled[max(0, bisect_right(sampled, k) - 1)] for k in places]


def last_tokens(completion: Completion, ends: Sequence[int], decode: Decode) -> list[int] | None:
    """For each offset into the text, the index of the first token that completes the text before it; None if none does.

    That is the first k for which `decode(ids[:k+1])` begins with the text before the offset. A character of several
    tokens decodes to a replacement character until the last of them. Bisection takes O(log T) decodes per offset.
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


def to_device(things: T, device: torch.device) -> T:
    """The same with all its tensors on this device, where they get in one transfer, for which nobody waits.

    `things` are batches or other dataclasses, lists or tuples of them, or tensors; what their cached properties have
    computed goes along. Apple's devices have no float64, which becomes float32 there.
    """
    if device.type == "cpu":
        return things
    if device.type == "mps":
        things = _with_tensors(things, lambda tensor: tensor.float() if tensor.dtype == torch.float64 else tensor)
    found: list[Tensor] = []
    _with_tensors(things, lambda tensor: found.append(tensor) or tensor)
    moved = iter(_in_one_transfer(found, device))
    return _with_tensors(things, lambda _: next(moved))


def _with_tensors(things: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with each of its tensors changed, in a fixed order."""
    if isinstance(things, Tensor):
        return change(things)
    if isinstance(things, (list, tuple)):
        return type(things)([_with_tensors(part, change) for part in things])
    if not is_dataclass(things) or isinstance(things, type):
        return things
    names = [f.name for f in fields(things)]
    made = replace(things, **{name: _with_tensors(getattr(things, name), change) for name in names})
    for name, value in getattr(things, "__dict__", {}).items():
        if name not in names:
            vars(made)[name] = _with_tensors(value, change)
    return made


ALIGNMENT = 64  # bytes: where a tensor may begin in a buffer that holds several of them


def _in_one_transfer(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on the device: views of one buffer, which pinned memory lets the device fetch by itself."""
    starts = [0, *accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def view(whole: Tensor, tensor: Tensor, start: int) -> Tensor:
        return whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    for tensor, start in zip(tensors, starts, strict=False):
        view(buffer, tensor, start).copy_(tensor)
    moved = buffer.to(device, non_blocking=True)
    return [view(moved, tensor, start) for tensor, start in zip(tensors, starts, strict=False)]


def score_sequences(model: Any, sequences: Sequence[Sequence[int]], device: torch.device) -> list[list[float]]:
    """Natural-log probabilities (temperature 1) of all tokens but each sequence's first, in one forward."""
    scored = [rows.gather(-1, ids[1:, None])[:, 0] for ids, rows in _logprobs(model, sequences, device)]
    return [part.tolist() for part in torch.cat(scored).cpu().split([len(score) for score in scored])]


def best_tokens(model: Any, sequences: Sequence[Sequence[int]], device: torch.device) -> list[list[tuple[int, float]]]:
    """(the most likely token, its natural-log probability at temperature 1) in place of all tokens but the first."""
    best = [rows.max(-1) for _, rows in _logprobs(model, sequences, device)]
    return [list(zip(row.indices.tolist(), row.values.tolist(), strict=True)) for row in best]


def _logprobs(model: Any, sequences: Sequence[Sequence[int]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(the ids `[T]` of a sequence, the log-probs `[T-1, V]` of what follows each of them but the last).

    Shorter sequences are padded behind their end, which no token before it sees.
    """
    rows = [torch.tensor(list(ids)) for ids in sequences]
    longest = max(map(len, rows))
    inputs = {"input_ids": pad_sequence(rows, batch_first=True).to(device), "use_cache": False}
    if any(len(row) < longest for row in rows):
        inputs["attention_mask"] = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
    logits = model(**inputs).logits
    for row_logits, ids, row in zip(logits, inputs["input_ids"], rows, strict=True):
        yield ids[: len(row)], row_logits[: len(row) - 1].float().log_softmax(-1)
