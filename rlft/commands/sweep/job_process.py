"""Runs one job of a sweep in a member of the cluster, as an `rlft` process whose output is the member's log."""

from __future__ import annotations

from collections.abc import Sequence

from rlft.system.process.child import start_python

FACTORY = "rlft.commands.sweep.job_process:JobProcess"


class JobProcess:
    """Starts the job at once.

    Args:
        words: the words of its command line, the verb first.
        cwd: the folder from which relative paths are read.
    """

    def __init__(self, words: Sequence[str], cwd: str) -> None:
        self._process = start_python("rlft:main", words, cwd=cwd)

    def exit_code(self) -> int | None:
        """The exit code of the job; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Sends the job a signal; does nothing if it has ended."""
        self._process.send_signal(number)
