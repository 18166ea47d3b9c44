"""The classes that run in actors of Ray: one holds the object of a member, one serves a machine's logs to another."""

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

from rlft.system.process.serve import Answer, failure, named, packed


class Place(NamedTuple):
    """Where a member is; `log` is the file of its output on that machine."""

    node: str
    host: str
    pid: int
    log: str


class Host:
    """A member's process. Answers are bytes (`serve.packed`), so that exceptions of any class can be sent."""

    def __init__(self, name: str, log: str, node: str, paths: Sequence[str]) -> None:
        """Sends the process's output to the log, or to a file of this machine if the log is on another one."""
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
        """Makes the object; an error in making it becomes the answer to every call."""
        try:
            self._held, self._failed = named(factory)(**arguments), None
        except Exception as error:  # raised by the factory; it becomes the answer to every call
            self._failed = failure(error)

    def call(self, method: str, *args: Any, **kwargs: Any) -> bytes:
        if self._failed is not None:
            return packed(self._failed)
        try:
            return packed(Answer(value=getattr(self._held, method)(*args, **kwargs)))
        except Exception as error:  # raised by the object; it is raised again in the calling process
            return packed(failure(error))


class LogReader:
    """Reads files of its machine for the run's own machine."""

    def read(self, file: str, start: int, most: int) -> bytes:
        """At most `most` bytes of a file after the first `start`; empty if there is no such file."""
        with suppress(OSError), Path(file).open("rb") as stream:
            stream.seek(start)
            return stream.read(most)
        return b""


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
