"""Published adapters as folders, for engines that read files: a new folder for each version, in memory if possible.

A folder is never written twice: an engine that has seen a path may answer from what it has cached.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlft.system import locks
from rlft.system.device import on_host
from rlft.system.disk import BLOCK, writing
from rlft.types import Adapter

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
