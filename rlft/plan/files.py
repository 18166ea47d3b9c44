"""Checks that components make themselves before anything is read, mainly that the files they name exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.config.instantiate import instantiate


def check_data(section: Mapping[str, Any], key: str = "data") -> None:
    """Makes the component that a section describes, and calls its `check()` if it has one.

    Raises:
        UserError: a key of the component is wrong.
    """
    check = getattr(instantiate(section, key), "check", None)
    if callable(check):
        check()
