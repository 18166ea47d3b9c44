from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from rlft.system.files import digest_of_bytes, digest_of_file, digest_of_json, digest_of_tensors


def test_files_and_values_have_the_sha256_of_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert digest_of_file(tmp_path / "file") == digest_of_bytes(b"abc") == hashlib.sha256(b"abc").hexdigest()
    assert digest_of_json({"b": (1, 0.1), 2: None}) == digest_of_json({"2": None, "b": [1, 0.1]})
    assert digest_of_json({"b": 1}) != digest_of_json({"b": 1.0})


def test_tensors_are_told_apart_by_name_dtype_shape_and_every_bit() -> None:
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
