"""The completions of a recorded step as tensors: float64 `[B]`, `[B, K]` of rewards, `[B, T]` of recorded tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rlft.commands.audit.other_trainers.form import FORM, Completion, Metrics, Recording, Update
from rlft.system.lazy import torch
from rlft.types import UserError, counted, require

if TYPE_CHECKING:
    from torch import Tensor


class Lacking(Exception):
    """Why a number cannot be recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a step in one forward pass: their places `[b]`, and the policy's log-probs `[b, T]`.

    `credited` are the places of the rows whose advantages they have: the same, unless a change says otherwise.
    """

    rows: Tensor
    logprobs: Tensor
    credited: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedUpdate:
    """An update as it was logged; `batches` are None where no log-probs were recorded."""

    place: str
    line: Update
    batches: Sequence[MicroBatch] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of B completions with K rewards each; None is what was not recorded of all of them.

    Attributes:
        rewards: `[B, K]`, NaN where a reward function gave none; None: only totals were recorded.
        completion, after_prompt, tool_mask, mask: bool `[B, T]`: entries of completions; those and the padding after
            them; tokens that no tool wrote; those that the trainer counted.
        old_is_current: whether the trainer compared the policy with itself.
        lacking: why groups are not known.
        right_mask: of a change, the mask to compute with, in place of the one by the settings and of the recorded one.
    """

    number: int
    places: Sequence[str]
    group_ids: Tensor
    rewards: Tensor | None
    totals: Tensor | None
    advantages: Tensor | None
    truncated: Tensor | None
    completion: Tensor | None
    after_prompt: Tensor
    prompt_entries: Tensor
    tool_mask: Tensor | None
    mask: Tensor | None
    old: Tensor | None
    old_is_current: bool
    reference: Tensor | None
    updates: Sequence[LoggedUpdate]
    metrics: Sequence[tuple[str, Metrics]]
    lacking: str | None = None
    right_mask: Tensor | None = None


def steps_of(recording: Recording) -> Iterator[Step]:
    """The steps in the order of their completions. UserError: lines that contradict each other."""
    seen: set[int] = set()
    known = {line.step for _, line in recording.completions}
    updates: dict[int, list[tuple[str, Update]]] = defaultdict(list)
    for place, line in recording.updates:
        problem = "has no completions before or after it"
        require(line.step in known, f"{place}.step", problem, got=line.step, remedy=FORM)
        updates[line.step].append((place, line))
    for number, part in groupby(recording.completions, key=lambda row: row[1].step):
        rows = list(part)
        problem = "its completions do not stand together"
        require(number not in seen, f"{rows[0][0]}.step", problem, got=number, remedy=FORM)
        seen.add(number)
        yield _step(number, rows, updates[number], recording)


def _step(
    number: int,
    rows: Sequence[tuple[str, Completion]],
    updates: Sequence[tuple[str, Update]],
    recording: Recording,
) -> Step:
    lines = [line for _, line in rows]
    width = max(max([line.prompt_entries + (line.num_tokens or 0), *map(len, line.lists().values())]) for line in lines)
    groups = {group: index for index, group in enumerate(dict.fromkeys(line.group for line in lines))}
    names = list(lines[0].rewards or ())
    for place, line in rows:
        same = list(line.rewards or ()) == names
        problem = "are not those of the step's first completion, in its order"
        require(same, f"{place}.rewards", problem, got=", ".join(line.rewards or ()) or None, remedy=FORM)
    weights = recording.settings.reward_weights
    if weights is not None and names:
        problem = f"there must be one for each of {', '.join(names)}"
        require(len(weights) == len(names), "reward_weights", problem, got=list(weights), remedy="give one of each")
    starts = torch.tensor([line.prompt_entries for line in lines]).unsqueeze(-1)
    columns = torch.arange(width)
    lengths = _numbers([line.num_tokens for line in lines])
    recorded = torch.tensor([max([0, *map(len, line.lists().values())]) for line in lines]).unsqueeze(-1)
    olds = [line.old_logprobs for line in lines]
    old_lists = [None if isinstance(old, str) else old for old in olds]
    mask, tool_mask = _lists([line.mask for line in lines], width), _lists([line.tool_mask for line in lines], width)
    truncated = _numbers([line.truncated for line in lines])
    ends = None if lengths is None else starts + lengths.unsqueeze(-1)
    return Step(
        number=number,
        places=[place for place, _ in rows],
        group_ids=torch.tensor([groups[line.group] for line in lines]),
        rewards=_lists([_nan_for_none(line.rewards) for line in lines], len(names)) if names else None,
        totals=_numbers([line.reward for line in lines]),
        advantages=_numbers([line.advantage for line in lines]),
        truncated=None if truncated is None else truncated.bool(),
        completion=None if ends is None else (columns >= starts) & (columns < ends),
        after_prompt=(columns >= starts) & (columns < recorded),
        prompt_entries=starts,
        tool_mask=None if tool_mask is None else tool_mask.bool(),
        mask=None if mask is None else mask.bool(),
        old=_lists(old_lists, width),
        old_is_current=all(old == "current" for old in olds),
        reference=_lists([line.ref_logprobs for line in lines], width),
        updates=[_update(place, line, lines, width) for place, line in updates],
        metrics=[(place, line) for place, line in recording.metrics if line.step == number],
        lacking=recording.lacking.get(number),
    )


def _nan_for_none(rewards: object) -> list[float]:
    assert isinstance(rewards, dict)
    return [float("nan") if value is None else value for value in rewards.values()]


def _numbers(values: Sequence[float | None]) -> Tensor | None:
    known = [value for value in values if value is not None]
    return torch.tensor(known, dtype=torch.float64) if len(known) == len(values) else None


def _lists(values: Sequence[Sequence[float] | None], width: int) -> Tensor | None:
    """`[B, width]`, padded with 0; None where one is missing."""
    known = [[*value, *[0.0] * (width - len(value))] for value in values if value is not None]
    return torch.tensor(known, dtype=torch.float64) if len(known) == len(values) else None


def _update(place: str, line: Update, lines: Sequence[Completion], width: int) -> LoggedUpdate:
    rows = [list(range(len(lines)))] if line.rows is None else [list(batch) for batch in line.rows]
    require(all(rows), f"{place}.rows", "has a micro-batch without completions", remedy=FORM)
    for row in (row for batch in rows for row in batch):
        problem = f"the step has {counted(len(lines), 'completion')}"
        require(row < len(lines), f"{place}.rows", problem, got=row, remedy="count from 0")
    own = line.logprobs
    if own is None:
        tensors = [_lists([lines[row].logprobs for row in batch], width) for batch in rows]
    elif [len(batch) for batch in own] == [len(batch) for batch in rows]:
        for batch, numbers in zip(rows, own, strict=True):
            for row, values in zip(batch, numbers, strict=True):
                least = lines[row].prompt_entries + (lines[row].num_tokens or 0)
                problem = f"completion {row} has {least} to {counted(width, 'entry')}"
                require(least <= len(values) <= width, f"{place}.logprobs", problem, got=len(values), remedy=FORM)
        tensors = [_lists(batch, width) for batch in own]
    else:
        problem = "must have a list for each row of each micro-batch"
        raise UserError(f"{place}.logprobs", problem, got=[len(batch) for batch in own], remedy=FORM)
    pairs = zip(rows, tensors, strict=True)
    known = [_batch(torch.tensor(batch, dtype=torch.int64), values) for batch, values in pairs if values is not None]
    return LoggedUpdate(place=place, line=line, batches=known if len(known) == len(rows) else None)


def _batch(rows: Tensor, logprobs: Tensor) -> MicroBatch:
    return MicroBatch(rows=rows, logprobs=logprobs, credited=rows)
