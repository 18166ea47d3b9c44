"""Parses `device_memory=24GiB` of `rlft plan`."""

from __future__ import annotations

import re

from rlft.types import UserError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_bytes(text: str) -> int:
    """The number of bytes in `24GiB`, `512 MB` or a bare number of bytes.

    >>> read_bytes("24GiB"), read_bytes("0.5 GB"), read_bytes("8000000000")
    (25769803776, 500000000, 8000000000)

    Raises:
        UserError: the text is not a size, or is one below 1 MiB.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    unit = UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise UserError("device_memory", "must be a size", got=text, remedy="write it as 24GiB")
    if float(match[1]) * unit < UNITS["MIB"]:
        problem = "no device has so little memory" if match[2] else "has no unit, and no device has so few bytes"
        raise UserError("device_memory", problem, got=text, remedy=f"write {match[1]}GiB")
    return int(float(match[1]) * unit)
