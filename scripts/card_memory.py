"""The memory of a whole CUDA GPU while something runs, as the driver counts it: all processes, contexts and caches."""

from __future__ import annotations

import shutil
import subprocess
import threading
from types import TracebackType

EVERY = 200
"""Milliseconds between two readings."""
MIB = 2**20
TO_STOP = 10
"""Seconds that nvidia-smi may take to end."""


class CardMemory:
    """Inside it, the first GPU is watched; `peak` is the most that was taken, in bytes, less what was at the start.

    peak: None where nvidia-smi is not there, or says nothing.
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self._first: int | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> CardMemory:
        program = shutil.which("nvidia-smi")
        if program is not None:
            query = ["--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--loop-ms={EVERY}"]
            self._process = subprocess.Popen(
                [program, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(TO_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(TO_STOP)
        self._reader.join(TO_STOP)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.strip().isdigit():
                continue
            used = int(line) * MIB
            if self._first is None:
                self._first = used
            self.peak = max(self.peak or 0, used - self._first)
