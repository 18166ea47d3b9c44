"""The process that holds the Ray which a run has started, and ends all of Ray once the run has ended, in any way.

`python -m rlft.system.process.ray_keeper` reads one line of JSON from stdin, the arguments of `ray.init`, starts Ray,
and writes one line of JSON to the descriptor that its only argument names. The end of stdin is the end of the run. It
leads a session (setsid) of its own, to which all of Ray's processes belong: neither Ctrl-C nor a closed terminal
reaches them, and none is missed at the end. If the keeper itself is killed, the kernel ends Ray's servers with it, as
Ray has requested, and they end their workers.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_S = 1.0
END_S = 10.0
"""Seconds that the system may take to end processes that were killed."""


def main() -> None:
    options: dict[str, Any] = json.loads(sys.stdin.readline())
    report, parent, folder = int(sys.argv[1]), os.getppid(), options["_temp_dir"]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        import ray

        context: Any = ray.init(**options)
        address = context.address_info["gcs_address"]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has set a handler, but the run may still be saving
        _say(report, {"address": address})
        os.close(report)
        while os.getppid() == parent:
            if select.select([0], [], [], POLL_S)[0]:  # the run has closed its end, or has ended
                break
    except Exception as error:  # Ray's errors have no common type; the run reports them
        _say(report, {"problem": f"{type(error).__name__}: {error}"})
    finally:
        end_session(os.getpid())
        shutil.rmtree(folder, ignore_errors=True)
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


def _say(descriptor: int, message: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(descriptor, f"{json.dumps(message)}\n".encode())


if __name__ == "__main__":
    main()
