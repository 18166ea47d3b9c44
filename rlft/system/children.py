"""Processes that this one starts and must not leave behind: reward workers, and the trials of `rlft doctor`."""

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

from rlft.system import signals


def detach(parent: int) -> None:
    """Cuts this process off signals that are sent to the whole job, and ties it to its parent's life.

    It becomes the leader of a process group, so that one signal ends it with all that it starts.
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
    # A signal to the whole job while Python starts would end it: the mask is inherited until the worker handles them.
    # multiprocessing's own helper process starts first: it lifts SIGINT and SIGTERM from this thread's mask.
    with signals.blocked():
        resource_tracker.ensure_running()
        with signals.blocked():
            process.start()
    theirs.close()
    return process, ours


def kill(process: BaseProcess) -> None:
    """Ends a process that leads a group, and what it has started, if need be against their will."""
    if process.pid is not None:
        kill_group(process.pid)
    process.kill()
    process.join(10)


def kill_group(pid: int) -> None:
    """Ends all processes of the group that this process leads, if it does: what it has started ends with it."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)


def how_it_ended(exitcode: int | None) -> str:
    """What an exit code says, as the end of a sentence.

    >>> how_it_ended(3), how_it_ended(-11)
    ('ended with exit code 3', 'was killed by SIGSEGV')
    """
    if exitcode is not None and exitcode < 0:
        cause = ", perhaps by the system for want of memory" if exitcode == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-exitcode).name}{cause}"
    return f"ended with exit code {exitcode}"
