"""Ranks in threads of this process, and how they meet there, each with connections of its own."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from rlft.system.process.running_time import in_background
from rlft.trainer.ranks import LOOPBACK, Exchange, Rendezvous

CPU = torch.device("cpu")


def together(works: Sequence[Callable[[], Any]], limit: float = 60.0) -> list[Any]:
    """What functions return that run at the same time."""
    futures: list[Future[Any]] = [in_background(work) for work in works]
    return [future.result(limit) for future in futures]


def meeting(store: Any, name: str, ranks: int, timeout: float = 20.0, sequence: int = 1) -> Rendezvous:
    return Rendezvous(host=LOOPBACK, port=store.port, name=name, ranks=ranks, sequence=sequence, timeout=timeout)


@contextmanager
def met(where: Rendezvous) -> Iterator[list[Exchange]]:
    """All ranks, in this process."""
    others: list[Future[Any]] = [
        in_background(lambda rank=rank: Exchange(where, rank, CPU)) for rank in range(1, where.ranks)
    ]
    exchanges = [Exchange(where, 0, CPU), *(other.result(120) for other in others)]
    try:
        yield exchanges
    finally:
        for exchange in exchanges:
            exchange.close()
