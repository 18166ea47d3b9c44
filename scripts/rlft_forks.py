"""Runs `rlft` command lines of one checkout, each in a fork of a process that has imported the libraries once.

    PYTHONPATH=<checkout> python -P rlft_forks.py torch transformers ...

Imports the modules that are named, and of rlft the command line alone. For each line of JSON on stdin (arguments, cwd,
log) it forks a child that goes on as `rlft` with these arguments, in this folder, its output added to this file; when
the child has ended, a line of JSON says its exit code, or minus the signal that ended it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    order = serve(sys.argv[1:])
    if order is not None:
        become_rlft(order)


def serve(libraries: list[str]) -> dict[str, Any] | None:
    """In a child: its order. In the process itself: None, after the last one."""
    for name in libraries:
        with contextlib.suppress(ImportError):  # another version of the library: then a run imports what it has
            importlib.import_module(name)
    cli = importlib.import_module("rlft.cli")
    say({"ready": cli.__file__})
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        say({"code": os.waitstatus_to_exitcode(status)})
    return None


def become_rlft(order: dict[str, Any]) -> None:
    """Does what the console script of rlft does: the one function that every version of the package has."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
    os.chdir(order["cwd"])
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for stream, file, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["log"], appending),
        (2, order["log"], appending),
    ):
        opened = os.open(file, flags, 0o644)
        os.dup2(opened, stream)
        os.close(opened)
    sys.argv = ["rlft", *order["arguments"]]
    importlib.import_module("rlft.cli").main()


def say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
