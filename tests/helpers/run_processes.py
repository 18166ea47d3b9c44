"""`rlft` in processes of its own: fresh ones, and children of a nursery that spares them the imports (launcher.py)."""

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import rlft

LAUNCHER = Path(__file__).with_name("launcher.py")
LONGEST_S = 240.0
MARK = "RLFT_WHOLE_RUN"

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended. code: as `subprocess` gives it, minus the signal for one that was killed."""

    code: int
    out: str
    err: str


@dataclass(slots=True, kw_only=True)
class Started:
    """A run that is going on. mark: what the environment of every process that it starts says under MARK."""

    pid: int
    mark: str
    out: Path
    err: Path
    end: Callable[[], int]
    ended: Ended | None = None

    def wait(self) -> Ended:
        if self.ended is None:
            code = self.end()
            self.ended = Ended(code=code, out=self.out.read_text(), err=self.err.read_text())
        return self.ended

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait_until_stopped(self) -> None:
        assert happens(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, within_s=LONGEST_S)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def press_until_heard(self, word: str) -> None:
        """Ctrl-C, again and again: one that falls into a destructor is lost, and a person presses again."""
        for _ in range(50):
            os.kill(self.pid, signal.SIGINT)
            if self.says(word, within_s=1.0):
                return
        raise AssertionError(f"never said {word!r}: {self.err.read_text()}")

    def says(self, word: str, within_s: float) -> bool:
        return happens(lambda: word in self.err.read_text(), within_s)


def is_alive(pid: int) -> bool:
    """A zombie is not: whoever became its parent has yet to ask for its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Nursery:
    """Starts runs one at a time, usually of one thread: the models are small and the machine has other work.

    hash_seed: of Python's hashes. threads: of a run.
    host: the script, with its first arguments, that imports launcher.py; usually launcher.py itself.
    """

    def __init__(self, hash_seed: int, threads: int = 1, host: Sequence[str] = (str(LAUNCHER),)) -> None:
        variables = environment({"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": str(threads)})
        self.process = subprocess.Popen(
            [sys.executable, *host, "nursery"],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._last: Started | None = None

    def start(
        self,
        *arguments: str,
        cwd: Path,
        events: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Started:
        if self._last is None:
            self._hear("ready")
        else:
            self._last.wait()
        out, err, mark = places(cwd)
        order = {
            "arguments": arguments,
            "events": list(events),
            "cwd": str(cwd),
            "environment": {**(variables or {}), MARK: mark},
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**order, "out": str(out), "err": str(err)}) + "\n")
        pid = self._hear("pid")
        self._last = Started(pid=pid, mark=mark, out=out, err=err, end=lambda: self._end(pid))
        return self._last

    def run(self, *arguments: str, ends: int | None = None, **how: Any) -> Ended:
        """A run to its end, which has this exit code unless `ends` is None; how: as for `start`."""
        done = self.start(*arguments, **how).wait()
        assert ends is None or done.code == ends, f"{how.get('events')}: {done.err}"
        return done

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()

    def _end(self, pid: int) -> int:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], LONGEST_S)[0]:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"process {pid} was still running after {LONGEST_S} s")
        return self._hear("code")

    def _hear(self, name: str) -> int:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())[name]


def start_fresh(
    *arguments: str, cwd: Path, events: Sequence[Mapping[str, Any]] = (), variables: Mapping[str, str] | None = None
) -> Started:
    """The same in a new interpreter, with Python's own choice of a hash seed."""
    out, err, mark = places(cwd)
    with out.open("w") as out_stream, err.open("w") as err_stream:
        process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), "run", json.dumps(list(events)), *arguments],
            env=environment({**(variables or {}), MARK: mark}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out_stream,
            stderr=err_stream,
            start_new_session=True,
        )

    def end() -> int:
        try:
            return process.wait(LONGEST_S)
        finally:
            process.kill()

    return Started(pid=process.pid, mark=mark, out=out, err=err, end=end)


def places(cwd: Path) -> tuple[Path, Path, str]:
    """Files for stdout and stderr, which are there from the start, and a mark nobody else has."""
    number = next(_numbers)
    out, err = cwd / f"process_{number}.out", cwd / f"process_{number}.err"
    out.touch()
    err.touch()
    return out, err, f"{os.getpid()}-{number}"


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The rlft that these tests import; threads that wait sleep: torch is imported before rlft can say so."""
    folders = [str(Path(rlft.__file__).parents[1]), more.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **more, "PYTHONPATH": path}


def marked(mark: str) -> set[int]:
    """Processes alive that were started by a run of this mark, itself (from a nursery) not among them."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def happens(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether the condition comes true within so many seconds."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
