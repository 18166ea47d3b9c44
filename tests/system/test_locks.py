"""Locks: held by one, seen by others, told apart from none at all."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from rlft.system.locks import UNSUPPORTED, Taken, is_held, take


def opened(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT)


def test_one_holds_it_and_who_looks_writes_nothing(tmp_path: Path) -> None:
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


def test_those_who_look_hinder_neither_each_other_nor_who_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lock"
    looking, taking = opened(file), opened(file)
    assert take(looking, shared=True) is Taken.yes
    assert is_held(file) is False
    assert take(taking) is Taken.no
    monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
    assert take(taking, tries=2) is Taken.yes
    os.close(looking)
    os.close(taking)


@pytest.mark.parametrize("code", UNSUPPORTED)
def test_a_file_system_without_locks_is_no_lock_that_is_held(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = opened(tmp_path / "lock")

    def refuse(*args: object) -> None:
        raise OSError(code, "x")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert take(handle, tries=5) is Taken.unsupported
    assert is_held(tmp_path / "lock") is None
    os.close(handle)


def test_a_disk_that_fails_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = opened(tmp_path / "lock")

    def refuse(*args: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Stale"):
        take(handle)
    assert is_held(tmp_path / "lock") is None
    os.close(handle)
