"""What may explain numbers that differ: each change is one other setting, or one known bug, tried by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rlft.commands.audit.other_trainers.credit import expected_mask
from rlft.commands.audit.other_trainers.settings import LossType, Settings
from rlft.commands.audit.other_trainers.steps import Lacking, LoggedUpdate, Step
from rlft.system.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

NO_CLIP = 1e9
"""A clip range whose upper end no ratio reaches."""
Recorded = TypeVar("Recorded")
Applied = Callable[[Step, Settings], tuple[Step, Settings]]


@dataclass(frozen=True, slots=True)
class Change:
    """Another way to compute; `apply` raises Lacking where a step has nothing to apply it to."""

    name: str
    apply: Applied


def of_rewards(settings: Settings) -> Iterator[Change]:
    """What may explain totals."""
    yield from _settings(settings, [{"reward_weights": None}])


def of_advantages(settings: Settings) -> Iterator[Change]:
    """What may explain advantages."""
    yield from _settings(settings, [{"scale_rewards": value} for value in ("group", "batch", "none")])
    yield from _settings(settings, [{"std": value} for value in ("sample", "population")])
    yield from _settings(settings, [{"eps": value} for value in (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)])
    both = ("sum_then_normalize", "normalize_then_sum")
    yield from _settings(settings, [{"multi_objective_aggregation": value} for value in both])
    yield from _settings(settings, [{"reward_weights": None}])
    yield _groups("groups that begin a row too early", lambda ids: ids.roll(-1))
    yield _groups("groups that begin a row too late", lambda ids: ids.roll(1))
    yield _groups("groups of rows that do not stand together", _interleaved)
    yield _groups("all rows of the step as one group", torch.zeros_like)
    yield from (
        _groups(f"num_generations={size}", lambda ids, size=size: _smaller(ids, size)) for size in (2, 4, 8, 16)
    )
    yield _advantages("advantages of the row before", lambda values: values.roll(-1))
    yield _advantages("advantages of the row after", lambda values: values.roll(1))
    yield _advantages("advantages with the other sign", lambda values: -values)


def of_masks(settings: Settings) -> Iterator[Change]:
    """What may explain masks, and losses that were computed with other masks."""
    other = not settings.mask_truncated_completions
    yield Change(f"mask_truncated_completions={str(other).lower()}", lambda step, s: _truncated(step, s, other))
    yield _counted("padding counted", lambda step: step.after_prompt)
    yield _counted("prompt tokens counted", lambda step: _of(step.completion) | _of_prompt(step))
    yield Change("tokens of tools counted", lambda step, s: _with_mask(step, replace(step, tool_mask=None), s))
    yield _counted("each completion's last token not counted", lambda step: _cut(step, -1))
    yield _counted("each completion's first token not counted", lambda step: _cut(step, 1))
    yield _counted("one token too many counted", lambda step: _of(step.completion) | _shifted(_of(step.completion), 1))


def of_losses(settings: Settings) -> Iterator[Change]:
    """What may explain losses, KLs and shares of clipped tokens."""
    yield from _settings(settings, [{"loss_type": value} for value in LossType])
    yield from _settings(settings, [{"importance_sampling_level": value} for value in ("token", "sequence")])
    ranges = [(0.1, None), (0.2, None), (0.3, None), (0.2, 0.28), (3e-4, 4e-4)]
    yield from _settings(settings, [{"epsilon": low, "epsilon_high": high} for low, high in ranges])
    yield from _settings(settings, [{"epsilon_high": None}, {"delta": None}, {"delta": 3.0}, {"beta": 0.0}])
    yield from _settings(settings, [{"epsilon": settings.clip_high, "epsilon_high": settings.epsilon}])
    yield Change("ratios that are not clipped", lambda step, s: (step, replace(s, epsilon=1.0, epsilon_high=NO_CLIP)))
    yield from _settings(settings, [{"kl_estimator": value} for value in ("k1", "k2", "k3", "k3_unbiased")])
    yield Change("old_logprobs that are those of the update", _same_policy)
    yield Change("old_logprobs of the row before", lambda step, s: _other_old(step, s, 1))
    yield Change("old_logprobs of the row after", lambda step, s: _other_old(step, s, -1))
    other = not settings.averages_micro_batches
    yield from _settings(settings, [{"divide_by_micro_batches": other}])
    yield Change("max_completion_length of the longest completion", _longest)
    yield _advantages("advantages of the row before in the step", lambda values: values.roll(1))
    yield _advantages("advantages of the row after in the step", lambda values: values.roll(-1))
    yield _credited("advantages of the row before in the micro-batch", lambda rows: rows.roll(1))
    yield _credited("advantages of the row after in the micro-batch", lambda rows: rows.roll(-1))
    yield _advantages("advantages with the other sign", lambda values: -values)
    yield from of_masks(settings)


# -- settings ----------------------------------------------------------------------------------------------------------
def _settings(settings: Settings, others: list[dict[str, Any]]) -> Iterator[Change]:
    for other in others:
        changed = replace(settings, **other)
        if _used(changed) != _used(settings):
            name = " ".join(f"{key}={_word(value)}" for key, value in other.items())
            yield Change(name, lambda step, _, changed=changed: (step, changed))


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _used(settings: Settings) -> Settings:
    """Settings that mean the same are the same."""
    return replace(settings, epsilon_high=settings.clip_high, divide_by_micro_batches=settings.averages_micro_batches)


# -- groups and advantages ---------------------------------------------------------------------------------------------
def _groups(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return Change(name, lambda step, s: (replace(step, group_ids=change(step.group_ids)), s))


def _interleaved(ids: Tensor) -> Tensor:
    return torch.arange(len(ids)) % len(ids.unique())


def _smaller(ids: Tensor, size: int) -> Tensor:
    if len(ids) % size:
        raise Lacking("groups of that size do not fit")
    return torch.arange(len(ids)) // size


def _advantages(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Logged advantages (of the losses: those that are multiplied) as a function of the right ones."""

    def apply(step: Step, settings: Settings) -> tuple[Step, Settings]:
        if step.advantages is None:
            raise Lacking("advantage is not recorded of all completions")
        return replace(step, advantages=change(step.advantages)), settings

    return Change(name, apply)


def _credited(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def update(each: LoggedUpdate) -> LoggedUpdate:
        batches = _of(each.batches)
        return replace(each, batches=[replace(batch, credited=change(batch.rows)) for batch in batches])

    return Change(name, lambda step, s: (replace(step, updates=[update(each) for each in step.updates]), s))


# -- masks -------------------------------------------------------------------------------------------------------------
def _of(recorded: Recorded | None) -> Recorded:
    if recorded is None:
        raise Lacking("not recorded of all completions")
    return recorded


def _of_prompt(step: Step) -> Tensor:
    return torch.arange(step.after_prompt.shape[1]) < step.prompt_entries


def _shifted(mask: Tensor, by: int) -> Tensor:
    """The mask with all entries moved to the right, or to the left; what comes in is False."""
    empty = torch.zeros_like(mask[:, :1])
    return torch.cat([empty, mask[:, :-1]], 1) if by > 0 else torch.cat([mask[:, 1:], empty], 1)


def _cut(step: Step, by: int) -> Tensor:
    return _of(step.completion) & _shifted(_of(step.completion), by)


def _counted(name: str, change: Callable[[Step], Tensor]) -> Change:
    """Other tokens in the place of the completions'."""
    return Change(name, lambda step, s: _with_mask(step, replace(step, completion=change(step)), s))


def _with_mask(step: Step, changed: Step, settings: Settings) -> tuple[Step, Settings]:
    """The step with the mask of the changed one in place of the recorded one."""
    return replace(step, right_mask=expected_mask(changed, settings)), settings


def _truncated(step: Step, settings: Settings, value: bool) -> tuple[Step, Settings]:
    changed = replace(settings, mask_truncated_completions=value)
    return _with_mask(step, step, changed)


# -- losses ------------------------------------------------------------------------------------------------------------
def _same_policy(step: Step, settings: Settings) -> tuple[Step, Settings]:
    return replace(step, old_is_current=True), settings


def _longest(step: Step, settings: Settings) -> tuple[Step, Settings]:
    longest = int(_of(step.completion).sum(-1).max())
    return step, replace(settings, max_completion_length=max(longest, 1))


def _other_old(step: Step, settings: Settings, by: int) -> tuple[Step, Settings]:
    return replace(step, old=_of(step.old).roll(by, 0)), settings
