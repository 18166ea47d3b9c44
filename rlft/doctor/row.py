"""A row of `rlft doctor`: what was looked at, how it stands, the measured value, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How a row stands. `slow` works, but wastes time or leaves something unused; `skipped` could not be looked at."""

    ok = "ok"
    slow = "slow"
    wrong = "wrong"
    skipped = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table.

    Args:
        name: what was looked at.
        status: how it stands.
        value: what was measured, in words; of a skipped row the reason.
        remedy: what to do; empty if the row is ok.
        numbers: the measured numbers by name, with their units in the names.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


class NotReadyError(RuntimeError):
    """Something that this check needs is not there, because an earlier check failed; the message is the reason."""


def judged(name: str, value: str, remedy: str, numbers: Mapping[str, float], *, wrong: bool, slow: bool = False) -> Row:
    """The row of a measurement: wrong, else slow, else ok, in which case it needs no remedy."""
    status = Status.wrong if wrong else Status.slow if slow else Status.ok
    return Row(name=name, status=status, value=value, remedy="" if status is Status.ok else remedy, numbers=numbers)
