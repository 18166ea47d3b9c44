"""A launcher of workers in threads, and engines that fail as they are told: the pool's logic without processes."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rlft.generation.loaded_adapter import LoadedAdapter
from rlft.generation.sending import Incoming
from rlft.system.process.worker import WorkerError, WorkerSpec
from rlft.types import Completion, EnvironmentFailure, FinishReason, Prompt, Sampling, Turn

BUCKET = -10
"""In `faults`, BUCKET - n is the arrival of a version's bucket n, unless that is its last one."""


class CountingEngine:
    """Its completions are functions of (version, prompt, seed). It holds the number of its version.

    faults: {number of the call to `sample`, from 0: "die" | "raise" | "hang" | "old version"}; "stale" in `scores`:
    versions whose fixed tokens it scores wrongly.
    """

    def __init__(
        self, faults: Mapping[int, str] | None = None, stale: Sequence[int] = (), corrupt: bool = False,
        delay_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.faults, self.stale, self.corrupt, self.delay_s = faults or {}, stale, corrupt, delay_s
        self.version: int | None = None
        self.incoming = Incoming()
        self.calls = 0
        self.closed = False

    def started(self) -> None:
        pass

    def load_part(self, number: int, sha256: str, weights: bytes) -> str:
        if self.faults.get(BUCKET - number) == "die":
            raise Died("was killed by SIGKILL")
        if number == 0:
            self.incoming = Incoming()
        self.incoming.count(weights[1:] if self.corrupt else weights)
        self.incoming.keep(weights)
        return self.incoming.sha256

    def load(self, version: int, config: Mapping[str, Any], sha256: str, weights: bytes) -> tuple[int, str]:
        self.version = version
        self.incoming.count(weights[1:] if self.corrupt else weights)
        self.incoming.keep(weights)
        self.loaded, self.incoming = self.incoming, Incoming()
        return version, self.loaded.sha256

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> Any:
        self.prompts = prompts
        fault = self.faults.get(self.calls)
        self.calls += 1
        if fault == "die":
            raise Died("was killed by SIGKILL")
        if fault == "raise":
            raise ValueError("no such token")
        if fault == "environment":
            raise EnvironmentFailure("environment: cannot say the reward of prompt 'p0'; repair its get_reward")
        if fault == "hang":
            time.sleep(1.0)
        time.sleep(self.delay_s)
        version = None if self.version is None else self.version - (fault == "old version")
        rows = [
            [_completion(f"{prompt.id} {version} {seed + i}", seed + i) for i in range(n)]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return version, rows

    def sample_alone(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> Any:
        return self.sample(prompts, n, seeds, sampling)[1]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        assert self.version is not None
        return [[-float(self.version) - (self.version in self.stale)] for _ in sequences]

    def loaded_adapter(self) -> LoadedAdapter:
        assert self.version is not None
        return LoadedAdapter.of({"a": torch.full((2, 2), float(self.version - (self.version in self.stale)))})

    def sleep(self) -> None:
        pass

    def rehearse(self, prompts: Any, n: int, max_tokens: int, further: Any) -> None:
        if self.faults.get(-1) == "raise":
            raise MemoryError("no room")

    def close(self) -> None:
        self.closed = True


def _completion(text: str, token: int) -> Completion:
    return Completion(
        text=text, token_ids=(token,), logprobs=(-0.5,), finish_reason=FinishReason.stop, mask=(True,),
        turns=(Turn(end=1, reward=0.5),),
    )  # fmt: skip


class Died(Exception):
    pass


class ThreadWorker:
    def __init__(self, spec: WorkerSpec, log: Path) -> None:
        self.name, self.log, self.spec = spec.name, log, spec
        self.held = CountingEngine(**spec.arguments)
        self.thread = ThreadPoolExecutor(1)
        self.futures: list[Future[Any]] = []
        self.killed = threading.Event()
        self.methods: list[str] = []

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        self.methods.append(method)
        future: Future[Any] = Future()
        self.futures.append(future)
        if self.killed.is_set():
            future.set_exception(WorkerError(f"{self.name} is dead"))
        else:
            self.thread.submit(self._answer, future, method, args, kwargs)
        return future

    def kill(self) -> None:
        self.killed.set()
        for future in self.futures:
            with suppress(InvalidStateError):
                future.set_exception(WorkerError(f"{self.name} was killed"))

    def _answer(self, future: Future[Any], method: str, args: Any, kwargs: Any) -> None:
        try:
            result = getattr(self.held, method)(*args, **kwargs)
        except Died as error:
            self.killed.set()
            future.set_exception(WorkerError(f"{self.name} {error}; its log is {self.log}"))
        except Exception as error:
            future.set_exception(error)
        else:
            with suppress(InvalidStateError):
                future.set_result(result)


class ThreadLauncher:
    """replacements: arguments of the engines that come after the first of each name, in the order of their starts."""

    def __init__(self, folder: Path, replacements: Sequence[Mapping[str, Any]] = ()) -> None:
        self.folder, self.replacements = folder, list(replacements)
        self.workers: list[ThreadWorker] = []
        self.shared: list[Any] = []

    def start(self, spec: WorkerSpec) -> ThreadWorker:
        if "." in spec.name:
            changed = self.replacements.pop(0) if self.replacements else {}
            spec = WorkerSpec(name=spec.name, factory=spec.factory, arguments=changed)
        worker = ThreadWorker(spec, self.folder / f"{spec.name}.log")
        worker.log.write_text(f"{spec.name} has begun\n")
        self.workers.append(worker)
        return worker

    def share(self, value: Any) -> Any:
        self.shared.append(value)
        return value

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
