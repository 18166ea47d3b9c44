"""The connections between ranks that are threads of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import met_ranks
import pytest
from met_ranks import meeting

from rlft.trainer.ranks import LOOPBACK, Exchange, open_store


@pytest.fixture(scope="module")
def store() -> Any:
    return open_store(LOOPBACK)


@pytest.fixture
def met(store: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Exchange]]]:
    """Connects so many ranks, all in this process."""
    count = itertools.count()
    with ExitStack() as stack:

        def meet(ranks: int, timeout: float = 60.0) -> list[Exchange]:
            where = meeting(store, f"{request.node.name} {next(count)}", ranks, timeout)
            return stack.enter_context(met_ranks.met(where))

        yield meet
