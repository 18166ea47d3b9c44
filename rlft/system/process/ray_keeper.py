"""The process that holds the Ray which a run has started, and ends all of Ray once the run has ended, in any way.

`python -m rlft.system.process.ray_keeper` serves the connection whose descriptor is its only argument: it receives the
arguments of `ray.init`, starts Ray, and sends its address. The end of the connection is the end of the run. It leads a
session (setsid) of its own, to which all of Ray's processes belong: neither Ctrl-C nor a closed terminal
reaches them, and none is missed at the end. If the keeper itself is killed, the kernel ends Ray's servers with it, as
Ray has requested, and they end their workers.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

POLL_S = 1.0
END_S = 10.0
"""Seconds that the system may take to end processes that were killed."""


def main() -> None:
    connection, parent = Connection(int(sys.argv[1])), os.getppid()
    options: dict[str, Any] = connection.recv()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        import ray

        context: Any = ray.init(**options)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has set a handler, but the run may still be saving
        connection.send({"address": context.address_info["gcs_address"]})
        while os.getppid() == parent and not connection.poll(POLL_S):  # until the run has closed its end, or has ended
            pass
    except Exception as error:  # Ray's errors have no common type; the run reports them
        with suppress(OSError):
            connection.send({"problem": f"{type(error).__name__}: {error}"})
    finally:
        end_session(os.getpid())
        shutil.rmtree(options["_temp_dir"], ignore_errors=True)
        os._exit(0)


def end_session(session: int, seconds: float = END_S) -> None:
    """Kills all processes of a session except its leader, also those that start meanwhile; waits for their end."""
    deadline = time.monotonic() + seconds
    while (pids := members_of(session)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def members_of(session: int) -> list[int]:
    """The ids of the live processes of a session, except its leader's."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, _, _, process_session = file.read_text().rpartition(") ")[2].split()[:4]
            if int(process_session) == session and state not in "ZX" and (pid := int(file.parent.name)) != session:
                pids.append(pid)
    return pids


if __name__ == "__main__":
    main()
