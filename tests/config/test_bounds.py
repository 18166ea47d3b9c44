"""The ends of bounded numbers: each end that is allowed is taken, and what lies behind it is refused."""

import re
import sys

import pytest
from in_one_test import each

from rlft.config import bounds
from rlft.config.instantiate import convert
from rlft.types import UserError

TINY, LARGE = 5e-324, sys.float_info.max
ENDS = {  # {type: (least, greatest, what is refused and why)}
    "PositiveInt": (1, 2**99, {0: "greater than 0"}),
    "NonNegativeInt": (0, 2**99, {-1: "greater than or equal to 0"}),
    "Seed": (0, 2**63 - 1, {-1: "greater than or equal to 0", 2**63: "at most 2**63-1"}),
    "PositiveFloat": (TINY, LARGE, {0.0: "greater than 0"}),
    "AboveOne": (1 + 2**-52, LARGE, {1.0: "greater than 1"}),
    "NonNegativeFloat": (0.0, LARGE, {-TINY: "greater than or equal to 0"}),
    "Fraction": (0.0, 1.0, {-TINY: "greater than or equal to 0", 1 + 2**-52: "less than or equal to 1"}),
    "PositiveFraction": (TINY, 1.0, {0.0: "greater than 0", 1 + 2**-52: "less than or equal to 1"}),
    "BelowHalf": (0.0, 0.5 - 2**-54, {-TINY: "greater than or equal to 0", 0.5: "less than 0.5"}),
    "Decay": (0.0, 1 - 2**-53, {-TINY: "greater than or equal to 0", 1.0: "less than 1"}),
    "Port": (0, 65535, {-1: "greater than or equal to 0", 65536: "less than or equal to 65535"}),
}


@each(("name", "ends"), ENDS.items())
def test_each_end_is_taken_and_what_is_behind_it_refused(name, ends):
    *taken, refused = ends
    for value in taken:
        assert convert(getattr(bounds, name), value, "key") == value
    for value, problem in refused.items():
        with pytest.raises(UserError, match=f"^key: must be {re.escape(problem)}, got "):
            convert(getattr(bounds, name), value, "key")


def test_every_type_has_its_ends_here():
    assert {name for name in vars(bounds) if name[0].isupper()} - {"Annotated", "Ge", "Gt", "Le", "Lt"} == set(ENDS)
