"""A row of `rlft doctor`: what was checked, the verdict, the measured value, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """The verdict of a row. `slow` works, but wastes time or leaves something unused; `skipped` could not be run."""

    ok = "ok"
    slow = "slow"
    wrong = "wrong"
    skipped = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """A row of the table.

    Attributes:
        name: what was checked.
        status: the verdict.
        value: what was measured, in words; in a skipped row, the reason.
        remedy: what to do; empty if the row is ok.
        numbers: {name: measured number}, with the unit in the name.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


class NotReadyError(RuntimeError):
    """Something that a check needs is missing, because an earlier check failed; the message is the reason."""


def judged(
    name: str, value: str, remedy: str, numbers: Mapping[str, float], *, wrong: bool, slow: bool = False
) -> CheckRow:
    """The row of a measurement: wrong, else slow, else ok; a row that is ok has no remedy."""
    status = Status.wrong if wrong else Status.slow if slow else Status.ok
    return CheckRow(
        name=name, status=status, value=value, remedy="" if status is Status.ok else remedy, numbers=numbers
    )
