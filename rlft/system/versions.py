"""The format of a run's files, so that a file of a newer rlft is not reported as damaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rlft

FORMAT = 1
"""Format of config.yaml, status.json, state.json and progress.json; raised when an older rlft would misread them."""

KEY = "format"


class NewerError(ValueError):
    """A file was written by a newer rlft; the message continues the file's name: `was written by ..`."""


def problem_of_format(values: Any) -> str | None:
    """Why this rlft cannot read a file with these values; None if it can.

    Files without a format have the first one.

    >>> problem_of_format({"format": 1}), problem_of_format({}), problem_of_format({"format": 3})
    (None, None, 'was written by a newer rlft (format 3, this one reads up to 1)')
    """
    number = values.get(KEY, FORMAT) if isinstance(values, Mapping) else FORMAT
    if type(number) is int and number > FORMAT:
        return f"was written by a newer rlft ({KEY} {number}, this one reads up to {FORMAT})"
    return None


def is_newer(version: Any) -> bool:
    """Whether this is a later version of rlft than the running one.

    >>> is_newer("999.0"), is_newer("0.0.1"), is_newer(None)
    (True, False, False)
    """
    return isinstance(version, str) and _numbers(version) > _numbers(rlft.__version__)


def _numbers(version: str) -> list[int]:
    """The leading numbers of a version: [1, 2] of 1.2.dev3."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return numbers
