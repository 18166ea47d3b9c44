"""Cases of a test that `make test` leaves to `make test-all`, where one case or a few prove the kind."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One case of these values."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(quick: Any, cases: Iterable[Any]) -> list[Any]:
    """Cases of one value each, of which all but this one are slow."""
    cases = list(cases)
    assert quick in cases
    return [case if case == quick else slow(case) for case in cases]
