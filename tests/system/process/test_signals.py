"""What programs tell is asked again where a signal to the whole job may have ended them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from rlft.system.process import signals


def disturb() -> None:
    signals.note(signal.SIGTERM, None)


def disturb_soon() -> None:
    """The signal reaches this process after the program."""
    threading.Timer(signals.SKEW_S / 5, disturb).start()


@pytest.mark.parametrize("signal_comes", [disturb, disturb_soon])
@pytest.mark.parametrize("raises", [False, True])
def test_a_trial_is_repeated_until_no_signal_has_come_beside_it(signal_comes: Callable[[], None], raises: bool) -> None:
    calls = []

    @signals.undisturbed
    def trial() -> int:
        calls.append(len(calls))
        if len(calls) < 3:
            signal_comes()
            if raises:
                raise OSError("the program was ended")
        return calls[-1]

    assert trial() == 2


def test_without_a_signal_a_trial_fails_once() -> None:
    calls = []

    @signals.undisturbed
    def trial() -> None:
        calls.append("called")
        raise OSError("there is no such program")

    with pytest.raises(OSError, match="no such program"):
        trial()
    assert calls == ["called"]
