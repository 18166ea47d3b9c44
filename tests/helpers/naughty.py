"""Rewards from outside the tree, most of which misbehave on the completion that says so."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlft.types import StepScores, Unscorable, Verdict


def length(group):
    return [float(len(rollout.completion.text)) for rollout in group.rollouts]


def scaled_length(group, scale):
    return [scale * len(rollout.completion.text) for rollout in group.rollouts]


def misbehave(text):
    """The length of the text, unless it is an order."""
    if text == "raise":
        raise ValueError("no such unit")
    if text == "exit":
        sys.exit(0)
    if text == "sleep":
        time.sleep(60)
    if text == "swallow":
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                time.sleep(60)
            except BaseException:
                return 1.0
    if text == "hang":  # as C code does that never comes back to Python
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})
        time.sleep(60)
    if text == "die":
        os._exit(0)
    if text == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "nan":
        return float("nan")
    if text == "text":
        return "1.0"
    return float(len(text))


def naughty(group):
    return [misbehave(rollout.completion.text) for rollout in group.rollouts]


def verdicts(group):
    texts = [rollout.completion.text for rollout in group.rollouts]
    return [Verdict(misbehave(text), text.lower()) for text in texts]


verdicts.reads_answers = True  # type: ignore[attr-defined]


def note(path, word):
    with Path(path).open("a") as file:
        file.write(f"{word} ")


def diary(group, path):
    """Writes down each completion it comes to, then misbehaves."""
    scores = []
    for rollout in group.rollouts:
        note(path, rollout.completion.text)
        scores.append(misbehave(rollout.completion.text))
    return scores


def naughty_later(group):
    """Collects the texts first, so that watching the rollouts cannot tell which one is at fault."""
    texts = [rollout.completion.text for rollout in group.rollouts]
    return [misbehave(text) for text in texts]


def dawdle(group, path, seconds):
    """Writes down that it was called, then takes its time; its n-th call at most until there is a file `<path>.<n>`."""
    note(path, "called")
    end, number = time.monotonic() + seconds, Path(path).read_text().count("called")
    while time.monotonic() < end and not Path(f"{path}.{number}").exists():
        time.sleep(0.02)
    return length(group)


def spins(group, path, seconds):
    """The same in C code that lets no signal handler run."""
    note(path, "called")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000_000))
    return length(group)


def runs_a_program(group, path, seconds):
    """1 where a program that it runs comes to its end."""
    note(path, "called")
    code = subprocess.run(["sleep", str(seconds)], check=False).returncode
    return [float(code == 0) for _ in group.rollouts]


def ends_its_children(group):
    """1 where children that it forks and starts end by SIGTERM, as they do everywhere."""
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    started = subprocess.Popen(["sleep", "60"])
    forked.terminate()
    started.terminate()
    forked.join(10)
    ended = forked.exitcode == started.wait(10) == -signal.SIGTERM
    return [float(ended) for _ in group.rollouts]


def lazy(group):
    for rollout in group.rollouts:
        yield misbehave(rollout.completion.text)


def nothing(group):
    return None


def dislikes_company(group):
    """Raises only for a whole group: no single completion is at fault."""
    if len(group.rollouts) > 1:
        raise RuntimeError("one at a time")
    return [1.0]


def slow_first(group):
    """The first groups take longest, so that later ones are done before them."""
    time.sleep(0.05 if group.prompt.id in ("p0", "p1") else 0.0)
    return [float(group.prompt.id[1:]) + 0.1 * index for index, _ in enumerate(group.rollouts)]


WRONG_STEPS = {
    "number": 1.0,
    "lengths": StepScores(values=(1.0,), ends=(1, 2)),
    "bare": StepScores(values=None, ends=None),  # type: ignore[arg-type]
    "infinite": StepScores(values=(1.0, float("inf")), ends=(1, 2)),
    "word": StepScores(values=("1",), ends=(1,)),  # type: ignore[arg-type]
    "half": StepScores(values=(1.0,), ends=(1.5,)),  # type: ignore[arg-type]
    "zero": StepScores(values=(1.0,), ends=(0,)),
    "late": StepScores(values=(1.0, 1.0), ends=(4, 5)),
    "same": StepScores(values=(1.0, 1.0), ends=(2, 2)),
    "back": StepScores(values=(1.0, 1.0), ends=(3, 1)),
}


def stepwise(group):
    """A step for each word, scored by its length, unless the text is an order."""
    return [word_steps(rollout.completion.text) for rollout in group.rollouts]


def word_steps(text):
    if text in WRONG_STEPS:
        return WRONG_STEPS[text]
    misbehave(text)
    words = list(re.finditer(r"\S+", text))
    return StepScores(values=tuple(len(word[0]) for word in words), ends=tuple(word.end() for word in words))


stepwise.scores_steps = True


def unsaid(group):
    return [StepScores(values=(1.0,), ends=(1,)) for _ in group.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class SameSteps:
    """These steps for every completion."""

    scores_steps: ClassVar[bool] = True

    values: list[float]
    ends: list[int]

    def __call__(self, group):
        return [StepScores(values=tuple(self.values), ends=tuple(self.ends)) for _ in group.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """For the trainer: it must never come to a worker."""

    runs_in_trainer: ClassVar[bool] = True

    taste: str

    def __call__(self, group):
        raise AssertionError("scored in a worker")


def imports_torch(group):
    return [float("torch" in sys.modules) for _ in group.rollouts]


def reports_pid(group):
    return [float(os.getpid()) for _ in group.rollouts]


@dataclass(frozen=True, kw_only=True)
class Bonus:
    bonus: float

    def __call__(self, group):
        return [self.bonus for _ in group.rollouts]


class StartsBadly:
    def start(self):
        raise OSError("the sandbox is not there")

    def __call__(self, group):
        return [0.0 for _ in group.rollouts]


class NotAReward:
    pass


number = 5


def every_character(group):
    """A process reward that gives 1 for each character."""
    numbers = [len(rollout.completion.text) for rollout in group.rollouts]
    return [StepScores(values=(1.0,) * n, ends=tuple(range(1, n + 1))) for n in numbers]


every_character.scores_steps = True


def unscorable(group):
    raise Unscorable("the reference answer is of no use")


def always_right(group):
    return [1.0 for _ in group.rollouts]


def contrary(group):
    return [float(group.prompt.answer not in r.completion.text) for r in group.rollouts]


def broken(group):
    raise ValueError("no such thing")
