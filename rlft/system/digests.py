"""SHA-256 of files, plain values and tensors, as hex digits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def of_json(value: Any) -> str:
    """Of a value as JSON gives it back: tuples are lists and keys are text, whatever their order."""
    plain = json.loads(json.dumps(value, default=str))
    return of_bytes(json.dumps(plain, sort_keys=True).encode())


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and bits, in the order of the names."""
    import torch

    from rlft.system.device import to_cpu

    digest = hashlib.sha256()
    for name, tensor in sorted(to_cpu(tensors).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def of_each(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """{part: the digest of its tensors}."""
    return {part: of_tensors(tensors) for part, tensors in parts.items()}
