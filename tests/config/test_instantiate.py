"""From plain values to typed ones: what is converted, and what is refused by its key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt
from in_one_test import each

from rlft.config.bounds import Decay, Fraction, NonNegativeInt, PositiveInt
from rlft.config.instantiate import convert, from_mapping, instantiate, locate
from rlft.types import UserError


class Colour(StrEnum):
    red = "red"
    off = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    name: str
    share: Fraction = 0.5


VALUES = [
    (int, 3, 3), (float, 3, 3.0), (bool, False, False), (str, "3", "3"), (str | None, None, None),
    (Colour, "red", Colour.red),
    (Colour | None, None, None), (Colour, False, Colour.off),  # a bare `off` in YAML
    (float | Literal["stop"], "stop", "stop"), (float | Literal["stop"], 1, 1.0),
    (Literal["drop", "refuse"], "drop", "drop"), (Literal["off", "auto"], False, "off"),
    (float | Literal["off"] | None, False, "off"), (bool | Literal["off"], False, False),
    (Sequence[str], ["a", "b"], ("a", "b")), (str | Sequence[str], "all-linear", "all-linear"),
    (str | Sequence[str], ["q", "k"], ("q", "k")), (Mapping[str, Any], {"a": [1]}, {"a": [1]}),
    (Inner, {"size": 2}, Inner(size=2)),
    (Outer, {"inner": {"size": 2}, "name": "x"}, Outer(inner=Inner(size=2), name="x")),
]  # fmt: skip


@each(("hint", "value", "expected"), VALUES)
def test_a_value_becomes_its_fields_type(hint, value, expected):
    converted = convert(hint, value, "key")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(("hint", "value", "problem"), [
    (int, "3", "must be a whole number, got '3'"),
    (int, 3.5, "must be a whole number, got 3.5"),
    (int, 3.0, "must be a whole number, got 3.0; write 3"),
    (int, True, "must be a whole number, got true"),
    (int, None, "must be a whole number, got null"),
    (PositiveInt, 0, "must be greater than 0, got 0"),
    (NonNegativeInt, -1, "must be greater than or equal to 0, got -1"),
    (Decay, 1.0, "must be less than 1, got 1.0"),
    (Annotated[float, Gt(0)], float("nan"), "got nan"),
    (float, float("inf"), "must be finite, got inf"),
    (float, "0.1", "must be a number, got '0.1'"),
    (bool, 1, "must be true or false, got 1"),
    (bool, "yes", "must be true or false, got 'yes'"),
    (str, 3, """must be a string, got 3; quote it twice: "key='3'\""""),
    (str, ["a"], "must be a string, got ['a']"),
    (Colour, "rde", "is not one of its choices, got 'rde'; did you mean red? All: red, off"),
    (Colour | None, "rde", "did you mean red? All: red, off, null"),
    (float | Literal["stop"], "go", "use stop or a number"),
    (Literal["drop", "refuse"], "keep", "use drop or refuse"),
    (Sequence[str], "a", "got 'a'"),
    (Sequence[int], [1, "b"], "must be a whole number"),
    (Mapping[str, Any], 3, "got 3"),
    (Inner, 3, "must be a section of keys, got 3; set one of key.size"),
    (Inner, {"size": 0}, "must be greater than 0"),
])  # fmt: skip
def test_a_wrong_value_is_refused_by_its_key(hint, value, problem):
    with pytest.raises(UserError) as refusal:
        convert(hint, value, "key")
    assert refusal.value.key in ("key", "key.size")
    assert problem in str(refusal.value)


MISSING = [
    ({"inner": {"size": 2, "sise": 3}, "name": "x"},
     "inner.sise: there is no such key, got 3; did you mean inner.size?"),
    ({"inner": {"size": 2}, "nmae": "x"}, "nmae: there is no such key, got 'x'; did you mean name?"),
    ({"inner": {"size": 2}, "q": 1, "name": "x"}, "q: there is no such key, got 1; known here: inner, name, share"),
    ({"inner": {}, "name": "x"}, "inner.size: is missing"),
    ({"inner": {"size": 2}}, "name: is missing"),
]  # fmt: skip


@each(("values", "message"), MISSING)
def test_unknown_and_missing_keys_are_told_by_their_full_name(values, message):
    with pytest.raises(UserError) as refusal:
        from_mapping(Outer, values, "")
    assert str(refusal.value).startswith(message)


def test_a_target_outside_the_tree_gets_the_keys_it_takes_and_no_others():
    fraction = instantiate({"_target_": "fractions.Fraction", "numerator": 1, "denominator": 3}, "x")
    assert str(fraction) == "1/3"
    with pytest.raises(UserError, match=r"x\.denominater: there is no such key, got 3; did you mean x\.denominator\?"):
        instantiate({"_target_": "fractions.Fraction", "numerator": 1, "denominater": 3}, "x")


def test_what_cannot_be_imported_says_why():
    with pytest.raises(UserError, match=r"^x: cannot be imported \(ModuleNotFoundError: No module named 'no'\)"):
        locate("no.such.Thing", "x")
