"""Checks what is required before programs that a model wrote are run on this machine."""

from __future__ import annotations

from enum import StrEnum

from rlft.system.sandbox import bubblewrap
from rlft.system.sandbox.bubblewrap import Isolation
from rlft.types import UserError


class Required(StrEnum):
    """What is required to run programs: isolation, or isolation with all memory bounded."""

    standard = "standard"
    strict = "strict"


def check_isolation(required: Required, *, allow_unsafe: bool) -> None:
    """Refuses to run programs here without the required isolation.

    Args:
        required: `strict` also refuses if memory is not bounded, and has priority over `allow_unsafe`.
        allow_unsafe: whether programs may run unisolated, with this user's rights, if no isolation works.

    Raises:
        UserError: by `isolation` or `allow_unsafe`, without the section: no isolation works here and `allow_unsafe` is
            false, or the isolation is less than `required`.
    """
    isolation, what = bubblewrap.available()
    strict = required is Required.strict
    if isolation is Isolation.none and (strict or not allow_unsafe):
        raise UserError(
            "isolation" if strict else "allow_unsafe",
            f"programs that a model wrote would run unisolated here ({what})",
            got=required.value if strict else "false",
            remedy="install bubblewrap 0.7 or newer (apt install bubblewrap, dnf install bubblewrap; a container "
            "must allow user namespaces), or set "
            + ("isolation=standard and allow_unsafe=true" if strict else "it to true")
            + " where nothing can be lost",
        )
    if strict and not (bound := bubblewrap.memory_bound()):
        raise UserError(
            "isolation",
            bound.sentence,
            got=required.value,
            remedy="run where there is a systemd user session or a delegated memory cgroup, or set it to standard",
        )
