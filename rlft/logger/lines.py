"""The lines of a JSONL file that are whole, and what is known of those that are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')
"""Where a line begins: a damaged newline leaves several lines in one."""


@dataclass(slots=True, kw_only=True)
class Lost:
    """Damaged lines that follow each other.

    Args:
        first: number of the first of them, from 1.
        last: number of the last.
        steps: those that can still be read of them.
        after: the step of the whole line before them, None where there is none.
        before: the step of the whole line behind them, None where there is none.
    """

    first: int
    last: int
    steps: list[int]
    after: int | None
    before: int | None = None

    def may_be_until(self, step: int) -> bool:
        """Whether something of this step or an earlier one is lost."""
        return min(self.steps) <= step if self.steps else self.after is None or self.after < step

    def __str__(self) -> str:
        """Their numbers and steps."""
        lines = f"line {self.first}" if self.first == self.last else f"lines {self.first} to {self.last}"
        return f"{lines} ({self._steps()})" if self._steps() else lines

    def _steps(self) -> str:
        number = self.last - self.first + 1
        steps = self.steps
        if not steps and self.after is not None and self.before is not None and self.before - self.after == number + 1:
            steps = list(range(self.after + 1, self.before))
        if steps:
            return f"step{'s' * (len(set(steps)) > 1)} {', '.join(map(str, dict.fromkeys(steps)))}"
        if self.after is not None and self.before is not None:
            return f"between steps {self.after} and {self.before}"
        if self.after is not None:
            return f"after step {self.after}"
        return "" if self.before is None else f"before step {self.before}"


def has_step(line: dict[str, Any]) -> bool:
    """Whether this is a line of metrics, evaluations, alarms or rollouts."""
    return type(line.get("step")) is int


def complete_lines(
    file: Iterable[bytes], lost: list[Lost] | None = None, is_whole: Callable[[dict[str, Any]], bool] = has_step
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(bytes up to the line's end, line) of the lines that are whole; a last one without an end is still being written.

    lost: gets what is damaged. is_whole: whether a line's JSON is one of such a file.
    """
    end, step, part = 0, None, None
    for number, raw in enumerate(file, start=1):
        end += len(raw)
        if not raw.endswith(b"\n"):
            return
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and is_whole(line):
            step = line.get("step")
            if part is not None:
                part.before, part = step, None
            yield end, line
            continue
        steps = [int(digits) for digits in _STEP.findall(raw)]
        if part is None:
            part = Lost(first=number, last=number, steps=steps, after=step)
            if lost is not None:
                lost.append(part)
        else:
            part.last = number
            part.steps += steps


def lost_text(path: Path, lost: Sequence[Lost]) -> str:
    """One line that names the file, the lines and their steps."""
    verb = "is" if len(lost) == 1 and lost[0].first == lost[0].last else "are"
    return f"{path}: {', '.join(map(str, lost))} {verb} damaged and left out"
