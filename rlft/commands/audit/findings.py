"""What an audit has found, as the rows of its table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlft.system.check_rows import CheckRow, Status

SHOWN = 4
"""Differences of one check that have a row each."""


class Findings:
    """Collects rows: `ok` is confirmed, `skipped` could not be confirmed, `wrong` differs."""

    def __init__(self) -> None:
        self.rows: list[CheckRow] = []
        self._left = SHOWN
        self._more: list[str] = []

    @property
    def differs(self) -> bool:
        return any(row.status is Status.wrong for row in self.rows)

    def confirm(self, what: str, how: str) -> None:
        self.rows.append(CheckRow(what, Status.ok, how))

    def leave_open(self, what: str, why: str) -> None:
        self.rows.append(CheckRow(what, Status.skipped, why))

    def differ(self, where: str, how: str) -> None:
        """where: the file or part; how: the step, and what differs."""
        if self._left:
            self._left -= 1
            self.rows.append(CheckRow(where, Status.wrong, how))
        else:
            self._more.append(f"{where}: {how}")

    @contextmanager
    def checking(self, what: str, confirmed: str) -> Iterator[None]:
        """Confirms this if nothing inside differs; at most SHOWN differences have rows of their own."""
        before = len(self.rows)
        self._left, self._more = SHOWN, []
        yield
        if all(row.status is not Status.wrong for row in self.rows[before:]) and confirmed:
            self.rows.insert(before, CheckRow(what, Status.ok, confirmed))
        if self._more:
            text = f"{len(self._more)} more differences, the last of them: {self._more[-1]}"
            self.rows.append(CheckRow(what, Status.wrong, text))
        self._left, self._more = SHOWN, []


def steps_text(steps: list[int]) -> str:
    """Steps in words, without those in the middle of a long list.

    >>> steps_text([3]), steps_text([1, 2, 3]), steps_text(list(range(1, 90)))
    ('step 3', 'steps 1, 2, 3', 'steps 1, 2, 3 .. 89')
    """
    shown = ", ".join(map(str, steps)) if len(steps) <= 4 else f"{', '.join(map(str, steps[:3]))} .. {steps[-1]}"
    return f"step{'s' * (len(steps) > 1)} {shown}"
