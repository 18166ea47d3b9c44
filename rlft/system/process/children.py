"""Starts and ends child processes that must not outlive this one: reward workers and the trials of `rlft doctor`."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from rlft.system.process import signals


def detach(parent: int) -> None:
    """Shields this process from signals to the whole job, and makes it end with its parent.

    It becomes the leader of a process group, so that one signal ends it with everything that it starts.
    """
    signals.outlive()
    os.setpgid(0, 0)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def spawned(target: Callable[..., None], *arguments: Any, name: str) -> tuple[BaseProcess, connection.Connection]:
    """(process, our end of its pipe) of `target(their end of the pipe, *arguments)`; returns before it has started.

    Spawned, not forked: the parent has torch's and the engine's threads, whose locks a fork would copy in any state.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), name=name)
    # A signal to the whole job would end the child while its Python starts. So it inherits a mask that blocks these
    # signals until it handles them. multiprocessing's helper process starts first, because starting it unblocks SIGINT
    # and SIGTERM in this thread.
    with signals.blocked():
        resource_tracker.ensure_running()
        with signals.blocked():
            process.start()
    theirs.close()
    return process, ours


def kill(process: BaseProcess) -> None:
    """Ends a process that leads a group, and everything that it has started, by SIGKILL."""
    if process.pid is not None:
        kill_group(process.pid)
    process.kill()
    process.join(10)


def kill_group(pid: int) -> None:
    """Ends all processes of the group that this process leads, those that it has started included, if it leads one."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)


def how_it_ended(exitcode: int | None) -> str:
    """The meaning of an exit code, as the end of a sentence.

    >>> how_it_ended(3), how_it_ended(-11)
    ('ended with exit code 3', 'was killed by SIGSEGV')
    """
    if exitcode is not None and exitcode < 0:
        cause = ", perhaps by the system for want of memory" if exitcode == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-exitcode).name}{cause}"
    return f"ended with exit code {exitcode}"
