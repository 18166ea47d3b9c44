"""Ranks in threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlft.system.process.running_time import in_background


def together(works: Sequence[Callable[[], Any]], limit: float = 60.0) -> list[Any]:
    """What functions return that run at the same time."""
    futures: list[Future[Any]] = [in_background(work) for work in works]
    return [future.result(limit) for future in futures]
