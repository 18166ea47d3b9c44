"""A launcher whose processes serve one worker after the other: starting Python and importing torch takes seconds."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from warm_python import WarmPython

from rlft.system.process.child import function_of
from rlft.system.process.launcher import LocalProcesses, ProcessWorker
from rlft.system.process.worker import WorkerSpec

START_S = 60.0


class Holder:
    """The object of a process: makes and holds the object of whatever worker it is at the time."""

    def __init__(self) -> None:
        self.held: Any = None

    def hold(self, factory: str, arguments: dict[str, Any]) -> None:
        if self.held is not None:
            self.held.close()
            self.held = None
        self.held = function_of(factory)(**arguments)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.held, method)(*args, **kwargs)


class ReusedWorker:
    def __init__(self, name: str, process: ProcessWorker) -> None:
        self.name, self.process, self.log = name, process, process.log

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.process.call("ask", method, *args, **kwargs)

    def kill(self) -> None:
        self.process.kill()


class ReusedProcesses:
    """A `Launcher`. `release` gives the processes of the workers so far back, for the next ones."""

    address = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        self.warm = WarmPython()
        self.processes = LocalProcesses(folder, self.warm.start)
        self.idle: list[ProcessWorker] = []
        self.started: list[ReusedWorker] = []
        self.num_processes = 0

    def start(self, spec: WorkerSpec) -> ReusedWorker:
        alive = [process for process in self.idle if process.is_alive()]
        process = alive.pop(0) if alive else self.fresh()
        self.idle = alive
        process.call("hold", spec.factory, dict(spec.arguments))
        self.started.append(ReusedWorker(spec.name, process))
        return self.started[-1]

    def fresh(self) -> ProcessWorker:
        self.num_processes += 1
        name = f"process-{self.num_processes}"
        return self.processes.start(WorkerSpec(name=name, factory="reused_workers:Holder"))

    def release(self) -> None:
        self.idle += [worker.process for worker in self.started if worker.process.is_alive()]
        self.started.clear()

    def share(self, value: Any) -> Any:
        return self.processes.share(value)

    def close(self) -> None:
        self.processes.close()
        self.warm.close()
