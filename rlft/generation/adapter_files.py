"""Published adapters as folders, for engines that read files: a new folder for each version, in memory if possible.

A folder is never written twice: an engine that has seen a path may answer from what it has cached.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from rlft.system import locks
from rlft.system.device import on_host
from rlft.system.disk import BLOCK, writing
from rlft.types import Adapter

PREFIX = "rlft-adapters-"
LOCK = "in-use"


class AdapterFiles:
    """Writes adapter versions into one private folder and removes it on close, at exit, or (after a crash) next time.

    The folder's name holds the process id, for people. A file lock tells whether its owner is alive: the kernel drops
    it with the process, `kill -9` included, and no reused id can fool it.

    Args:
        parent: where the private folder is made. None: `/dev/shm` where it is a writable memory file system, else the
            system's temporary folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = memory_folder() if parent is None else parent
        remove_abandoned(parent)
        self.root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        lock, taken = _lock(self.root)
        assert lock is not None, "a folder that was just made is there"
        assert taken is not locks.Taken.no, "a folder that was just made is locked by nobody"
        self._finalizer = weakref.finalize(self, _remove, self.root, lock, os.getpid())
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


def remove_abandoned(parent: Path) -> list[Path]:
    """Folders under `parent` that a killed process of this user left behind; they are deleted."""
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        # There is no lock file yet: its owner is still making the folder.
        if not (folder / LOCK).exists() or folder.stat().st_uid != os.getuid():
            continue
        lock, taken = _lock(folder)
        if lock is None:
            continue
        if taken is locks.Taken.yes:  # where there are no locks, its owner may be alive
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        os.close(lock)
    return removed


def _lock(folder: Path) -> tuple[int | None, locks.Taken]:
    """(the lock's descriptor, whether it was taken); no descriptor where the folder is gone."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None, locks.Taken.no
    return descriptor, locks.take(descriptor)


def _remove(root: Path, lock: int, owner: int) -> None:
    # A forked child inherits the finalizer; only the process that made the folder may delete it.
    if os.getpid() == owner:
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _plain(value: object) -> Any:
    """PEFT keeps some fields as sets."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"adapter_config.json cannot hold a {type(value).__name__}: {value!r}")
