"""How a run left its loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The number of steps that a run has finished, and whether it ended before its last one."""

    step: int
    interrupted: bool
