from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from rlft.system import digests


def test_files_and_values_have_the_sha256_of_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert digests.of_file(tmp_path / "file") == digests.of_bytes(b"abc") == hashlib.sha256(b"abc").hexdigest()
    assert digests.of_json({"b": (1, 0.1), 2: None}) == digests.of_json({"2": None, "b": [1, 0.1]})
    assert digests.of_json({"b": 1}) != digests.of_json({"b": 1.0})


def test_tensors_are_told_apart_by_name_dtype_shape_and_every_bit() -> None:
    numbers = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    digest = digests.of_tensors({"a": numbers, "b": torch.tensor(1)})
    assert digests.of_tensors({"b": torch.tensor(1), "a": numbers.t().contiguous().t()}) == digest
    flipped = numbers.view(torch.int32).clone()
    flipped[1, 1] ^= 1
    others = {
        "name": {"c": numbers, "b": torch.tensor(1)},
        "dtype": {"a": numbers.view(torch.int32), "b": torch.tensor(1)},
        "shape": {"a": numbers.view(4), "b": torch.tensor(1)},
        "bit": {"a": flipped.view(torch.float32), "b": torch.tensor(1)},
        "number": {"a": numbers, "b": torch.tensor(0)},
    }
    found = {name: digests.of_tensors(tensors) for name, tensors in others.items()}
    assert digest not in found.values()
    assert len(set(found.values())) == len(others)
    assert digests.of_tensors({"a": torch.zeros(1)}) != digests.of_tensors({"a": -torch.zeros(1)})
