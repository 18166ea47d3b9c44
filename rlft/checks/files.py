"""What components can say of themselves before anything is read: above all that the files they name are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.targets import instantiate


def check_data(section: Mapping[str, Any], key: str = "data") -> None:
    """The component that a section describes can be made, and its own `check()`, if it has one, finds nothing wrong.

    Raises:
        UserError: of a key of the component.
    """
    check = getattr(instantiate(section, key), "check", None)
    if callable(check):
        check()
