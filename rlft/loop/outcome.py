"""How a run left its loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The steps that a run has done, and whether it ended before its last one."""

    step: int
    interrupted: bool
