"""What whole steps do on the pretended card: waits, uploads and launches of each stage, by line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pretended_card import COUNTS

from rlft import cli
from rlft.loop.metrics import Clock


def main(*words: str) -> list[dict[str, Any]]:
    """Of each step but the first, what was done since the one before: {stage: its counts}; "" has what no stage has."""
    steps: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    enter, end_step = Clock.__call__, Clock.end_step

    def take(stage: str) -> None:
        counts = {"waits": COUNTS.waits, "uploads": COUNTS.uploads, "launches": COUNTS.launches}
        for kind, counter in counts.items():
            found.setdefault(stage, {k: type(counter)() for k in counts})[kind].update(counter)
        COUNTS.clear()

    @contextmanager
    def counted(clock: Clock, stage: str) -> Iterator[None]:
        take("")
        with enter(clock, stage):
            yield
        take(stage)

    def ended(clock: Clock) -> dict[str, float]:
        nonlocal found
        take("")
        steps.append(found)
        found = {}
        return end_step(clock)

    Clock.__call__, Clock.end_step = counted, ended  # type: ignore[method-assign,assignment]
    code = cli.run(list(words))
    assert code == 0, f"exit {code}"
    return steps[2:]
