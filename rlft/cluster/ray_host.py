"""What runs in an actor of Ray: the object of a member, and what serves the logs of one machine to another."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlft.cluster.serve import Answer, failure, named, packed


class Place(NamedTuple):
    """Where a member is. log: the file of its output on that machine."""

    node: str
    host: str
    pid: int
    log: str


class Host:
    """A member's process. Answers are bytes (`serve.packed`): exceptions of any class come through."""

    def __init__(self, name: str, log: str, node: str, paths: Sequence[str]) -> None:
        """Sends the process's output to the log; where that is another machine's, to a file of this one."""
        import ray

        here: str = ray.get_runtime_context().get_node_id()
        file = (
            Path(log)
            if here == node
            else Path(tempfile.gettempdir()) / f"rlft-{os.getuid()}" / f"{name}-{os.getpid()}.log"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_to(file)
        sys.path.extend(path for path in paths if path not in sys.path and Path(path).is_dir())
        self._place = Place(here, socket.gethostname(), os.getpid(), str(file))
        self._held: Any = None
        self._failed: Answer | None = Answer(error=RuntimeError(f"{name} has not been made"))

    def place(self) -> Place:
        return self._place

    def make(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Makes the object; what goes wrong is the answer of every call."""
        try:
            self._held, self._failed = named(factory)(**arguments), None
        except Exception as error:  # of whatever is made; it is the answer of every call
            self._failed = failure(error)

    def call(self, method: str, *args: Any, **kwargs: Any) -> bytes:
        if self._failed is not None:
            return packed(self._failed)
        try:
            return packed(Answer(value=getattr(self._held, method)(*args, **kwargs)))
        except Exception as error:  # of whatever is held; it is raised again in the process that calls
            return packed(failure(error))


class LogReader:
    """Reads files of its machine for the run's own."""

    def read(self, file: str, start: int, most: int) -> bytes:
        """What follows the first `start` bytes of a file, at most so many bytes; empty if there is no such file."""
        with suppress(OSError), Path(file).open("rb") as stream:
            stream.seek(start)
            return stream.read(most)
        return b""

    def remove(self, file: str) -> None:
        Path(file).unlink(missing_ok=True)


def _write_to(file: Path) -> None:
    """Appends all that this process and its children print to the file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
