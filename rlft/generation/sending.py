"""A published version on its way to engines: in buckets to other processes, as a folder to engines that read files.

No process holds a second copy of a model, and no folder is written twice: an engine that has seen a path may answer
from what it has cached.

A bucket is the bytes of a safetensors file. A version that fits in one, as most adapters do, is one plain file; else a
tensor may be in several buckets, and the files' metadata say which part of it each has. The digest that goes with a
bucket is the SHA-256 of all bytes of the version up to its end, so that a bucket that is lost, changed or out of order
is seen at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rlft.system import locks
from rlft.system.device import BUCKET, buckets, on_host
from rlft.system.disk import BLOCK, writing
from rlft.system.lazy import torch
from rlft.types import Adapter

PARTS = "parts"  # the key of a file's metadata with [name, first element, shape] of each part in it, in their order


class Part(NamedTuple):
    """Consecutive elements of a tensor; with all of them, `values` has the tensor's shape."""

    name: str
    values: torch.Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.values.numel() == math.prod(self.shape)

    @property
    def is_last(self) -> bool:
        return self.start + self.values.numel() == math.prod(self.shape)

    def write_into(self, tensor: torch.Tensor) -> None:
        """Writes the elements into the tensor that they are a part of, however that lies in memory."""
        if self.is_whole:
            tensor.copy_(self.values)
            return
        flat = tensor.reshape(-1)  # a view, or of a tensor that does not lie in a row a copy
        flat[self.start : self.start + self.values.numel()] = self.values
        if not tensor.is_contiguous():
            tensor.copy_(flat.view_as(tensor))


class Outgoing:
    """A version as the run's own process sends it; `len` is its number of buckets. It keeps the newest bucket.

    adapter: the version. A bucket is made when it is sent, so the weights must stay as they are for as long as
    engines may load the version.
    share: gives what is sent to several engines in place of a bucket's bytes.
    """

    def __init__(self, adapter: Adapter, share: Callable[[bytes], Any]) -> None:
        self.number, self.config = adapter.version, dict(adapter.config)
        self._weights, self._share = list(adapter.weights.items()), share
        self._buckets = buckets([tensor for _, tensor in self._weights], BUCKET) or [[]]
        self._arrived = hashlib.sha256()
        self._digests: list[str] = []
        self._made: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self._buckets)

    def bucket(self, number: int) -> Any:
        """The bucket of this number as it is sent; each is asked for after the one before it."""
        if self._made is None or self._made[0] != number:
            self._made = None
            file = self._file(number)
            if number == len(self._digests):
                self._arrived.update(file)
                self._digests.append(self._arrived.hexdigest())
            self._made = number, self._share(file)
        return self._made[1]

    def sha256(self, number: int) -> str:
        """Of all bytes up to the end of this bucket, as they were when it was first sent."""
        return self._digests[number]

    def _file(self, number: int) -> bytes:
        from safetensors.torch import save

        tensors, layout = {}, []
        for index, start, stop in self._buckets[number]:
            name, tensor = self._weights[index]
            tensor = tensor.detach()
            values = tensor if stop - start == tensor.numel() else tensor.reshape(-1)[start:stop]
            tensors[name] = values
            layout.append((name, start, tuple(tensor.shape)))
        # One key: several would be in any order, and a bucket that is made again would be other bytes.
        return save(on_host(tensors), metadata={"format": "pt"} if len(self) == 1 else {PARTS: json.dumps(layout)})


def parts_of(file: bytes) -> list[Part]:
    """What is in a bucket."""
    from safetensors.torch import load

    tensors, end = load(file), 8 + int.from_bytes(file[:8], "little")
    layout = json.loads(file[8:end]).get("__metadata__", {}).get(PARTS)
    whole = [(name, 0, tensor.shape) for name, tensor in tensors.items()]
    return [
        Part(name, tensors[name], start, tuple(shape))
        for name, start, shape in (whole if layout is None else json.loads(layout))
    ]


class Assembly:
    """Puts tensors together from parts that come in their order, in several calls."""

    def __init__(self) -> None:
        self._begun: torch.Tensor | None = None

    def whole(self, parts: Iterable[Part]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of those that are whole now."""
        for part in parts:
            if part.is_whole:
                yield part.name, part.values
                continue
            if part.start == 0:
                self._begun = part.values.new_empty(part.shape)
            assert self._begun is not None, "the digest says that no earlier bucket is missing"
            part.write_into(self._begun)
            if part.is_last:
                yield part.name, self._begun
                self._begun = None


class Incoming:
    """What has arrived of a version; `weights` is {name: tensor} of what is kept of it, to be loaded together."""

    def __init__(self) -> None:
        self._arrived, self._assembly, self._buckets = hashlib.sha256(), Assembly(), 0
        self.weights: dict[str, torch.Tensor] = {}

    @property
    def sha256(self) -> str:
        return self._arrived.hexdigest()

    def count(self, file: bytes) -> int:
        """Adds a bucket to the digest; returns how many there are."""
        self._arrived.update(file)
        self._buckets += 1
        return self._buckets

    def keep(self, file: bytes) -> None:
        self.weights |= self._assembly.whole(parts_of(file))


PREFIX = "rlft-published-"


class AdapterFiles:
    """Writes adapter versions into one private folder and removes it on close, at exit, or (after a crash) next time.

    The folder's name holds the process id, for people; its lock tells whether its owner is alive.

    parent: where the private folder is made. None: `/dev/shm` where it is a writable memory file system, else the
    system's temporary folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = memory_folder() if parent is None else parent
        locks.sweep(PREFIX, parent)
        owned = ExitStack()
        self.root = owned.enter_context(locks.owned_folder(f"{PREFIX}{os.getpid()}-", parent))
        self._finalizer = weakref.finalize(self, owned.close)
        self._count = 0

    def write(self, adapter: Adapter) -> Path:
        """A new folder with `adapter_model.safetensors` and `adapter_config.json`; `remove` it when out of use."""
        from safetensors.torch import save_file

        self._count += 1
        folder = self.root / f"{self._count}-v{adapter.version}"
        weights = on_host(adapter.weights)  # the file format refuses tensors that share storage
        config = json.dumps(dict(adapter.config), default=_plain)
        with writing(folder, sum(w.numel() * w.element_size() for w in weights.values()) + 3 * BLOCK):
            folder.mkdir()
            save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            (folder / "adapter_config.json").write_text(config, encoding="utf-8")
        return folder

    def remove(self, folder: Path) -> None:
        """Deletes one version's folder."""
        assert folder.parent == self.root, folder
        shutil.rmtree(folder)

    def close(self) -> None:
        """Deletes everything. Safe to call twice."""
        self._finalizer()


def memory_folder() -> Path:
    """`/dev/shm` where it can be written to, else the folder for temporary files."""
    shared_memory = Path("/dev/shm")
    usable = shared_memory.is_dir() and os.access(shared_memory, os.W_OK | os.X_OK)
    return shared_memory if usable else Path(tempfile.gettempdir())


def _plain(value: object) -> Any:
    """PEFT keeps some fields as sets."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"adapter_config.json cannot hold a {type(value).__name__}: {value!r}")
