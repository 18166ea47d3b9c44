"""Checks that the engine samples from the policy just published: engine and trainer score fixed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlft.cluster.engine_pool import EnginePool, StaleEngineError
from rlft.types import Generator

REMEDY = "freshness.threshold=<nats> loosens the check"


class StaleAdapterError(RuntimeError):
    """The engine's log-probs are not those of the adapter version that it was given."""


class SequenceScorer(Protocol):
    def score(self, sequences: list[list[int]]) -> list[list[float]]: ...


class Freshness:
    """Compares engine and trainer after a publish; remembers earlier versions to name the one a stale engine holds.

    Args:
        sequences: a few short sequences of token ids to score.
        threshold: the largest allowed gap, in nats.
        every: number of publishes from one check to the next.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], threshold: float, every: int) -> None:
        self.sequences = [list(ids) for ids in sequences]
        self.threshold, self.every = threshold, every
        self.history: dict[int, list[float]] = {}
        self.num_checks = 0

    def check(self, version: int, generator: Generator, trainer: SequenceScorer) -> float | None:
        """The largest gap in nats; None if no check is due or the engine has no weights.

        Raises:
            StaleAdapterError: the gap exceeds the threshold; the message has both numbers.
        """
        is_due = not self.num_checks or version % self.every == 0
        if isinstance(generator, EnginePool):
            return self._check_each(version, generator, trainer, is_due)
        if not is_due:
            return None
        self.num_checks += 1
        engine = flatten(generator.score(self.sequences))
        if not engine:
            return None
        expected = flatten(trainer.score(self.sequences))
        gap, position = largest_gap(engine, expected)
        if gap > self.threshold:
            text = self._explain(version, engine, expected, position)
            raise StaleAdapterError(f"{text}; stopped rather than train on stale rollouts. {REMEDY}")
        self._remember(version, expected)
        return gap

    def check_again(self, version: int, generator: Generator) -> None:
        """Checks that the engine samples from a version that was checked before; does nothing if it was not.

        Raises:
            StaleAdapterError: the gap to the log-probs of that earlier check exceeds the threshold.
        """
        expected = self.history.get(version)
        if expected and isinstance(generator, EnginePool):
            self._verify_each(version, generator, expected, now=True)
            return
        engine = flatten(generator.score(self.sequences)) if expected else []
        if not engine or not expected:
            return
        gap, position = largest_gap(engine, expected)
        if gap > self.threshold:
            text = self._explain(version, engine, expected, position)
            raise StaleAdapterError(f"{text}; stopped rather than train on stale rollouts. {REMEDY}")

    def _check_each(self, version: int, pool: EnginePool, trainer: SequenceScorer, is_due: bool) -> float | None:
        """The largest gap of all engines; None if no check is due, or engines have no weights."""
        expected = flatten(trainer.score(self.sequences))
        self.num_checks += is_due
        gaps = self._verify_each(version, pool, expected, now=is_due)
        self._remember(version, expected)
        return max(gaps, default=None)

    def _verify_each(self, version: int, pool: EnginePool, expected: list[float], *, now: bool) -> list[float]:
        """The gaps of all engines; one that is stale is replaced. The pool checks engines that join later in any case.

        Raises:
            StaleAdapterError: an engine that has replaced a stale one is stale, too.
        """
        gaps: list[float] = []

        def accept(scores: list[list[float]]) -> str | None:
            engine = flatten(scores)
            if not engine:  # it has no weights
                return None
            gap, position = largest_gap(engine, expected)
            if gap > self.threshold:
                return self._explain(version, engine, expected, position)
            gaps.append(gap)
            return None

        try:
            pool.verify(self.sequences, accept, now=now)
        except StaleEngineError as error:
            raise StaleAdapterError(f"{error}; stopped rather than train on stale rollouts. {REMEDY}") from error
        return gaps

    def _remember(self, version: int, expected: list[float]) -> None:
        self.history = {**dict(list(self.history.items())[-3:]), version: expected}

    def _explain(self, version: int, engine: list[float], expected: list[float], position: int) -> str:
        actual, trained = engine[position], expected[position]
        text = (
            f"freshness: the engine does not sample from policy version {version}: it gives a fixed token log-prob "
            f"{actual:.6f}, the trainer {trained:.6f} (gap {abs(actual - trained):.2e}, "
            f"threshold {self.threshold:.0e})"
        )
        gaps = {v: largest_gap(engine, scores)[0] for v, scores in self.history.items()}
        if gaps and min(gaps.values()) <= self.threshold:
            held_version = min(gaps, key=lambda v: gaps[v])
            text += f"; it still holds version {held_version} (gap {gaps[held_version]:.2e})"
        return text


def flatten(scores: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in scores for value in row]


def largest_gap(a: Sequence[float], b: Sequence[float]) -> tuple[float, int]:
    """(largest |a - b|, its index). A NaN counts as an infinite gap."""
    gaps = [abs(x - y) if x == x and y == y else float("inf") for x, y in zip(a, b, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return gaps[worst], worst
