"""Compares what another trainer has logged with what rlft computes, and looks for what explains a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlft.commands.audit.findings import Findings, steps_text
from rlft.commands.audit.other_trainers.changes import Change, of_advantages, of_losses, of_masks, of_rewards
from rlft.commands.audit.other_trainers.credit import advantages, masks, rewards
from rlft.commands.audit.other_trainers.form import read
from rlft.commands.audit.other_trainers.losses import losses, ratios
from rlft.commands.audit.other_trainers.numbers import Compared
from rlft.commands.audit.other_trainers.settings import Settings, Trainer
from rlft.commands.audit.other_trainers.steps import Lacking, Step, steps_of
from rlft.system.crash import one_line
from rlft.types import UserError, counted

Recompute = Callable[[Step, Settings], Iterator[Compared]]


@dataclass(frozen=True, slots=True)
class Check:
    """A kind of numbers, how it is recomputed, and what may explain that it differs."""

    name: str
    recompute: Recompute
    changes: Callable[[Settings], Iterator[Change]]


CHECKS = (
    Check("rewards", rewards, of_rewards),
    Check("advantages", advantages, of_advantages),
    Check("masks", masks, of_masks),
    Check("ratios", ratios, of_losses),
    Check("losses", losses, of_losses),
)


@dataclass(slots=True)
class Result:
    """What came of one check.

    Attributes:
        steps: those of which a number was compared.
        number, differing: how many numbers were compared, and how many of them differ.
        furthest: the largest difference of those that agree.
        first: the first number that differs, in words.
        lacking: {why numbers were not recomputed: of which steps}.
    """

    steps: list[int] = field(default_factory=list)
    number: int = 0
    differing: int = 0
    furthest: float = 0.0
    first: str | None = None
    lacking: dict[str, list[int]] = field(default_factory=dict)


def audit_other(path: Path, trainer: Trainer, given: Mapping[str, Any], findings: Findings) -> None:
    """Adds a row for each kind of numbers. UserError: the files or the settings are not of the form."""
    recording = read(path, trainer, given)
    steps, settings = list(steps_of(recording)), recording.settings
    for check in CHECKS:
        result = compared(check, steps, settings)
        for why, of_steps in result.lacking.items():
            findings.leave_open(check.name, f"{steps_text(of_steps)}: {why}")
        if result.first is not None:
            findings.differ(check.name, f"{result.first}; {explained(check, steps, settings)}")
        elif result.number:
            how = (
                f"{counted(result.number, 'number')} of {steps_text(result.steps)}, at most {result.furthest:.1e} apart"
            )
            numbers = {"numbers": result.number, "furthest": result.furthest}
            findings.confirm(check.name, how, numbers)


def compared(check: Check, steps: Sequence[Step], settings: Settings) -> Result:
    """What comes of a check of all steps with these settings."""
    result = Result()
    for step in steps:
        try:
            numbers = list(check.recompute(step, settings))
        except Lacking as why:
            result.lacking.setdefault(str(why), []).append(step.number)
            continue
        except UserError as error:  # settings that rlft's GRPO refuses
            result.lacking.setdefault(one_line(error), []).append(step.number)
            continue
        for each in numbers:
            _add(result, each)
        if numbers:
            result.steps.append(step.number)
    return result


def _add(result: Result, each: Compared) -> None:
    apart = each.apart
    result.number += len(apart)
    result.differing += int(apart.sum())
    if not apart.all():
        result.furthest = max(result.furthest, float((each.logged - each.expected)[~apart].abs().max()))
    if result.first is None and apart.any():
        index = int(apart.int().argmax())
        logged, expected = float(each.logged[index]), float(each.expected[index])
        result.first = f"{each.places[index]}: {each.name} is {logged:.9g}, recomputed {expected:.9g}"


def explained(check: Check, steps: Sequence[Step], settings: Settings) -> str:
    """Which changes, each by itself, make all numbers agree: the closest first."""
    tried = [(_furthest(check, steps, settings, change), change.name) for change in check.changes(settings)]
    agreeing = sorted((furthest, name) for furthest, name in tried if furthest is not None)
    if not agreeing:
        result = compared(check, steps, settings)
        return f"{result.differing} of {counted(result.number, 'number')} differ, and no single setting explains them"
    return f"all numbers agree with {' or '.join(name for _, name in agreeing)}"


def _furthest(check: Check, steps: Sequence[Step], settings: Settings, change: Change) -> float | None:
    """The largest difference with this change; None: not all numbers agree with it."""
    result = Result()
    for step in steps:
        try:
            numbers = list(check.recompute(*change.apply(step, settings)))
        except (Lacking, UserError):
            if compared(check, [step], settings).number:
                return None
            continue
        for each in numbers:
            _add(result, each)
        if result.differing:
            return None
    return result.furthest if result.number else None
