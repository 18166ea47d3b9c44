"""Locks: held by one, seen by others, told apart from none at all."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlft.system.locks import ABANDONED_WITHOUT_LOCKS_S, OWNED, UNSUPPORTED, Taken, is_held, owned_folder, sweep, take


def opened(file):
    return os.open(file, os.O_RDWR | os.O_CREAT)


def test_one_holds_it_and_who_looks_writes_nothing(tmp_path):
    file = tmp_path / "lock"
    assert is_held(file) is False
    assert not file.exists()
    holder, other = opened(file), opened(file)
    file.chmod(0o444)
    assert take(holder) is Taken.yes
    assert take(other, tries=2) is Taken.no
    assert is_held(file) is True
    os.close(holder)
    assert is_held(file) is False
    assert take(other) is Taken.yes
    os.close(other)


def test_those_who_look_hinder_neither_each_other_nor_who_tries_again(tmp_path, monkeypatch):
    file = tmp_path / "lock"
    looking, taking = opened(file), opened(file)
    assert take(looking, shared=True) is Taken.yes
    assert is_held(file) is False
    assert take(taking) is Taken.no
    monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
    assert take(taking, tries=2) is Taken.yes
    os.close(looking)
    os.close(taking)


@pytest.mark.parametrize("code", [*UNSUPPORTED, errno.ESTALE])
def test_a_file_system_without_locks_is_no_lock_that_is_held_and_a_disk_that_fails_is_neither(
    code, tmp_path, monkeypatch
):
    handle = opened(tmp_path / "lock")

    def refuse(*args):
        raise OSError(code, "x")

    monkeypatch.setattr(fcntl, "flock", refuse)
    if code == errno.ESTALE:
        with pytest.raises(OSError, match=f"Errno {code}"):
            take(handle)
    else:
        assert take(handle, tries=5) is Taken.unsupported
    assert is_held(tmp_path / "lock") is None
    os.close(handle)


# -- temporary folders of processes ------------------------------------------------------------------------------------
REPOSITORY = Path(__file__).parents[2]
OWNER = """
import time
from rlft.system.locks import owned_folder
with owned_folder() as folder:
    (folder / "tests.py").write_text("assert True")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_killed_owners_folder_is_swept_and_a_living_ones_is_not(temporary):
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        folder = Path(owner.stdout.readline().strip())
        sweep()
        assert (folder / "tests.py").exists()
        owner.kill()
        owner.wait()
        assert (folder / "tests.py").exists()
        sweep()
        assert list(temporary.iterdir()) == []


def test_a_living_owners_folder_links_and_folders_of_others_are_left(temporary, monkeypatch):
    (temporary / "mine").mkdir()
    (temporary / f"{OWNED}link").symlink_to(temporary / "mine")
    with owned_folder() as folder:
        (folder / "file").touch()
        assert folder.parent == temporary
        sweep()
        assert (folder / "file").exists()
    assert {path.name for path in temporary.iterdir()} == {"mine", f"{OWNED}link"}, "it goes with the block"
    (temporary / f"{OWNED}abc").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep()
    assert (temporary / "mine").is_dir()
    assert (temporary / f"{OWNED}abc").is_dir()


def test_without_locks_a_folder_is_made_and_only_old_ones_are_swept(temporary, monkeypatch):
    asked = []

    def refuse(*args):
        asked.append(args)
        assert len(asked) < 9, "it asks for ever"
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with owned_folder() as folder:
        young, old = temporary / f"{OWNED}young", temporary / f"{OWNED}old"
        for other in (young, old):
            other.mkdir()
        os.utime(old, (0, time.time() - ABANDONED_WITHOUT_LOCKS_S - 1))
        sweep()
        assert sorted(temporary.iterdir()) == sorted([folder, young])
