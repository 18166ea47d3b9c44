"""Objects that workers of a cluster hold in tests, and a program that starts one and waits."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rlft.system.process.child import function_of
from rlft.system.process.launcher import LocalProcesses
from rlft.system.process.ray_actors import RayActors
from rlft.system.process.worker import Launcher, Worker, WorkerError, WorkerSpec
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

    def read(self, text: str) -> Any:
        return json.loads(text)

    def refuse(self) -> NoReturn:
        raise UserError("some.key", "is wrong", got=3, remedy="set it to 4")

    def raise_what_cannot_be_sent(self) -> NoReturn:
        raise Stubborn("no copy of this")

    def raise_what_takes_no_note(self) -> NoReturn:
        raise Bare(3)

    def what_cannot_be_sent(self) -> Any:
        return lambda: None

    def die(self) -> NoReturn:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, file: Path) -> None:
        """Is busy until there is such a file."""
        for _ in range(6000):
            if file.exists():
                return
            time.sleep(0.01)
        raise AssertionError("nobody has made the file")

    def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "group": os.getpgrp(), "threads": os.environ["OMP_NUM_THREADS"]} | {
            "extra": os.environ.get("EXTRA"),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }

    def start_a_child(self) -> int:
        """A process of the worker's own, which holds nothing of ours and sleeps."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def fork(self) -> int:
        """A process that holds all that the worker has open, its connection included, and sleeps."""
        if not (child := os.fork()):
            time.sleep(600)
            os._exit(0)
        return child


@dataclass(frozen=True, slots=True)
class Bare(Exception):
    code: int


class Stubborn(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError("it stays here")


def show_and_wait() -> None:
    """What a child does that is a command line. Like rlft's, it takes SIGINT even if its parent ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(sys.argv[1:], os.environ["EXTRA"], Path.cwd(), flush=True)
    signal.pause()


def call(connection: Any, target: str) -> None:
    """What a child does that has a connection: something without arguments."""
    function_of(target)()


SPEC = WorkerSpec(name="calculator-0", factory="cluster_workers:Calculator")
ANSWER_S = 60.0


def check_answers(worker: Worker, launcher: Launcher) -> None:
    """Calls of a new worker are answered in order, errors come back as what they are, and values can be shared."""
    futures = [worker.call("add", 1), worker.call("add", 2, times=3), worker.call("add", 0)]
    assert [future.result(ANSWER_S) for future in futures] == [11, 17, 17]  # 10 + 1; + 2 * 3; + 0
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        worker.call("divide", 0).result(ANSWER_S)
    assert "return self.total / number" in caught.value.__notes__[0]
    with pytest.raises(json.JSONDecodeError) as unread:  # a class that loses its notes when it is pickled
        worker.call("read", "{").result(ANSWER_S)
    assert "json.loads(text)" in unread.value.__notes__[0]
    with pytest.raises(UserError, match=r"^some\.key: is wrong, got 3; set it to 4$") as mistake:
        worker.call("refuse").result(ANSWER_S)
    assert (mistake.value.key, mistake.value.got) == ("some.key", 3)
    for method in ("raise_what_cannot_be_sent", "raise_what_takes_no_note", "what_cannot_be_sent"):
        with pytest.raises(Exception, match=r"no copy of this|^Bare: |[Pp]ickle"):
            worker.call(method).result(ANSWER_S)
        assert worker.call("length", [1, 2]).result(ANSWER_S) == 2
    shared = launcher.share(b"x" * 3_000_000)  # more than a connection's buffer holds
    assert worker.call("length", shared).result(ANSWER_S) == 3_000_000


def check_what_cannot_be_made(launcher: Launcher) -> None:
    """An object that cannot be made fails every call."""
    worker = launcher.start(replace(SPEC, name="calculator-1", arguments={"start": -1}))
    for _ in range(2):
        with pytest.raises(UserError, match=r"^start: must not be negative, got -1"):
            worker.call("add", 1).result(ANSWER_S)
    worker.kill()


def check_death(launcher: Launcher, how: str) -> None:
    """A dead worker says how it ended and what it said last."""
    worker = launcher.start(replace(SPEC, name="calculator-2"))
    futures = [worker.call("die"), worker.call("add", 1)]
    for future in futures:
        with pytest.raises(WorkerError, match=rf"(?s)calculator-2 {how}.*its log is [^\n]*\n.*about to die"):
            future.result(ANSWER_S)
    with pytest.raises(WorkerError, match=f"calculator-2 {how}"):
        worker.call("add", 1).result(ANSWER_S)


def main() -> None:
    """`<folder> [the address of a Ray cluster]`: starts a worker that is busy, says its id, and sleeps in turn."""
    folder, *address = sys.argv[1:]
    launcher = RayActors(Path(folder), *address) if address else LocalProcesses(Path(folder))
    worker = launcher.start(SPEC)
    pid = worker.call("facts").result(ANSWER_S)["pid"]
    worker.call("sleep", 600)
    print(pid, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
