"""Files that are whole or not there."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch

from rlft.system import files
from rlft.system.disk import DiskError
from rlft.system.files import (
    NOT_FLUSHED,
    append,
    atomic_folder,
    digest_of_bytes,
    digest_of_file,
    digest_of_json,
    digest_of_tensors,
    flush,
    write_atomically,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_text_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    write_atomically(file, "old\n")
    write_bytes = Path.write_bytes

    def half(self, data):
        write_bytes(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        with pytest.raises(DiskError, match="the disk is full"):
            write_atomically(file, "new and longer\n")
    assert (file.read_text(), names(tmp_path)) == ("old\n", ["config.yaml"])
    write_atomically(file, "n\u00fc\n")
    assert file.read_bytes() == "n\u00fc\n".encode()
    assert names(tmp_path) == ["config.yaml"]


class Filling:
    """An unbuffered file that takes three bytes at a time, and so many in all."""

    def __init__(self, stream, room):
        self.stream, self.room = stream, room

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, data):
        taken = min(3, self.room, len(data))
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        return self.stream.write(data[:taken])


def test_a_line_is_appended_as_a_whole_or_not_at_all(tmp_path):
    with (tmp_path / "metrics.jsonl").open("ab", buffering=0) as stream:
        append(stream, b"first\n")
        append(Filling(stream, 8), b"second\n")
        with pytest.raises(DiskError, match=r"needs 5 kB for metrics.jsonl"):  # 6 bytes and a block of 4,096
            append(Filling(stream, 4), b"third\n")
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"first\nsecond\n"
        append(stream, b"fourth\n", durable=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"first\nsecond\nfourth\n"


def test_a_folder_that_cannot_be_renamed_is_refused_by_name(tmp_path, monkeypatch):
    def across(self, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", across)
    with (
        pytest.raises(DiskError, match="its file system cannot rename within a folder"),
        atomic_folder(tmp_path / "out", tmp_path / ".out") as folder,
    ):
        (folder / "file").touch()
    assert names(tmp_path) == []


def test_what_comes_first_in_a_folder_stays_until_the_new_one_is_whole(tmp_path):
    final = tmp_path / "out"
    for number in range(2):
        with atomic_folder(final, tmp_path / ".out", replaces=True) as folder:
            (folder / f"{number}").touch()
    with pytest.raises(ZeroDivisionError), atomic_folder(final, tmp_path / ".out", replaces=True):
        raise ZeroDivisionError
    assert (names(tmp_path), names(final)) == (["out"], ["1"])


@pytest.mark.parametrize("code", [*NOT_FLUSHED, errno.EDQUOT])
def test_file_systems_that_cannot_flush_are_taken_as_they_are_and_those_that_fail_then_have_failed(
    code, tmp_path, monkeypatch
):
    """NFS says only then that it is full."""

    def refuse(handle):
        raise OSError(code, "x")

    monkeypatch.setattr(os, "fsync", refuse)
    if code in NOT_FLUSHED:
        write_atomically(tmp_path / "file", "text")
        assert (tmp_path / "file").read_text() == "text"
        return
    with pytest.raises(DiskError, match="your disk quota is used up"):
        write_atomically(tmp_path / "file", "text")
    assert names(tmp_path) == []
    with pytest.raises(OSError, match="x"):
        flush(tmp_path)


def test_sizes_are_in_whole_blocks(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "below" / "large").write_bytes(bytes(4097))
    assert files.size_of(tmp_path) == 3 * 4096


# -- digests -----------------------------------------------------------------------------------------------------------
def test_files_and_values_have_the_sha256_of_their_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert digest_of_file(tmp_path / "file") == digest_of_bytes(b"abc") == hashlib.sha256(b"abc").hexdigest()
    assert digest_of_json({"b": (1, 0.1), 2: None}) == digest_of_json({"2": None, "b": [1, 0.1]})
    assert digest_of_json({"b": 1}) != digest_of_json({"b": 1.0})


def test_tensors_are_told_apart_by_name_dtype_shape_and_every_bit():
    numbers = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    digest = digest_of_tensors({"a": numbers, "b": torch.tensor(1)})
    assert digest_of_tensors({"b": torch.tensor(1), "a": numbers.t().contiguous().t()}) == digest
    flipped = numbers.view(torch.int32).clone()
    flipped[1, 1] ^= 1
    others = {
        "name": {"c": numbers, "b": torch.tensor(1)},
        "dtype": {"a": numbers.view(torch.int32), "b": torch.tensor(1)},
        "shape": {"a": numbers.view(4), "b": torch.tensor(1)},
        "bit": {"a": flipped.view(torch.float32), "b": torch.tensor(1)},
        "number": {"a": numbers, "b": torch.tensor(0)},
    }
    found = {name: digest_of_tensors(tensors) for name, tensors in others.items()}
    assert digest not in found.values()
    assert len(set(found.values())) == len(others)
    assert digest_of_tensors({"a": torch.zeros(1)}) != digest_of_tensors({"a": -torch.zeros(1)})
