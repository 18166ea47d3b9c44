"""Ctrl-C (or SIGTERM) once: finish the step, save, exit 130. Twice: stop at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def ends_the_process() -> Iterator[None]:
    """Inside, a signal ends the process at once, without a word: for slow imports, when there is nothing to save yet.

    KeyboardInterrupt in the middle of an import is not told as such: libraries catch it, and go on half imported.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, frame: os._exit(EXIT_CODE)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """Inside the context, `requested` turns true at the first signal; the second raises KeyboardInterrupt."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.requested = say, False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.say("interrupted: finishing this step, then saving; once more stops at once")
