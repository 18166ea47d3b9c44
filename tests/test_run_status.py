"""How a run stands: said by itself while it lives, and seen from the lock when it could say nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlft import run_status, runfolder
from rlft.run_status import Status

HOLD = """
import sys, time
from pathlib import Path
from rlft import run_status, runfolder
folder = Path(sys.argv[1])
with runfolder.held(folder), run_status.kept(folder, 3):
    print("held", flush=True)
    time.sleep(60)
"""


def test_it_is_running_inside_and_finished_afterwards(tmp_path: Path) -> None:
    with runfolder.held(tmp_path), run_status.kept(tmp_path, 3):
        assert run_status.read(tmp_path) == (Status.running, "")
    assert run_status.read(tmp_path) == (Status.finished, "")


def test_an_interruption_that_was_told_is_one(tmp_path: Path) -> None:
    with run_status.kept(tmp_path, 3) as ending:
        ending.interrupted = True
    assert run_status.read(tmp_path) == (Status.interrupted, "")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), (Status.interrupted, "")),
        (RuntimeError("the loss is nan\nin step 3"), (Status.stopped, "the loss is nan")),
        (ValueError(), (Status.stopped, "ValueError")),
    ],
)
def test_what_ended_it_is_told_and_goes_on(error: BaseException, expected: tuple[Status, str], tmp_path: Path) -> None:
    with pytest.raises(type(error)), run_status.kept(tmp_path, 3):
        raise error
    assert run_status.read(tmp_path) == expected


def test_one_that_was_killed_is_known_by_its_lock(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert run_status.read(tmp_path) == (Status.running, "")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert run_status.read(tmp_path) == (Status.killed, "")


@pytest.mark.parametrize("text", [None, "", "[]", '{"status": "asleep"}', '{"reason": "x"}'])
def test_a_folder_of_an_older_version_is_finished_if_nobody_holds_it(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / run_status.FILE).write_text(text)
    assert run_status.read(tmp_path) == (Status.finished, "")
    with runfolder.held(tmp_path):
        assert run_status.read(tmp_path)[0] is Status.running


def test_asking_leaves_the_lock_free(tmp_path: Path) -> None:
    (tmp_path / run_status.FILE).write_text(json.dumps({"status": "running"}))
    assert run_status.read(tmp_path)[0] is Status.killed
    with runfolder.held(tmp_path):
        pass
