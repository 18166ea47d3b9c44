"""Several engines behind the interface of one: each is a worker of the cluster, with a base of its own.

Whole groups wait in a queue of this process. An engine gets a unit of them (`Engine.at_once`), and results are put in
order by their index, so that nothing depends on which engine is faster, nor on how many there are. An engine that dies,
raises, does not answer in time or holds another adapter than it was given is killed; its groups go back to the queue,
and a new one takes its place once it has the same version and gives fixed tokens the trainer's log-probs. A completion
is a function of (version, prompt, seed): none is lost, and none changes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any

from rlft.generation.engine import FreshnessCheck, Generator, StaleEngineError
from rlft.generation.sending import Outgoing
from rlft.system.process.running_time import TICK_S, RunningTime
from rlft.system.process.worker import Launcher, Worker, WorkerError, WorkerSpec, where_it_wrote
from rlft.tokens.images import with_content
from rlft.types import Adapter, Completion, EnvironmentFailure, Group, Prompt, Rollout, Sampling, UserError, counted

START_S = 900.0  # seconds that an engine may take to load its base, in addition to `timeout_s`
CLOSE_S = 5.0  # seconds that engines may take to close before they are killed


class EngineError(RuntimeError):
    """Engines fail again and again."""


class _Failed(Exception):
    """An engine has to be replaced; `stale`: it holds other weights than those it was given."""

    def __init__(self, problem: str, *, stale: bool = False) -> None:
        self.stale = stale
        super().__init__(problem)


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """The place of one engine."""

    spec: WorkerSpec
    worker: Worker
    starts: int = 1  # number of engines that have had the place
    started: bool = False  # whether its engine has answered
    ready: bool = False  # whether it has the version in use, and has passed the check if one is set
    replaced_stale: bool = False  # whether the engine before this one was killed because it was stale
    sent: int = 0  # number of buckets of the version in use that it has taken
    joining: EngineWork | None = None  # the calls by which it takes the next one, once they have begun


@dataclass(slots=True, eq=False, kw_only=True)
class EngineWork:
    """What an engine is doing: calls that it answers in order, and is done with once it has answered the last one."""

    slot: Slot
    futures: Sequence[Future[Any]]
    what: str  # what they do, for messages
    limit_s: float  # seconds that they may take
    left_s: float  # how many of these seconds are left
    unit: slice | None = None  # the prompts that it samples from; None for other calls


@dataclass(eq=False)
class EnginePool(Generator):
    """Engines that are workers of the cluster.

    `here` is an engine of this process, if there has to be one (`Engine.on_trainers_base`): it loads what the others
    load, and samples nothing.
    """

    replaces_engines: bool = field(default=True, init=False)

    launcher: Launcher  # starts them; whoever made it closes it, after the pool
    specs: InitVar[Sequence[WorkerSpec]]  # what each engine is (`rlft.loop.workers`)
    _: KW_ONLY
    unit: Callable[[int, int], int]  # (completions of a prompt, prompts) -> prompts that an engine gets in one call
    timeout_s: float  # seconds that an engine may take for one answer
    max_restarts: int  # the most engines replaced without a finished group in between; one more stops the run
    note: Callable[[str], None]  # takes a line for the person watching when an engine is replaced
    with_rows: bool = False  # whether engines get the prompts' metadata, which environments read

    def __post_init__(self, specs: Sequence[WorkerSpec]) -> None:
        self.finished: Callable[[list[Group]], None] = lambda groups: None
        self.here: Generator | None = None
        self.num_restarts = 0
        self._restarts_in_a_row = 0
        self._version: Outgoing | None = None
        self._check: FreshnessCheck | None = None
        self._clock = RunningTime()
        self._lock = threading.RLock()
        self._is_closed = False
        self._slots = [Slot(spec=spec, worker=self.launcher.start(spec)) for spec in specs]

    def wait_until_started(self) -> None:
        """Returns once every engine has loaded its base and taken its memory."""
        self._all_join()

    # -- the interface of a generator ----------------------------------------------------------------------------------
    def load(self, adapter: Adapter) -> None:
        """As of any generator. The weights are read while engines load them, also those that start later."""
        with self._lock:
            self._version, self._check = Outgoing(adapter, self.launcher.share), None
            for slot in self._slots:
                slot.ready, slot.sent, slot.joining = False, 0, None
            self._all_join()
        if self.here is not None:
            self.here.load(adapter)

    def verify(self, check: FreshnessCheck, *, now: bool) -> None:
        """As of any generator; a stale engine is replaced once."""
        with self._lock:
            self._check = check
            if now:
                for slot, answers in self._answers_of_each(check.calls).items():
                    if (problem := check.problem(answers)) is not None:
                        self._replace(slot, _Failed(problem, stale=True))
                self._all_join()

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        """As of any generator; `finished` is called with the groups of a unit as soon as it is finished."""
        sampled: dict[int, list[Group]] = {}  # by the index of a unit's first prompt
        with self._lock:
            size = self.unit(n, len(prompts))
            units = deque(slice(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size))
            busy: dict[int, EngineWork] = {}
            self._clock.since_last()  # the time before is not counted
            while units or any(work.unit is not None for work in busy.values()):
                for number, slot in enumerate(self._slots):
                    if number in busy:
                        continue
                    if not slot.ready:
                        busy[number] = self._join(slot)
                    elif units:
                        busy[number] = self._begin(slot, units.popleft(), prompts, n, seeds, sampling)
                for work in self._over(list(busy.values())):
                    del busy[self._slots.index(work.slot)]
                    answers = self._answers(work)
                    if work.unit is None:
                        continue
                    if answers is None:
                        units.appendleft(work.unit)
                        continue
                    self._restarts_in_a_row = 0
                    sampled[work.unit.start] = groups = _groups(prompts[work.unit], *answers[-1])
                    self.finished(groups)
        return [group for start in sorted(sampled) for group in sampled[start]]

    def sample_each(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Group]]:
        with self._lock:
            sampled = self._of_each("sample_alone", [*map(self._sent, prompts)], n, list(seeds), sampling)
            version = None if self._version is None else self._version.number
            return [_groups(prompts, version, rows) for rows in sampled.values()]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probs of one of the engines; `verify` checks all of them."""
        return next(iter(self._of_each("score", [list(ids) for ids in sequences]).values()))

    def rehearse(self, prompts: Sequence[Sequence[int]], *args: Any, **further: Any) -> None:
        self._of_each("rehearse", [list(ids) for ids in prompts], *args, further)

    def sleep(self) -> None:
        self._of_each("sleep")

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            closing = [slot.worker.call("close") for slot in self._slots]
            with suppress(Exception):
                wait(closing, timeout=CLOSE_S)
            for slot in self._slots:
                slot.worker.kill()

    # -- single engines ------------------------------------------------------------------------------------------------
    def _of_each(self, method: str, *args: Any) -> dict[Slot, Any]:
        """The answer of every engine; those that fail are replaced, and the call is repeated."""
        return {slot: answer for slot, [answer] in self._answers_of_each([(method, *args)]).items()}

    def _answers_of_each(self, calls: Sequence[tuple[Any, ...]]) -> dict[Slot, list[Any]]:
        """The answers of every engine to these calls, as `_of_each`."""
        answers: dict[Slot, list[Any]] = {}
        with self._lock:
            while unanswered := [slot for slot in self._slots if slot not in answers]:
                self._all_join()
                works = [
                    self._work(slot, [slot.worker.call(*call) for call in calls], calls[0][0]) for slot in unanswered
                ]
                self._finish(works, lambda work, results: answers.update({work.slot: results}))
        return answers

    def _all_join(self) -> None:
        """Waits until every engine has the version in use."""
        with self._lock:
            while joining := [self._join(slot) for slot in self._slots if not slot.ready]:
                self._finish(joining, lambda work, results: None)

    def _finish(self, calls: Sequence[EngineWork], then: Callable[[EngineWork, list[Any]], None]) -> None:
        """Waits for all of these calls; engines that fail are replaced."""
        waiting = list(calls)
        self._clock.since_last()
        while waiting:
            for work in self._over(waiting):
                waiting.remove(work)
                if (answers := self._answers(work)) is not None:
                    then(work, answers)

    def _work(self, slot: Slot, futures: Sequence[Future[Any]], what: str, unit: slice | None = None) -> EngineWork:
        limit_s = self.timeout_s + (0.0 if slot.started else START_S)
        return EngineWork(slot=slot, futures=futures, what=what, limit_s=limit_s, left_s=limit_s, unit=unit)

    def _join(self, slot: Slot) -> EngineWork:
        """Has an engine take the next bucket of the version in use, and after the last one answer the check if one is
        set."""
        if slot.joining is None:
            version, number = self._version, slot.sent
            calls: list[tuple[Any, ...]] = [("started",)] if number == 0 else []
            if version is not None:
                bucket, sha256 = version.bucket(number), version.sha256(number)
                if number + 1 < len(version):
                    calls.append(("load_part", number, sha256, bucket))
                else:
                    calls.append(("load", version.number, version.config, sha256, bucket))
                    calls += [] if self._check is None else self._check.calls
            futures = [slot.worker.call(*call) for call in calls]
            slot.joining = self._work(slot, futures, "load" if slot.started else "start and load")
        return slot.joining

    def _begin(
        self, slot: Slot, unit: slice, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> EngineWork:
        sent_prompts = [self._sent(prompt) for prompt in prompts[unit]]
        future = slot.worker.call("sample", sent_prompts, n, [int(seed) for seed in seeds[unit]], sampling)
        return self._work(slot, [future], "sample", unit)

    def _sent(self, prompt: Prompt) -> Prompt:
        metadata = prompt.metadata if self.with_rows else {}
        return replace(prompt, images=tuple(map(with_content, prompt.images)), metadata=metadata)

    def _over(self, waiting: Sequence[EngineWork]) -> list[EngineWork]:
        """Waits for calls that are answered, have failed or are out of time, and returns them."""
        pending = [future for work in waiting for future in work.futures]
        while True:
            over = [work for work in waiting if _is_done(work) or work.left_s <= 0]
            if over:
                return over
            wait([future for future in pending if not future.done()], timeout=TICK_S, return_when=FIRST_COMPLETED)
            passed = self._clock.since_last()
            for work in waiting:
                work.left_s -= passed

    def _answers(self, work: EngineWork) -> list[Any] | None:
        """What the engine's calls returned; None if it has failed, and is replaced."""
        try:
            answers = self._returned(work)
            self._accept(work, answers)
        except _Failed as failure:
            self._replace(work.slot, failure)
            return None
        return answers

    def _returned(self, work: EngineWork) -> list[Any]:
        """What the engine's calls returned.

        Raises:
            UserError, EnvironmentFailure: the engine has raised it.
            _Failed: the engine has died, has raised, or is out of time.
        """
        if not _is_done(work):
            late = f"has not answered for {work.limit_s:g} s ({work.what}; cluster.timeout)"
            raise _Failed(f"{work.slot.spec.name} {late}; {where_it_wrote(work.slot.worker.log)}")
        answers = []
        for future in work.futures:
            try:
                answers.append(future.result(0))
            except (UserError, EnvironmentFailure):  # another engine would raise it, too
                raise
            except WorkerError as error:
                raise _Failed(str(error)) from error
            except Exception as error:  # of whatever the engine runs; a new engine may not raise it
                text = f"{work.slot.spec.name} raised {type(error).__name__}: {error}"
                raise _Failed(f"{text}; its log is {work.slot.worker.log}") from error
        return answers

    def _accept(self, work: EngineWork, answers: Sequence[Any]) -> None:
        """Checks which version an answer comes from; with the last bucket of a version the engine is ready.

        Raises _Failed: it is not the one in use, or the engine's log-probs are not the policy's.
        """
        slot, version = work.slot, self._version
        name = slot.spec.name
        if work.unit is not None:
            number = None if version is None else version.number
            if answers[-1][0] != number:
                raise _Failed(f"{name} has sampled from version {answers[-1][0]} instead of {number}", stale=True)
        if work is not slot.joining:
            return
        slot.started = True
        if version is not None:
            loaded, *checked = answers if slot.sent else answers[1:]
            sha256, is_last = version.sha256(slot.sent), slot.sent + 1 == len(version)
            number, actual = loaded if is_last else (version.number, loaded)
            if (number, actual) != (version.number, sha256):
                wanted = f"{version.number} with {sha256[:16]}"
                problem = f"version {number} with the sha256 {actual[:16]} instead of {wanted}"
                raise _Failed(f"{name} has loaded {problem}", stale=True)
            if self._check is not None and checked and (problem := self._check.problem(checked)) is not None:
                raise _Failed(problem, stale=True)
            slot.sent += 1
            if not is_last:
                slot.joining = None
                return
        slot.ready, slot.replaced_stale, slot.joining = True, False, None

    def _replace(self, slot: Slot, failure: _Failed) -> None:
        slot.worker.kill()
        if failure.stale and slot.replaced_stale:
            raise StaleEngineError(f"{failure} ({slot.worker.name}, which had replaced another one)") from failure
        self._restarts_in_a_row += 1
        if self._restarts_in_a_row > self.max_restarts:
            times = f"{counted(self._restarts_in_a_row, 'engine failure')} without a finished group in between"
            problem = f"cluster.max_engine_restarts: {times}, the last one: {failure}"
            raise EngineError(problem) from failure
        self.num_restarts += 1
        self.note(f"{slot.spec.name} is replaced: {str(failure).splitlines()[0]}")
        slot.starts += 1
        spec = replace(slot.spec, name=f"{slot.spec.name}.{slot.starts}")
        slot.worker = self.launcher.start(spec)
        slot.started, slot.ready, slot.sent, slot.joining = False, False, 0, None
        slot.replaced_stale = failure.stale


def _is_done(work: EngineWork) -> bool:
    """Whether all calls are answered, or one has raised: those after it are useless."""
    return all(f.done() for f in work.futures) or any(f.done() and f.exception(0) is not None for f in work.futures)


def _groups(
    prompts: Sequence[Prompt],
    version: int | None,
    sampled: Sequence[Sequence[Completion]],
    opened: Sequence[Prompt | None] = (),
) -> list[Group]:
    """Groups of these prompts from what a worker sends: completions, and prompts that have changed."""
    groups = []
    for sent_prompt, rows, changed_prompt in zip(prompts, sampled, opened or [None] * len(prompts), strict=True):
        prompt = changed_prompt or sent_prompt
        rollouts = (Rollout(prompt=prompt, completion=each, policy_version=version) for each in rows)
        groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
    return groups
