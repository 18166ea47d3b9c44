"""What a worker of the suite does once, where a program would do it each time: it runs hundreds of them in one process.

Nothing here changes what a test computes. Processes that tests start do everything anew.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml_once
from omegaconf import OmegaConf

import rlft.loop.shell


@contextmanager
def collected() -> Iterator[None]:
    """Collects garbage before a run, as rlft does, among what has come since the session began."""
    gc.collect()
    yield


@pytest.fixture(scope="session", autouse=True)
def done_once() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", yaml_once.load)
        patch.setattr(rlft.loop.shell, "gc_frozen", collected)
        yield
