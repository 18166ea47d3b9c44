"""Checks that components make themselves before anything is read, mainly that the files they name exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlft.config.schema import ALLOW_UNSCORABLE
from rlft.keys.instantiate import convert, instantiate


def check_data(section: Mapping[str, Any], key: str = "data") -> None:
    """Makes the component that a section describes, and calls its `check()` if it has one.

    Raises:
        UserError: a key of the component is wrong.
    """
    check = getattr(component(section, key), "check", None)
    if callable(check):
        check()


def component(section: Mapping[str, Any], key: str = "data") -> Any:
    """The component that a section describes, without the key of `data` that is not its own. Raises UserError."""
    if key == "data" and isinstance(section, Mapping) and ALLOW_UNSCORABLE in section:
        convert(bool, section[ALLOW_UNSCORABLE], f"data.{ALLOW_UNSCORABLE}")
        section = {name: value for name, value in section.items() if name != ALLOW_UNSCORABLE}
    return instantiate(section, key)
