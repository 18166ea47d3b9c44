"""Measures the time in which this process could run, so that time limits do not pass while it is stopped.

The system's clock continues while a process is stopped (SIGSTOP, Ctrl-Z, `docker pause`, a scheduler that suspends
jobs). So a waiting process reads the clock every TICK_S seconds, and a longer time between two readings counts as
COUNTED_S. While a machine is suspended, its monotonic clock stops anyway.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

TICK_S = 0.1
"""Seconds between readings of the clock."""
COUNTED_S = 0.3
"""The most seconds that count between two readings; above TICK_S, so that a busy machine does not count as a pause."""


class RunningTime:
    """A clock that starts at 0: `clock()` returns the seconds so far, if it is called every TICK_S."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def __call__(self) -> float:
        self.since_last()
        return self._seconds

    def since_last(self, *, at_least: float = 0.0) -> float:
        """The running seconds since the last call; at least `at_least` count, if that many have passed."""
        now = time.monotonic()
        passed = min(now - self._last, max(COUNTED_S, at_least))
        self._last = now
        self._seconds += passed
        return passed


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False if the system does not say."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return status.rpartition(b") ")[2][:1] in (b"T", b"t")
