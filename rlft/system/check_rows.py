"""The rows of what is checked before a run: a machine by `rlft doctor`, rewards by `rlft reward try`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """The verdict of a row.

    `slow` works, but wastes time or leaves something unused; `limit` is not wrong by itself, but has to be known;
    `skipped` could not be tried.
    """

    ok = "ok"
    slow = "slow"
    limit = "limit"
    wrong = "wrong"
    skipped = "skipped"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A row of the table."""

    name: str
    status: Status
    value: str  # what was measured, in words; in a skipped row, the reason
    remedy: str = ""  # what to do; empty if the row is ok
    numbers: Mapping[str, float] = field(default_factory=dict)  # {name: measured number}, with the unit in the name
