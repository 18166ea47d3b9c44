"""What a worker of the suite does once, or not at all, where a program does it each time: it is hundreds of programs.

Nothing here changes what a test computes. Processes that tests start do everything anew, except where they are forked
from one that has made a plan (launcher.py).
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import composed_once
import hypothesis
import planned_once
import pytest

_ = hypothesis  # first: it looks for what refers to the generators of other packages, and sees nothing that is frozen


@contextmanager
def collected() -> Iterator[None]:
    """Collects garbage before a run, as rlft does, among what has come since the session began."""
    gc.collect()
    yield


@pytest.fixture(scope="session", autouse=True)
def done_once() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    composed_once.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # of a file that is open: no test cuts the power
        patch.setattr("rlft.loop.driver.gc_frozen", collected)
        planned_once.install(patch.setattr)
        yield
