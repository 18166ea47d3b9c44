"""What takes long says how far it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlft.system.terminal import CHECKED, EVERY_S, with_progress


def clock_of(seconds: float) -> Callable[[], float]:
    """Goes on by so many seconds each time that it is looked at."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds
        return now

    return clock


def test_a_line_now_and_then_says_how_much_is_done_and_how_long_it_still_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = 4 * CHECKED
    # The clock is looked at once at the start and after every 256 items: 6 s each, so a line after 512 and after 1024.
    assert list(with_progress(range(number), "data.path: reading x", 2 * number, lambda item: 2, clock_of(6.0))) == [
        *range(number)
    ]
    # After 512 of 1024 items 12 s have passed, and as many are still to come.
    assert capsys.readouterr().err.splitlines() == [
        "data.path: reading x: 50 %, about 12 s more",
        "data.path: reading x: 100 %, about 0 s more",
    ]


def test_what_takes_a_few_seconds_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(with_progress(range(4 * CHECKED), "x", 4 * CHECKED, clock=clock_of(EVERY_S / 5)))) == 4 * CHECKED
    assert capsys.readouterr().err == ""
