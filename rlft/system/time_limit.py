"""A time limit for calls into libraries that have none, or one of minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rlft.system.running_time import TICK_S, RunningTime

Result = TypeVar("Result")


def within(seconds: float, call: Callable[..., Result], *arguments: Any) -> Result:
    """Returns what the call returns. The call runs in a thread of its own, which is abandoned when the time is over.

    Args:
        seconds: the time limit; time in which this process is stopped does not count.
        call: the function to call.
        arguments: its arguments.

    Raises:
        TimeoutError: the call has not returned in time. What the call raises is raised, too.
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
