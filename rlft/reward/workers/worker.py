"""What runs in a reward worker: it builds rewards once, then scores the groups that it gets, each within a time limit.

A worker does not import torch and keeps nothing between groups. It dies with its parent, whatever ends the parent.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import numbers
import operator
import resource
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, MutableSequence, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlft.reward.workers.reward_spec import RewardSpec
from rlft.system import interrupt
from rlft.system.process.child import READY
from rlft.system.process.running_time import TICK_S, RunningTime
from rlft.types import MAX_SCORE, Group, Reward, Rollout, StepScores, Unscorable, Unscored, Verdict, counted

NOWHERE = -1
MAX_PROBLEM, MAX_TRACEBACK = 1000, 20_000
"""The most characters of a failed reward's message and traceback: an error may quote a completion of any length."""

Progress = MutableSequence[int]
"""[reward, completion] that a worker is working on, by index, in memory that its parent can read after killing it."""


class Cause(StrEnum):
    """Why a reward gave no usable scores."""

    not_built = "not_built"
    raised = "raised"
    unscorable = "unscorable"  # the reward cannot use the prompt's reference answer
    time_limit = "time_limit"
    died = "died"
    invalid = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A reward that failed on a group."""

    cause: Cause
    problem: str  # a phrase for the user, such as "raised ValueError: ..."
    completion: int | None = None  # index of the one that it looked at last, which need not be at fault
    scores: tuple[float | StepScores | None, ...] | None = None  # of a reward that returned; None for unusable ones
    traceback: str = ""
    remedy: str = ""  # what to do about it; "": the usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A group and the rewards to score it with; the caller recognises it by `key`."""

    key: int
    group: Group
    rewards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A reward that is ready to be called; whether it must give `StepScores` or numbers, and the largest size of a
    score.
    """

    reward: Reward
    scores_steps: bool
    largest: float = MAX_SCORE


Outcome = list[float] | list[StepScores] | Failure
Reply = dict[str, Outcome]
Answer = tuple[Reply, bool]  # (the reply to a task, whether its rewards have run programs meanwhile)


def serve(connection: Connection, specs: Sequence[RewardSpec], timeout_s: float, memory: int) -> None:
    """Runs in a worker process: answers tasks until the parent closes its end of the connection or dies.

    `memory` is the descriptor for `progress_in`.
    """
    progress = progress_in(memory)
    rewards = load(specs)
    connection.send(READY)
    while True:
        connection.send(answer(connection.recv(), rewards, timeout_s, progress))


def progress_in(memory: int) -> Progress:
    """The progress of a worker in shared memory, which is given by its descriptor."""
    progress: Any = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("i")
    progress[0] = progress[1] = NOWHERE
    return progress


def load(specs: Sequence[RewardSpec]) -> dict[str, Loaded | Failure]:
    """Builds each reward, and calls its `start()` if it has one, the place for slow imports, which no limit counts."""
    loaded: dict[str, Loaded | Failure] = {}
    for spec in specs:
        try:
            reward = spec.build()
            if callable(start := getattr(reward, "start", None)):
                start()
            largest = MAX_SCORE / (abs(spec.weight) or 1.0)
            loaded[spec.name] = Loaded(reward=reward, scores_steps=spec.scores_steps, largest=largest)
        except (Exception, SystemExit) as error:  # it is reported with the first group: the worker must not die of it
            problem = f"could not be started in its worker: {type(error).__name__}: {error}"[:MAX_PROBLEM]
            loaded[spec.name] = Failure(cause=Cause.not_built, problem=problem, traceback=traceback_text())
    return loaded


def answer(task: Task, rewards: Mapping[str, Loaded | Failure], timeout_s: float, progress: Progress) -> Answer:
    """The task's scores by each reward, or what went wrong instead.

    The reply lacks a reward if a signal came meanwhile that was sent to the whole job, since the signal may have ended
    programs that the reward runs. The reward has to be called again.
    """
    reply: Reply = {}
    used_by_programs = resource.getrusage(resource.RUSAGE_CHILDREN)  # it changes whenever a child process ends
    for index, name in enumerate(task.rewards):
        progress[0], progress[1] = index, NOWHERE
        reward, signals_before = rewards[name], interrupt.signals_received()
        outcome = reward if isinstance(reward, Failure) else score(reward, task.group, timeout_s, progress)
        if interrupt.signals_received() == signals_before:
            reply[name] = outcome
    progress[0] = progress[1] = NOWHERE
    return reply, resource.getrusage(resource.RUSAGE_CHILDREN) != used_by_programs


def score(loaded: Loaded, group: Group, timeout_s: float, progress: Progress) -> Outcome:
    """The reward's checked scores of a group: a finite number, or valid StepScores, for each completion."""
    watched = replace(group, rollouts=WatchedRollouts(group.rollouts, progress))
    alarm = Alarm()
    values: Any = None
    try:
        with alarm.set(timeout_s):
            values = loaded.reward(watched)
            values = list(values) if isinstance(values, Iterator) else values  # a generator runs only now
    except OutOfTime:
        pass
    except Unscored as error:
        if not alarm.rang:  # the reward itself says what it could not score, so that nothing need be tried again
            first_bad, problem = None if error.scores is None else error.scores.index(None), str(error)[:MAX_PROBLEM]
            return Failure(cause=Cause.invalid, problem=problem, completion=first_bad, scores=error.scores)
    except (Exception, SystemExit) as error:  # whatever the reward's code raises is reported, never trained on
        if not alarm.rang:
            return Failure(
                cause=Cause.unscorable if isinstance(error, Unscorable) else Cause.raised,
                problem=f"raised {type(error).__name__}: {error}{place_of(error)}"[:MAX_PROBLEM],
                completion=last_read(progress),
                traceback=traceback_text(),
            )
    if alarm.rang:
        return out_of_time(timeout_s, last_read(progress))
    if loaded.scores_steps:
        return checked_steps(values, [rollout.completion.text for rollout in group.rollouts], loaded.largest)
    return checked(values, len(group.rollouts), loaded.largest)


def checked(values: Any, num_completions: int, largest: float = MAX_SCORE) -> list[float] | Failure:
    """What a reward returned, as floats up to this size, or a Failure if that is not possible."""
    returned = _listed(values, num_completions, "numbers")
    if isinstance(returned, Failure):
        return returned
    scores = tuple(_finite(value, largest) for value in returned)
    if None in scores:
        first_bad = scores.index(None)
        problem, remedy = what_is_wrong(returned[first_bad], largest)
        return Failure(cause=Cause.invalid, problem=problem, completion=first_bad, scores=scores, remedy=remedy)
    return [value for value in scores if value is not None]


def what_is_wrong(value: Any, largest: float, where: str = "") -> tuple[str, str]:
    """(what is wrong with a returned score, what to do; "" for the usual); `where` it stands, such as " for step 2"."""
    returned = f"returned {value!r:.80}{where}"
    if value is None:
        return f"{returned}, not a finite number,", "return 0.0 where the reward does not apply"
    if _finite(value, math.inf) is None:
        return f"{returned}, not a finite number,", ""
    return f"{returned}, larger than a score may be ({largest:g} with its weight),", "divide the reward by a constant"


def checked_steps(values: Any, texts: Sequence[str], largest: float = MAX_SCORE) -> list[StepScores] | Failure:
    """What a process reward returned for completions of these texts, as StepScores of floats and ints, or a Failure.

    Each step has a finite value and an end; ends rise strictly, within 1 .. len(text). Having no steps is valid.
    """
    returned = _listed(values, len(texts), "StepScores")
    if isinstance(returned, Failure):
        return returned
    steps = [_steps(value, len(text), largest) for value, text in zip(returned, texts, strict=True)]
    for index, problem in enumerate(steps):
        if isinstance(problem, str):
            valid = tuple(None if isinstance(each, str) else each for each in steps)
            return Failure(cause=Cause.invalid, problem=problem, completion=index, scores=valid)
    return [each for each in steps if not isinstance(each, str)]


def out_of_time(timeout_s: float, completion: int | None) -> Failure:
    problem = f"exceeded its time limit of {timeout_s:g} s a group"
    return Failure(cause=Cause.time_limit, problem=problem, completion=completion)


class WatchedRollouts(tuple[Rollout, ...]):
    """A group's rollouts, which note the one that was read last, so that a failure can name its completion."""

    progress: Progress

    def __new__(cls, rollouts: Sequence[Rollout], progress: Progress) -> WatchedRollouts:
        watched = super().__new__(cls, rollouts)
        watched.progress = progress
        return watched

    def __iter__(self) -> Iterator[Rollout]:
        for index, rollout in enumerate(super().__iter__()):
            self.progress[1] = index
            yield rollout

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            self.progress[1] = range(len(self))[index]
        return super().__getitem__(index)


class OutOfTime(BaseException):
    """The time limit has passed. Not an Exception, so that a reward's `except Exception` doesn't swallow it."""


class Alarm:
    """The soft time limit: a timer that raises in the main thread, and remembers that it has rung.

    It counts time in which the process ran: the timer ticks every TICK_S, and a late tick counts as RunningTime counts
    it, or as the processor time that was used meanwhile (by code that lets no handler run).
    """

    def __init__(self) -> None:
        self.rang = self._armed = False
        self._left_s = self._used_s = 0.0
        self._clock = RunningTime()

    @contextlib.contextmanager
    def set(self, seconds: float) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals only reach the main thread; this happens only with workers=0 in a thread
            return
        old_handler = signal.signal(signal.SIGALRM, self._tick)
        self._left_s, self._clock, self._used_s = seconds, RunningTime(), time.process_time()
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, min(seconds, TICK_S))
        try:
            yield
        finally:
            self._armed = False  # first of all, since from here on the reward has finished in time
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old_handler)

    def _tick(self, signum: int, frame: Any) -> None:
        if not self._armed:
            return
        used_s = time.process_time()
        self._left_s -= self._clock.since_last(at_least=used_s - self._used_s)
        self._used_s = used_s
        if self._left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, min(self._left_s, TICK_S))
            return
        self._armed = False
        self.rang = True
        raise OutOfTime


def traceback_text() -> str:
    """The traceback of the handled error, or its beginning and end if it is very long."""
    text = traceback.format_exc()
    half = MAX_TRACEBACK // 2
    return text if len(text) <= MAX_TRACEBACK else f"{text[:half]} ... {text[-half:]}"


def last_read(progress: Progress) -> int | None:
    """Index of the completion that the reward has looked at last."""
    return None if progress[1] == NOWHERE else progress[1]


def _listed(values: Any, num_completions: int, kind: str) -> list[Any] | Failure:
    remedy = f"return a list of {kind}, one for each completion, in their order"
    try:
        if isinstance(values, str | bytes | Mapping | Set):
            raise TypeError
        returned = list(values)
    except TypeError:
        problem = f"returned {type(values).__name__}, not a list of {num_completions} {kind}"
        return Failure(cause=Cause.invalid, problem=problem, remedy=remedy)
    if len(returned) != num_completions:
        problem = f"returned {counted(len(returned), 'score')} for {counted(num_completions, 'completion')}"
        return Failure(cause=Cause.invalid, problem=problem, remedy=remedy)
    return returned


def _steps(value: Any, num_chars: int, largest: float) -> StepScores | str:
    """The value as StepScores of floats and ints, or what is wrong with it."""
    if not isinstance(value, StepScores):
        return f"returned {value!r:.80}, not StepScores (it says scores_steps = True),"
    try:
        given_values, given_ends = list(value.values), list(value.ends)
    except TypeError:
        return f"returned {value!r:.80}, whose values and ends are not both sequences,"
    if len(given_values) != len(given_ends):
        return f"returned {counted(len(given_values), 'step score')} with {counted(len(given_ends), 'end')}"
    values: list[float] = []
    ends = [0]
    for number, (score_of_step, given_end) in enumerate(zip(given_values, given_ends, strict=True), start=1):
        score, end = _finite(score_of_step, largest), _whole(given_end)
        if score is None:
            return what_is_wrong(score_of_step, largest, f" for step {number}")[0]
        if end is None:
            return f"returned an end of {given_end!r:.80} for step {number}, not a whole number,"
        if not 1 <= end <= num_chars:
            return f"returned an end of {end} for step {number}, outside 1 .. {num_chars} (the characters of the text),"
        if end <= ends[-1]:
            where = f"not after the step before it, which ends at {ends[-1]},"
            return f"returned an end of {end} for step {number}, {where}"
        values.append(score)
        ends.append(end)
    return StepScores(values=tuple(values), ends=tuple(ends[1:]))


def _whole(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def _finite(value: Any, largest: float) -> float | None:
    """The value as a finite float up to this size, of a Verdict with its answer, else None.

    numpy's and torch's scalars have `item`; text is not a number.
    """
    if isinstance(value, Verdict):
        return None if (number := _finite(float(value), largest)) is None else Verdict(number, value.answer)
    try:
        value = value if isinstance(value, numbers.Real) or not hasattr(value, "item") else value.item()
        number = float(value) if isinstance(value, numbers.Real) else math.nan
        return number if math.isfinite(number) and abs(number) <= largest else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def place_of(error: BaseException) -> str:
    """Where the error was raised, in the innermost frame: " (mine.py, line 12)"."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
