"""Folders of killed processes are removed, those of living ones are not."""

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlft.system.locks import ABANDONED_WITHOUT_LOCKS_S, OWNED, owned_folder, sweep

REPOSITORY = Path(__file__).parents[3]
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


def test_a_folder_goes_with_the_block(temporary):
    with owned_folder() as folder:
        (folder / "file").touch()
        assert folder.parent == temporary
        sweep()
        assert (folder / "file").exists()
    assert list(temporary.iterdir()) == []


def test_a_killed_owners_folder_is_swept_and_a_living_ones_is_not(temporary):
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        sweep()
        assert (folder / "tests.py").exists()
        owner.kill()
        owner.wait()
        assert (folder / "tests.py").exists()
        sweep()
        assert list(temporary.iterdir()) == []


def test_a_link_is_not_followed(temporary):
    (temporary / "mine").mkdir()
    (temporary / f"{OWNED}link").symlink_to(temporary / "mine")
    sweep()
    assert (temporary / "mine").is_dir()


def test_folders_of_other_users_are_left(temporary, monkeypatch):
    (temporary / f"{OWNED}abc").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep()
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
