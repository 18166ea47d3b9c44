"""Objects that members of a cluster hold in tests, and a program that starts one and waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rlft.system.process.child import function_of
from rlft.system.process.launcher import LocalProcesses
from rlft.system.process.member import MemberSpec
from rlft.types import UserError


class Calculator:
    def __init__(self, *, start: int = 0) -> None:
        if start < 0:
            raise UserError("start", "must not be negative", got=start, remedy="choose another one")
        self.total = start
        print("a calculator is made")

    def add(self, number: int, *, times: int = 1) -> int:
        self.total += number * times
        return self.total

    def length(self, value: Any) -> int:
        return len(value)

    def divide(self, number: int) -> float:
        return self.total / number

    def refuse(self) -> NoReturn:
        raise UserError("some.key", "is wrong", got=3, remedy="set it to 4")

    def raise_what_cannot_be_sent(self) -> NoReturn:
        raise Stubborn("no copy of this")

    def what_cannot_be_sent(self) -> Any:
        return lambda: None

    def die(self) -> NoReturn:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "group": os.getpgrp(), "threads": os.environ["OMP_NUM_THREADS"]} | {
            "extra": os.environ.get("EXTRA"),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }

    def start_a_child(self) -> int:
        """A process of the member's own, which holds nothing of ours and sleeps."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


class Stubborn(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError("it stays here")


def show_and_wait() -> None:
    """What a child does that is a command line."""
    print(sys.argv[1:], os.environ["EXTRA"], Path.cwd(), flush=True)
    signal.pause()


def call(connection: Any, target: str) -> None:
    """What a child does that has a connection: something without arguments."""
    function_of(target)()


SPEC = MemberSpec(name="calculator-0", factory="cluster_members:Calculator")


def main() -> None:
    """Starts a member that is busy, says its id, and sleeps in turn."""
    launcher = LocalProcesses(Path(sys.argv[1]))
    member = launcher.start(SPEC)
    member.call("add", 1).result(30)
    member.call("sleep", 600)
    print(member.pid, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
