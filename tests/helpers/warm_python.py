"""Workers that are forked from a process which has imported what they need, but computed nothing: it takes no seconds.

    python warm_python.py <descriptor of a socket>

Each message on the socket has the descriptors of a worker's connection and log, and its environment as JSON; the answer
is the worker's process id.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlft.system.process.child import serve


class WarmPython:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def start(
        self, target: str, words: Sequence[str], *, descriptors: Sequence[int], output: int | None, environment: Any
    ) -> Forked:
        assert output is not None, "a worker has a log"
        socket.send_fds(self._socket, [json.dumps(environment).encode()], [*descriptors, output])
        return Forked(int(self._socket.recv(64)))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)


class Forked:
    """A grandchild of this process, whose parent forgets how it ended: in tests by SIGKILL."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return None if Path(f"/proc/{self.pid}").exists() else -signal.SIGKILL

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 0.0)
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return -signal.SIGKILL


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    orders.set_inheritable(False)
    from transformers.models.qwen2 import modeling_qwen2

    import rlft.loop.workers

    _ = modeling_qwen2, rlft.loop.workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which forgets children as they end
    while True:
        message, descriptors, *_ = socket.recv_fds(orders, 65536, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            begin(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def begin(variables: dict[str, str], connection: int, output: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(variables)
    serve(Connection(connection))


if __name__ == "__main__":
    main()
