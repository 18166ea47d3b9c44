"""Shows the progress of long work before a run's loggers have started: a line on stderr now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rlft.system.terminal import say

Item = TypeVar("Item")

EVERY_S = 10.0
"""Seconds between two lines; shorter work prints none."""
CHECKED = 256
"""Items between two readings of the clock."""


def with_progress(
    items: Iterable[Item],
    what: str,
    total: int,
    size: Callable[[Item], int] = lambda item: 1,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """Yields the items, and prints every EVERY_S seconds how many are done and how long the rest will take.

    Args:
        items: the items.
        what: the text before the number, such as "data.path: reading big.jsonl".
        total: the sum of the items' sizes.
        size: returns the size of an item.
        clock: returns the time in seconds.
    """
    start = last_shown = clock()
    done = 0
    for number, item in enumerate(items, 1):
        yield item
        done += size(item)
        if number % CHECKED == 0 and (now := clock()) - last_shown > EVERY_S:
            last_shown = now
            remaining_s = (now - start) * (total - done) / max(1, done)
            say(f"{what}: {100 * done / max(1, total):.0f} %, about {_duration(remaining_s)} more")


def _duration(seconds: float) -> str:
    """The duration in its largest unit.

    >>> _duration(40), _duration(300)
    ('40 s', '5 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
