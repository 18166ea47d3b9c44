"""`device_memory=24GiB` of `rlft plan`, as bytes."""

from __future__ import annotations

import re

from rlft.types import UserError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_bytes(text: str) -> int:
    """The number of bytes that `24GiB`, `512 MB` or a bare number of bytes says.

    >>> read_bytes("24GiB"), read_bytes("0.5 GB"), read_bytes("1000")
    (25769803776, 500000000, 1000)

    Raises:
        UserError: the text is no size of a byte or more.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    unit = UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise UserError("device_memory", "must be a size", got=text, remedy="write it as 24GiB")
    return int(float(match[1]) * unit)
