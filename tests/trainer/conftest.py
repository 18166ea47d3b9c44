"""The connections between ranks that are threads of one process, and batches for them to train on."""

import itertools
from contextlib import ExitStack

import met_ranks
import pytest
import torch
from met_ranks import meeting

from rlft.trainer import ranks
from rlft.trainer.ranks import LOOPBACK, open_store


@pytest.fixture(scope="module")
def store():
    return open_store(LOOPBACK)


@pytest.fixture
def met(store, request):
    """Connects so many ranks, all in this process."""
    count = itertools.count()
    with ExitStack() as stack:

        def meet(ranks, timeout=60.0):
            where = meeting(store, f"{request.node.name} {next(count)}", ranks, timeout)
            return stack.enter_context(met_ranks.met(where))

        yield meet


@pytest.fixture
def soon_closed(monkeypatch):
    """Connections of which nobody hears the end, as one of a rank that still waits, are not waited for."""
    monkeypatch.setattr(ranks, "CLOSE_S", 0.1)


@pytest.fixture
def batches(make_batch):
    """Of three steps: four groups of three completions of unlike lengths; the rewards of one group are equal."""
    generator = torch.Generator().manual_seed(5)

    def tokens():
        number = int(torch.randint(1, 9, (), generator=generator))
        return torch.randint(5, 60, (number,), generator=generator).tolist()

    made = []
    for _ in range(3):
        prompts = [tokens() for _ in range(4)]
        rows = [(group, prompts[group], tokens()) for group in range(4) for _ in range(3)]
        made.append(make_batch(rows, rewards=[1, 0, 0.5, 2, 2, 2, 0, 0, 1, 1, 0, 1]))
    return made
