"""Errors of the disk, in one line each."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_one_test import each

from rlft.system import disk
from rlft.system.disk import DiskError, blame_key, errno_of, explained, failure_of, size_text, writing
from rlft.types import UserError


@pytest.fixture
def free(monkeypatch):
    """A disk with 1,000 blocks free of 4,096 bytes, and files to come."""
    space = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_files=10, f_favail=5)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    return space


def failed(error, needed=10_000_000, again="rlft resume run"):
    with pytest.raises(DiskError) as caught, explained(again), writing(Path("run/checkpoints/step_000002"), needed):
        raise error
    return str(caught.value)


def test_it_says_folder_bytes_needed_bytes_free_and_what_to_do(free):
    assert failed(OSError(errno.ENOSPC, "x")) == (
        "the disk is full (No space left on device): run/checkpoints needs 10.0 MB for step_000002 and has 4.1 MB free;"
        " free 5.9 MB or more there, then resume with: rlft resume run"  # 10,000,000 - 1,000 x 4,096
    )
    assert failed(OSError(errno.ENOSPC, "x"), None, None) == (
        "the disk is full (No space left on device): run/checkpoints/step_000002 has 4.1 MB free;"
        " free some space there, then repeat the command"
    )
    free.f_favail = 0
    assert failed(OSError(errno.ENOSPC, "x")).startswith("the disk has room for no more files (inodes) (No space left")
    assert [size_text(n) for n in (1, 1000, 1001)] == ["1 kB", "1 kB", "2 kB"], "rounded up"


@pytest.mark.parametrize("code", [*disk.FAILING, errno.ENOENT, errno.EXDEV, errno.EMFILE])
def test_every_error_while_writing_is_one_line_with_its_name(code, free):
    line = failed(OSError(code, "x"))
    assert f"({os.strerror(code)}): run/checkpoints" in line
    assert ("needs 10.0 MB" in line, "4.1 MB free" in line) == (code in disk.OF_SPACE, code == errno.ENOSPC)
    assert ("run/checkpoints could" in line) == (code == errno.ENOENT), "the folder that is gone, not the file in it"
    assert ("free 10.0 MB or more" in line) == (code == errno.EDQUOT), "what others have free is not the quota's"
    assert line.endswith(", then resume with: rlft resume run")
    assert "{" not in line
    assert "\n" not in line


@each(
    "error",
    [
        Exception("File too large (os error 27)"),  # tokenizers
        RuntimeError("Error while serializing: I/O error: File too large (os error 27)"),  # safetensors
        shutil.Error([("a", "b", "[Errno 27] File too large: 'a' -> 'b'")]),
        OSError(errno.EFBIG, "File too large"),
    ],
)
def test_libraries_say_it_in_words(error):
    assert errno_of(error) == errno.EFBIG
    assert "raise the limit (ulimit -f unlimited), then resume" in failed(error)


@each("error", [ValueError("x"), KeyError("[Errno] 28"), ConnectionResetError(104, "x"), OSError("x")])
def test_other_errors_go_on_as_they_are(error):
    with pytest.raises(type(error)) as caught, explained("again"), writing(Path("x"), 1):
        raise error
    assert caught.value is error
    assert failure_of(error) is None


def test_where_nobody_said_what_was_written_only_what_surely_is_the_disk_is_told_so():
    assert failure_of(FileNotFoundError(errno.ENOENT, "x", "data.jsonl")) is None  # something was to be read
    assert failure_of(PermissionError(errno.EPERM, "x")) is None  # of a process, say
    full = failure_of(OSError(errno.ENOSPC, "x"), Path("run"))
    assert full.target == Path("run")
    named = failure_of(PermissionError(errno.EACCES, "x", "run/metrics.jsonl"))
    assert named.target == Path("run/metrics.jsonl")


def test_a_part_is_told_with_what_the_whole_needs(free):
    with pytest.raises(DiskError) as caught, writing(Path("all"), 9_000_000), writing(Path("part")):
        raise OSError(errno.ENOSPC, "x")
    assert (caught.value.target, caught.value.needed) == (Path("all"), 9_000_000)


def test_a_name_that_cannot_be_written_is_a_mistake_and_a_full_disk_is_none():
    with pytest.raises(UserError, match="out: cannot be written \\(Permission denied\\), got x"), blame_key("out"):  # noqa: SIM117
        with writing(Path("x")):
            raise OSError(errno.EACCES, "x")
    with pytest.raises(DiskError), blame_key("out"), writing(Path("x")):
        raise OSError(errno.ENOSPC, "x")
