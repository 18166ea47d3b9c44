"""Ctrl-C (or SIGTERM) once: finish the step, save, exit 130. Twice: stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

EXIT_CODE = 130


class Interrupt:
    """Inside the context, `requested` turns true at the first signal; the second raises KeyboardInterrupt."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.requested = say, False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.say("interrupted: finishing this step, then saving; once more stops at once")
