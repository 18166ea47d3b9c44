"""Rewards from outside the tree, most of which misbehave on the completion that says so."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path


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


def diary(group, path):
    """Writes down each completion it comes to, then misbehaves."""
    scores = []
    for rollout in group.rollouts:
        with Path(path).open("a") as file:
            file.write(f"{rollout.completion.text} ")
        scores.append(misbehave(rollout.completion.text))
    return scores


def naughty_later(group):
    """Collects the texts first, so that watching the rollouts cannot tell which one is at fault."""
    texts = [rollout.completion.text for rollout in group.rollouts]
    return [misbehave(text) for text in texts]


def lazy(group):
    for rollout in group.rollouts:
        yield misbehave(rollout.completion.text)


def too_few(group):
    return [1.0]


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
