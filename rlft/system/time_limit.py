"""A limit for calls into libraries that know none, or one of minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rlft.system.running_time import TICK_S, RunningTime

Result = TypeVar("Result")


def within(seconds: float, call: Callable[..., Result], *arguments: Any) -> Result:
    """What the call returns. It runs in a thread of its own, which is left to itself once the time is over.

    seconds: in which this process could run; a pause uses up none.

    Raises:
        TimeoutError: the call has not come back in time; or whatever it raises.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"within {seconds:g} s", daemon=True).start()
    clock = RunningTime()
    while not wait([future], timeout=TICK_S).done:
        if clock() >= seconds:
            raise TimeoutError(f"no answer in {seconds:g} s")
    return future.result()
