"""Proof that the engine samples from the policy that was just published: fixed tokens, scored by both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlft.types import Generator


class StaleAdapterError(RuntimeError):
    """The engine's log-probs are not those of the adapter version it was told to use."""


class Scorer(Protocol):
    def score(self, sequences: list[list[int]]) -> list[list[float]]: ...


class Freshness:
    """Compares engine and trainer after each publish; remembers earlier versions to say which one a stale engine holds.

    sequences: token ids, a few short ones. threshold: largest gap in nats. every: publishes between checks.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], threshold: float, every: int) -> None:
        self.sequences = [list(ids) for ids in sequences]
        self.threshold, self.every = threshold, every
        self.history: dict[int, list[float]] = {}
        self.num_checks = 0

    def check(self, version: int, generator: Generator, trainer: Scorer) -> float | None:
        """The largest gap in nats; None when this publish is not due or the engine has no weights.

        Raises:
            StaleAdapterError: the gap is over the threshold; the message holds both numbers.
        """
        if self.num_checks and version % self.every:
            return None
        self.num_checks += 1
        engine = flatten(generator.score(self.sequences))
        if not engine:
            return None
        expected = flatten(trainer.score(self.sequences))
        gap, place = largest_gap(engine, expected)
        if gap > self.threshold:
            raise StaleAdapterError(self._explain(version, engine, expected, place))
        self.history = {**dict(list(self.history.items())[-3:]), version: expected}
        return gap

    def _explain(self, version: int, engine: list[float], expected: list[float], place: int) -> str:
        text = (
            f"freshness: the engine does not sample from policy version {version}: it gives a fixed token log-prob "
            f"{engine[place]:.6f}, the trainer {expected[place]:.6f} (gap {abs(engine[place] - expected[place]):.2e}, "
            f"threshold {self.threshold:.0e})"
        )
        gaps = {v: largest_gap(engine, scores)[0] for v, scores in self.history.items()}
        if gaps and min(gaps.values()) <= self.threshold:
            held = min(gaps, key=lambda v: gaps[v])
            text += f"; it still holds version {held} (gap {gaps[held]:.2e})"
        return text + "; stopped rather than train on stale rollouts. freshness.threshold=<nats> loosens the check"


def flatten(scores: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in scores for value in row]


def largest_gap(a: Sequence[float], b: Sequence[float]) -> tuple[float, int]:
    """(largest |a - b|, its place). A NaN counts as infinitely far."""
    gaps = [abs(x - y) if x == x and y == y else float("inf") for x, y in zip(a, b, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return gaps[worst], worst
