"""Signals: what they end and in which words, and code that holds back those that would break its state."""

import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest
from in_one_test import each
from run_processes import environment
from slow_cases import slow

from rlft.system import interrupt
from rlft.system.interrupt import Deferred, Interrupt, Order, StepAbandoned


@pytest.fixture(autouse=True)
def _ctrl_c_raises():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(places, deliver):
    """Code that a signal interrupts inside a context, with a delivery before its end or without; notes its progress."""
    with Deferred() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        places.append("after the signal")
        if deliver:
            signals.deliver()
        places.append("the end")
    places.append("after the end")


def test_a_signal_waits_until_it_is_delivered_and_until_the_end_at_the_latest():
    for deliver, places in ((True, []), (False, ["the end"])):
        reached = []
        with pytest.raises(KeyboardInterrupt):
            interrupted(reached, deliver)
        assert reached == ["after the signal", *places]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_signal_nothing_is_raised_and_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Deferred() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            signals.deliver()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_leave_the_handlers_alone():
    handlers = []

    def work():
        with Deferred() as signals:
            handlers.append(signal.getsignal(signal.SIGINT))
            signals.deliver()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert handlers == [signal.default_int_handler]


def test_the_signals_of_a_run_are_those_that_schedulers_send():
    names = {number.name for number in interrupt.ENDING}
    assert names == {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"}, "of which another platform may lack some"


@each(
    ("first", "second", "later", "on_signal"),
    itertools.product(interrupt.ENDING, interrupt.ENDING, (False, True), ("step", "now")),
)
def test_every_first_signal_is_a_request_and_a_second_one_an_order(first, second, later, on_signal, monkeypatch):
    """later: the second one comes after the time in which it would repeat the first."""
    for name in ("SAME_S", "SAME_CTRL_C_S"):
        monkeypatch.setattr(Order, name, 0.0 if later else 1000.0)
    monkeypatch.setattr(interrupt, "_end_later", lambda seconds: None)
    said = []
    before, ended = interrupt.signals_received(), ""
    with Interrupt(said.append, on_signal) as pressed:
        pressed.in_step = True
        try:
            os.kill(os.getpid(), first)
            assert pressed.requested
        except StepAbandoned:
            ended = "abandoned"
        assert ended == ("abandoned" if on_signal == "now" else "")
        assert len(said) == 1
        try:
            os.kill(os.getpid(), second)
        except KeyboardInterrupt as error:
            ended = type(error).__name__
    assert ended == ("KeyboardInterrupt" if later else "abandoned" if on_signal == "now" else "")
    assert (len(said), interrupt.signals_received()) == (1, before + 2)


def test_each_press_of_ctrl_c_counts_once_however_often_it_is_sent(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    order, counted = Order(), []
    for now[0] in (5.0, 5.1, 5.2, 9.0, 9.1, 9.29, 9.31, 20.0):
        if not order.is_repeated(signal.SIGINT):
            counted.append(now[0])
    assert counted == [5.0, 9.0, 9.31, 20.0]


# -- signals to a whole job --------------------------------------------------------------------------------------------
def disturb():
    interrupt.note_signal(signal.SIGTERM, None)


def disturb_soon():
    """The signal reaches this process after the program."""
    threading.Timer(interrupt.SKEW_S / 5, disturb).start()


@pytest.mark.parametrize("signal_comes", [disturb, disturb_soon])
@pytest.mark.parametrize("raises", [False, True])
def test_a_trial_is_repeated_until_no_signal_has_come_beside_it(signal_comes, raises):
    calls = []

    @interrupt.undisturbed
    def trial():
        calls.append(len(calls))
        if len(calls) < 3:
            signal_comes()
            if raises:
                raise OSError("the program was ended")
        return calls[-1]

    assert trial() == 2


def test_without_a_signal_a_trial_fails_once():
    calls = []

    @interrupt.undisturbed
    def trial():
        calls.append("called")
        raise OSError("there is no such program")

    with pytest.raises(OSError, match="no such program"):
        trial()
    assert calls == ["called"]


# -- processes that get one --------------------------------------------------------------------------------------------
SWALLOWED = """
import os, signal, time
from rlft.system import interrupt
interrupt.GRACE_S = 0.3
def press():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    except KeyboardInterrupt:
        pass  # as a library might, and a destructor does
"""
# A signal comes when the command line is about to be imported: the first thing that takes any time.
STARTING = """
import os, signal, sys
class Arrives:
    def find_spec(self, name, path=None, target=None):
        if name == "rlft.cli":
            os.kill(os.getpid(), signal.SIGNAL)
sys.meta_path.insert(0, Arrives())
sys.argv = ["rlft", "--version"]
from rlft import main
main()
"""
HEARD = "import signal\nsignal.signal(signal.SIGNAL, signal.SIG_DFL)\n"  # whatever the suite was started by: nohup
IGNORED = "import signal\nsignal.signal(signal.SIGNAL, signal.SIG_IGN)\n"
WRITTEN, BEGUN = (f"rlft: interrupted: nothing was {what}\n" for what in ("written", "begun"))
PROGRAMS = {
    "a command whose library swallows it": (
        f"{SWALLOWED}with interrupt.ends_promptly('nothing was written'):\n    press(); time.sleep(600)",
        130, "", WRITTEN,
    ),
    "a run whose library swallows a second one": (
        SWALLOWED + """
interrupt.Order.SAME_CTRL_C_S = 0.0  # else the second one would count as the first
with interrupt.ends_promptly('nothing was written'), interrupt.Interrupt(lambda text: None) as pressed:
    os.kill(os.getpid(), signal.SIGINT)
    assert pressed.requested
    press(); time.sleep(600)""", 130, "", WRITTEN,
    ),
    "in its own hands": (
        SWALLOWED + """
with interrupt.ends_promptly(''), interrupt.handled_inside():
    press(); time.sleep(interrupt.GRACE_S + 0.5)
print('alive')""", 0, "alive\n", "",
    ),
    # As `timeout` sends SIGTERM, systemd SIGTERM and SIGHUP, and a shell whose connection drops SIGHUP.
    "one order that is sent twice is not a second one": ("""
import os, signal, time
from rlft.system import interrupt
with interrupt.Interrupt(print) as pressed:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
    time.sleep(0.5)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("a second one")
try:
    with interrupt.ends_promptly("kept"):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            print("cleaned up")
except interrupt.Terminated:
    pass
""", 0, "interrupted: ending before a step is begun; once more stops at once\na second one\ncleaned up\n", ""),
    **{f"{name} at the very start": ((HEARD + STARTING).replace("SIGNAL", name), 130, "", BEGUN)
       for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")},
    **{f"{name}, ignored as by nohup": ((IGNORED + STARTING).replace("SIGNAL", name), 0, "rlft", "")
       for name in ("SIGHUP", "SIGUSR1", "SIGUSR2")},
}  # fmt: skip


@pytest.mark.parametrize("name", [slow(name) if name.startswith("a run") else name for name in PROGRAMS])
def test_a_process_ends_by_a_signal_or_goes_on(name):
    code, *expected, said = PROGRAMS[name]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({}), capture_output=True, text=True, timeout=300, check=False
    )
    out = done.stdout[:4] if expected[1] == "rlft" else done.stdout
    assert [done.returncode, out, done.stderr] == [*expected, said]
