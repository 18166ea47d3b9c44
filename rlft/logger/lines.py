"""Reads the undamaged lines of a JSONL file, and describes the damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')
"""The beginning of a line; a damaged newline joins several lines into one."""


@dataclass(slots=True, kw_only=True)
class DamagedLines:
    """Damaged lines that follow each other.

    Attributes:
        first: number of the first of these lines, from 1.
        last: number of the last one.
        steps: the steps that can still be read in them.
        after: the step of the undamaged line before them; None if there is none.
        before: the step of the undamaged line after them; None if there is none.
    """

    first: int
    last: int
    steps: list[int]
    after: int | None
    before: int | None = None

    def may_be_until(self, step: int) -> bool:
        """Whether a line of this step or an earlier one may be among them."""
        return min(self.steps) <= step if self.steps else self.after is None or self.after < step

    def __str__(self) -> str:
        """The numbers and steps of the lines, in words."""
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
    file: Iterable[bytes], lost: list[DamagedLines] | None = None, is_whole: Callable[[dict[str, Any]], bool] = has_step
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(bytes up to the line's end, line) of each undamaged line; a last line without a newline is still being written.

    Args:
        file: the raw lines of the file.
        lost: the list to which damaged lines are added.
        is_whole: whether a parsed line is one of such a file.
    """
    end, step, lost_lines = 0, None, None
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
            if lost_lines is not None:
                lost_lines.before, lost_lines = step, None
            yield end, line
            continue
        steps = [int(digits) for digits in _STEP.findall(raw)]
        if lost_lines is None:
            lost_lines = DamagedLines(first=number, last=number, steps=steps, after=step)
            if lost is not None:
                lost.append(lost_lines)
        else:
            lost_lines.last = number
            lost_lines.steps += steps


def lost_text(path: Path, lost: Sequence[DamagedLines]) -> str:
    """One line that names the file, the lines and their steps."""
    verb = "is" if len(lost) == 1 and lost[0].first == lost[0].last else "are"
    return f"{path}: {', '.join(map(str, lost))} {verb} damaged and left out"
