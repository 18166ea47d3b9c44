"""The connections between ranks that are threads of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlft.system.process.running_time import in_background
from rlft.trainer.ranks import LOOPBACK, Exchange, Rendezvous, open_store

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store() -> Any:
    return open_store(LOOPBACK)


@pytest.fixture
def met(store: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Exchange]]]:
    """Connects so many ranks, all in this process."""
    opened: list[Exchange] = []
    count = itertools.count()

    def meet(ranks: int, timeout: float = 60.0) -> list[Exchange]:
        name = f"{request.node.name} {next(count)}"
        where = Rendezvous(host=LOOPBACK, port=store.port, name=name, ranks=ranks, timeout=timeout)
        futures = [in_background(lambda rank=rank: Exchange(where, rank, CPU)) for rank in range(ranks)]
        met = [future.result(60) for future in futures]
        opened.extend(met)
        return met

    yield meet
    for exchange in opened:
        exchange.close()
