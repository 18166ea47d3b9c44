"""Versions in buckets: all bits arrive, what is lost or changed is seen, and nobody holds a second copy."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from rlft.generation import sending
from rlft.generation.sending import Assembly, Incoming, Outgoing, Part, parts_of
from rlft.types import Adapter

SIZE = 100
"""Bytes of a bucket."""


def weights() -> dict[str, Tensor]:
    """Tensors larger and smaller than a bucket, of several dtypes, also views that do not lie in a row."""
    numbers = torch.arange(60.0)
    return {
        "layers.10.b": numbers[:6].clone(),
        "layers.2.a": numbers.view(6, 10).t(),
        "scalar": torch.tensor(3.0),
        "half": torch.arange(70, dtype=torch.bfloat16).view(7, 10),
        "wide": torch.arange(9, dtype=torch.float64),
        "last": numbers[6:8],
    }


def sent(tensors: dict[str, Tensor], version: int = 1) -> tuple[Outgoing, list[bytes]]:
    outgoing = Outgoing(Adapter(version=version, weights=tensors, config={}), lambda file: file)
    return outgoing, [outgoing.bucket(number) for number in range(len(outgoing))]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "BUCKET", SIZE)


def test_all_bits_arrive_in_their_order(small: None) -> None:
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


def test_no_bucket_is_larger_than_its_limit_nor_any_tensor_that_is_made_for_it(small: None) -> None:
    _, files = sent(weights())
    for file in files:
        assert len(file) - 8 - int.from_bytes(file[:8], "little") <= SIZE
        for part in parts_of(file):
            assert part.values.untyped_storage().nbytes() <= SIZE


def test_the_buckets_before_the_newest_one_are_not_kept(small: None) -> None:
    class Kept(list[bytes]):
        alive = 0

        def __init__(self, file: bytes) -> None:
            super().__init__([file])
            Kept.alive += 1

        def __del__(self) -> None:
            Kept.alive -= 1

    outgoing = Outgoing(Adapter(version=1, weights=weights(), config={}), Kept)
    for number in range(len(outgoing)):
        assert outgoing.bucket(number) is outgoing.bucket(number), "it is made once for all engines that wait for it"
        assert Kept.alive == 1


def test_a_bucket_that_is_made_again_is_the_same_bytes(small: None) -> None:
    """For an engine that starts later; the order of a dictionary of the library's is random."""
    [files, *others] = [sent(weights())[1] for _ in range(20)]
    assert all(other == files for other in others)


def test_a_version_that_fits_in_one_bucket_is_a_plain_safetensors_file() -> None:
    tensors = {"b": torch.ones(2, 3), "a": torch.zeros(4)}
    outgoing, files = sent(tensors)
    assert files == [save(tensors, metadata={"format": "pt"})]
    assert outgoing.sha256(0) == hashlib.sha256(files[0]).hexdigest()


def test_a_version_without_tensors_is_one_bucket() -> None:
    _, [file] = sent({})
    assert parts_of(file) == []


def test_lost_changed_and_exchanged_buckets_give_another_digest(small: None) -> None:
    outgoing, files = sent(weights())

    def digests(arriving: list[bytes]) -> list[str]:
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


def test_weights_that_move_after_they_were_first_sent_have_another_digest_than_the_version(small: None) -> None:
    tensors = weights()
    outgoing, _ = sent(tensors)
    before = outgoing.sha256(0)
    tensors["layers.10.b"][0] = 9.0
    assert hashlib.sha256(outgoing.bucket(0)).hexdigest() != before == outgoing.sha256(0)


def test_a_part_is_written_into_a_tensor_however_that_lies() -> None:
    for place in (torch.zeros(2, 3), torch.zeros(3, 2).t()):
        Part("a", torch.tensor([1.0, 2.0, 3.0]), 2, (2, 3)).write_into(place)
        assert place.tolist() == [[0, 0, 1], [2, 3, 0]]
