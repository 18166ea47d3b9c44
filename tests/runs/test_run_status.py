"""How a run stands: said by itself while it lives, and seen from the lock when it could say nothing."""

import contextlib
import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlft.runs import run_folder, run_status
from rlft.runs.run_status import Status
from rlft.system.disk import DiskError
from rlft.system.locks import UNSUPPORTED

HOLD = """
import sys, time
from pathlib import Path
from rlft.runs import run_folder, run_status
folder = Path(sys.argv[1])
with run_folder.held(folder), run_status.recording_status(folder, 3):
    print("held", flush=True)
    time.sleep(60)
"""


def test_it_is_running_inside_and_finished_or_interrupted_afterwards(tmp_path):
    for interrupted, status in ((False, Status.finished), (True, Status.interrupted)):
        with run_folder.held(tmp_path), run_status.recording_status(tmp_path, 3) as ending:
            assert run_status.read(tmp_path) == (Status.running, "")
            ending.interrupted = interrupted
        assert run_status.read(tmp_path) == (status, "")


@pytest.mark.parametrize(("error", "expected"), [
    (KeyboardInterrupt(), (Status.interrupted, "")),
    (RuntimeError("the loss is nan\nin step 3"), (Status.stopped, "the loss is nan")),
    (ValueError(), (Status.stopped, "ValueError")),
])  # fmt: skip
def test_what_ended_it_is_told_and_goes_on(error, expected, tmp_path):
    with pytest.raises(type(error)), run_status.recording_status(tmp_path, 3):
        raise error
    assert run_status.read(tmp_path) == expected


def test_one_that_was_killed_is_known_by_its_lock(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    assert run_status.read(tmp_path) == (Status.running, "")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert run_status.read(tmp_path) == (Status.killed, "")
    with run_folder.held(tmp_path):
        pass  # asking leaves the lock free


DAMAGED = (Status.unknown, "status.json is damaged")


@pytest.mark.parametrize(("text", "expected"), [
    (None, (Status.unknown, "status.json cannot be read (No such file or directory)")),
    *((text, DAMAGED) for text in ("", "[]", '{"status": "asleep"}', '{"reason": "x"}', '{"status": "fin')),
])  # fmt: skip
def test_what_says_nothing_is_told_apart_from_what_is_damaged(text, expected, tmp_path):
    if text is not None:
        (tmp_path / run_status.FILE).write_text(text)
    assert run_status.read(tmp_path) == expected
    with run_folder.held(tmp_path):
        assert run_status.read(tmp_path)[0] is Status.running


def test_a_full_disk_has_room_for_why_it_stopped(tmp_path, monkeypatch):
    """The file is as large as it has to be before the disk is full, and is written in place."""
    reason = "the disk is full: " + "x" * 800

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    size = 0
    with contextlib.suppress(RuntimeError), run_status.recording_status(tmp_path, 3):
        size = (tmp_path / run_status.FILE).stat().st_size
        monkeypatch.setattr(Path, "write_bytes", full)
        raise RuntimeError(reason)
    assert run_status.read(tmp_path) == (Status.stopped, reason)
    assert (tmp_path / run_status.FILE).stat().st_size <= size
    assert run_status.num_steps(tmp_path) == 3
    with pytest.raises(DiskError), run_status.recording_status(tmp_path / "new", 3):
        pass  # nothing to write in place of


def test_without_locks_a_run_goes_on_and_says_what_cannot_be_known(tmp_path, monkeypatch, capsys):
    for code in UNSUPPORTED:

        def refuse(*args, code=code):
            raise OSError(code, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)
        with run_folder.held(tmp_path), run_status.recording_status(tmp_path, 3):
            assert run_status.read(tmp_path) == (Status.running, run_status.NO_LOCKS)
        assert run_status.read(tmp_path) == (Status.finished, "")
        assert "has no locks: nothing keeps a second process out of this run" in capsys.readouterr().err
        with run_folder.held(tmp_path, "sweep"):
            assert "nothing keeps a second process out of this sweep" in capsys.readouterr().err
