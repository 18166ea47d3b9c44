"""Calls into libraries that know no limit."""

import threading
import time

import pytest

from rlft.system.time_limit import within


def test_what_comes_back_in_time_is_returned_or_raised() -> None:
    assert within(60.0, max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0)


def test_a_call_that_does_not_come_back_is_left_alone() -> None:
    released = threading.Event()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^no answer in 0\.2 s$"):
        within(0.2, released.wait, 60)
    assert time.monotonic() - begun < 30
    released.set()


def test_a_pause_uses_up_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by an hour, as where the process was stopped; a jump counts as 0.3 s."""
    real, jump = time.monotonic, [0.0]
    monkeypatch.setattr("rlft.system.running_time.time.monotonic", lambda: real() + jump[0])

    def paused() -> str:
        time.sleep(0.25)  # once the clock has begun
        jump[0] = 3600.0
        time.sleep(0.3)
        return "done"

    assert within(60.0, paused) == "done"
