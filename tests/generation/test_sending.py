"""A version on its way to engines: what arrives in buckets, and folders, of which nothing stays behind."""

import errno
import hashlib
import itertools
import json
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save

from rlft.generation import sending
from rlft.generation.sending import PREFIX, AdapterFiles, Assembly, Incoming, Outgoing, Part, memory_folder, parts_of
from rlft.system.disk import DiskError
from rlft.system.locks import sweep
from rlft.types import Adapter

SIZE = 100
"""Bytes of a bucket."""


def weights():
    """Tensors larger and smaller than a bucket, of several dtypes, also views that do not lie in a row."""
    numbers = torch.arange(60.0)
    return {
        "layers.10.b": numbers[:6].clone(), "layers.2.a": numbers.view(6, 10).t(), "scalar": torch.tensor(3.0),
        "half": torch.arange(70, dtype=torch.bfloat16).view(7, 10), "wide": torch.arange(9, dtype=torch.float64),
        "last": numbers[6:8],
    }  # fmt: skip


def sent(tensors, version=1):
    outgoing = Outgoing(Adapter(version=version, weights=tensors, config={}), lambda file: file)
    return outgoing, [outgoing.bucket(number) for number in range(len(outgoing))]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sending, "BUCKET", SIZE)


def test_all_bits_arrive_in_their_order(small):
    """24 + 240 + 4 bytes, 140, 72 and 8, of one dtype in a bucket of 100: 3 + 2 + 1 + 1."""
    outgoing, files = sent(weights())
    assert len(files) == 7
    assembly = Assembly()
    arrived = [pair for file in files for pair in assembly.whole(parts_of(file))]
    assert [name for name, _ in arrived] == list(weights())
    for name, tensor in arrived:
        assert tensor.dtype == weights()[name].dtype
        assert torch.equal(tensor, weights()[name]), name
    assert outgoing.sha256(6) == hashlib.sha256(b"".join(files)).hexdigest()
    # Made again for an engine that starts later, it is the same bytes; the order of the library's dictionary is random.
    assert all(sent(weights())[1] == files for _ in range(20))
    for file in files:
        assert len(file) - 8 - int.from_bytes(file[:8], "little") <= SIZE
        assert all(part.values.untyped_storage().nbytes() <= SIZE for part in parts_of(file))


def test_the_buckets_before_the_newest_one_are_not_kept(small):
    class Kept(list[bytes]):
        alive = 0

        def __init__(self, file):
            super().__init__([file])
            Kept.alive += 1

        def __del__(self):
            Kept.alive -= 1

    outgoing = Outgoing(Adapter(version=1, weights=weights(), config={}), Kept)
    for number in range(len(outgoing)):
        assert outgoing.bucket(number) is outgoing.bucket(number), "it is made once for all engines that wait for it"
        assert Kept.alive == 1


def test_a_version_that_fits_in_one_bucket_is_a_plain_safetensors_file():
    tensors = {"b": torch.ones(2, 3), "a": torch.zeros(4)}
    outgoing, files = sent(tensors)
    assert files == [save(tensors, metadata={"format": "pt"})]
    assert outgoing.sha256(0) == hashlib.sha256(files[0]).hexdigest()
    assert [parts_of(file) for file in sent({})[1]] == [[]], "one bucket also without tensors"


def test_lost_changed_and_exchanged_buckets_give_another_digest(small):
    outgoing, files = sent(weights())

    def digests(arriving):
        incoming = Incoming()
        return [incoming.sha256 for file in arriving if incoming.count(file)]

    expected = [outgoing.sha256(number) for number in range(len(files))]
    assert digests(files) == expected
    assert len(set(expected)) == len(files)
    changed = files[1][:-1] + bytes([files[1][-1] ^ 1])
    for arriving in (files[:1] + files[2:], [files[0], changed, *files[2:]], [files[1], files[0], *files[2:]]):
        found = digests(arriving)
        first = next(i for i, file in enumerate(arriving) if file != files[i])
        assert found[:first] == expected[:first]
        assert all(a != b for a, b in itertools.zip_longest(found[first:], expected[first : len(found)]))


def test_weights_that_move_after_they_were_first_sent_have_another_digest_than_the_version(small):
    tensors = weights()
    outgoing, _ = sent(tensors)
    before = outgoing.sha256(0)
    tensors["layers.10.b"][0] = 9.0
    assert hashlib.sha256(outgoing.bucket(0)).hexdigest() != before == outgoing.sha256(0)


def test_a_part_is_written_into_a_tensor_however_that_lies():
    for place in (torch.zeros(2, 3), torch.zeros(3, 2).t()):
        Part("a", torch.tensor([1.0, 2.0, 3.0]), 2, (2, 3)).write_into(place)
        assert place.tolist() == [[0, 0, 1], [2, 3, 0]]


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapter(version, value):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": {"q_proj", "k_proj"}}
    return Adapter(version=version, weights={NAME: torch.full((2, 3), value)}, config=config)


@pytest.fixture
def files(tmp_path):
    files = AdapterFiles(tmp_path)
    yield files
    files.close()


def test_an_adapter_is_written_under_the_names_peft_reads(files, tmp_path):
    folder = files.write(adapter(17, 0.5))
    torch.testing.assert_close(load_file(folder / "adapter_model.safetensors")[NAME], torch.full((2, 3), 0.5))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config == {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["k_proj", "q_proj"]}
    files.remove(folder)
    assert files.write(adapter(17, 0.5)) != folder, "no path is used twice even for the same version"
    storage = torch.arange(6.0)  # views of one storage, and one that is transposed
    weights = {"a": storage.view(2, 3), "b": storage.view(2, 3).T}
    written = load_file(files.write(Adapter(version=0, weights=weights, config={})) / "adapter_model.safetensors")
    assert written["b"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    with pytest.raises(TypeError, match=r"adapter_config\.json cannot hold a Tensor"):
        files.write(Adapter(version=0, weights={}, config={"r": torch.ones(2)}))
    files.close()
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_are_made_in_memory_where_there_is_a_memory_file_system():
    files = AdapterFiles()
    assert files.root.parent == memory_folder()
    assert files.root.name.startswith(f"{PREFIX}{os.getpid()}-")
    files.close()


def test_a_process_that_ends_leaves_no_folder_and_that_of_a_killed_one_is_removed_later(tmp_path):
    """Ended by an exception, and by SIGKILL; a live one keeps its own, also when a child that it has forked ends."""
    fork = "pid = os.fork(); pid or sys.exit(); os.waitpid(pid, 0); print('child gone', flush=True); sys.stdin.read()"
    ways = {"failing": "raise RuntimeError", "killed": "sys.stdin.read()", "live": fork}
    held = {name: holder(tmp_path, then) for name, then in ways.items()}
    told = {name: process.stdout.readline() for name, process in held.items() if process.stdout is not None}
    assert told == dict.fromkeys(ways, "ready\n")

    def owners():
        return {int(folder.name.split("-")[2]) for folder in tmp_path.iterdir()}

    assert held["live"].stdout.readline() == "child gone\n"
    held["killed"].kill()
    held["killed"].wait(timeout=60)
    assert held["failing"].wait(timeout=60) == 1
    assert owners() == {held["killed"].pid, held["live"].pid}
    sweep(PREFIX, tmp_path)
    assert owners() == {held["live"].pid}
    held["live"].communicate("", timeout=60)
    assert owners() == set()


def holder(parent, then):
    """A process that holds adapter files under `parent`, says so, and goes on with `then`."""
    code = "import os, sys; from pathlib import Path; from rlft.generation.sending import AdapterFiles\n"
    code += f"files = AdapterFiles(Path({str(parent)!r})); print('ready', flush=True)\n{then}"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_without_locks_adapters_are_written_and_nobody_elses_are_removed(tmp_path, monkeypatch):
    other = AdapterFiles(tmp_path)
    refusal = OSError(errno.EOPNOTSUPP, "Operation not supported")
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=refusal))
    files = AdapterFiles(tmp_path)
    assert load_file(files.write(adapter(1, 1.0)) / "adapter_model.safetensors")[NAME].sum() == 6
    sweep(PREFIX, tmp_path)
    assert other.root.is_dir()
    files.close()
    other.close()


def test_a_full_memory_file_system_is_named(files, monkeypatch):
    """A container's /dev/shm has 64 MB if nobody asks for more."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=full))
    with pytest.raises(DiskError, match=f"the disk is full .*: {files.root} needs 13 kB for 1-v1 and has"):
        files.write(adapter(1, 1.0))  # 6 numbers and three blocks
