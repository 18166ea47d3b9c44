"""Begins scoring as groups finish: a thread has the reward workers score them while others are still sampled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rlft.reward.workers.scorer import Scorer
from rlft.reward.workers.worker import Outcome
from rlft.types import Group, Scores


class AheadScorer:
    """Gives the same scores as its `Scorer`, but the reward workers begin before they are called.

    One thread uses the reward workers, so that two threads never use them at a time. Rewards that the trainer computes
    wait for the whole call, in the calling thread.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring ahead")
        self._lock = threading.Lock()
        self._begun: list[tuple[Sequence[Group], Future[dict[tuple[int, str], Outcome]]]] = []

    @property
    def num_failures(self) -> int:
        return self._scorer.num_failures

    @property
    def last_failure(self) -> str | None:
        return self._scorer.last_failure

    def begin(self, groups: Sequence[Group]) -> None:
        """Begins to score these groups; a later call with them uses the scores."""
        with self._lock:
            self._begun.append((groups, self._thread.submit(self._scorer.outcomes, groups)))

    def __call__(self, groups: Sequence[Group]) -> Scores:
        """Does what `Scorer.__call__` does."""
        positions = {id(group): position for position, group in enumerate(groups)}
        with self._lock:
            relevant = [begun for begun in self._begun if any(id(group) in positions for group in begun[0])]
            self._begun = [begun for begun in self._begun if begun not in relevant]
        known = {
            (positions[id(begun[index])], name): outcome
            for begun, future in relevant
            for (index, name), outcome in future.result().items()
            if id(begun[index]) in positions
        }
        return self._scorer.finished(groups, self._thread.submit(self._scorer.pooled, groups, known).result())

    def close(self) -> None:
        """Ends the thread and the workers. Safe to call twice."""
        self._scorer.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._scorer.close()
