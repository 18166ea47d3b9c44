"""Runs one job of a sweep in a member of the cluster, as an `rlft` process whose output is the member's log."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

FACTORY = "rlft.commands.sweep.job_process:JobProcess"
BOOT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # the job ends with its member
if os.getppid() != int(sys.argv.pop(1)):
    os._exit(1)
sys.path[:0] = sys.argv.pop(1).split(os.pathsep)
from rlft import main
main()
"""


class JobProcess:
    """Starts the job at once.

    Args:
        words: the words of its command line, the verb first.
        cwd: the folder from which relative paths are read.
    """

    def __init__(self, words: Sequence[str], cwd: str) -> None:
        import os

        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-c", BOOT, str(os.getpid()), path, *words]
        self._process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL)

    def exit_code(self) -> int | None:
        """The exit code of the job; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Sends the job a signal; does nothing if it has ended."""
        self._process.send_signal(number)
