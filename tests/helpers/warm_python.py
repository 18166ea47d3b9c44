"""Workers that are forked from a process which has imported what they need, but computed nothing, in no time."""

import os
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rlft.system.process.child import END_S, serve
from rlft.system.process.launcher import LocalProcesses, ProcessWorker
from rlft.system.process.worker import WorkerSpec

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["rlft.loop.workers", "transformers.models.qwen2.modeling_qwen2"])


class Forked:
    """A process, as far as rlft asks a `subprocess.Popen`."""

    def __init__(
        self, target: str, words: Sequence[str], *, descriptors: Sequence[int], output: int, environment: Any
    ) -> None:
        # Connections, because multiprocessing sends the descriptors of those.
        streams = [Connection(os.dup(descriptor)) for descriptor in (*descriptors, output)]
        self._process: Any = CONTEXT.Process(target=begin, args=(environment, *streams), daemon=True)
        self._process.start()
        self.pid, self.kill, self._lock = self._process.pid, self._process.kill, threading.Lock()

    def poll(self) -> int | None:
        with self._lock:  # its end is told once
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)


def begin(variables: Mapping[str, str], connection: Connection, output: Connection) -> None:
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.environ.update(variables)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # as a process that begins with it
    serve(connection)


class WarmProcesses(LocalProcesses):
    """A launcher of such workers. started: those that were not released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Forked)  # type: ignore[arg-type]
        self.started: list[ProcessWorker] = []

    def start(self, spec: WorkerSpec) -> ProcessWorker:
        self.started.append(super().start(spec))
        return self.started[-1]

    def release(self) -> None:
        """Ends the workers so far."""
        for worker in self.started:
            worker.kill()
            worker.wait(END_S)
        self.started.clear()
