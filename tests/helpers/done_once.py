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


MOST = 50_000
"""Objects that a collection of garbage goes through in 30 ms; the modules of a session are half a million."""


@contextmanager
def collected() -> Iterator[None]:
    """Collects garbage before a run, as rlft does, among what is not frozen."""
    gc.collect()
    if len(gc.get_objects()) > MOST:  # modules that have come, or all of them: an engine of vLLM unfreezes them
        gc.freeze()
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
