"""Options of a question, in every shape that data give them."""

import pytest
from in_one_test import each

from rlft.tokens.options import options_of


def test_labels_of_their_own_stay_where_an_option_between_is_missing():
    for first, second, third in (("(A) ", "(C) ", "(D) "), ("(A) ", "(B) ", "(C) "), ("1. ", "2. ", "3. ")):
        found = options_of([f"{first}x", None, f"{second}y", f"{third}z"])
        assert found == {first.strip("(). "): "x", second.strip("(). "): "y", third.strip("(). "): "z"}


@each("value", [
    None, "Rome", [], {"first": "Rome"}, {"label": ["A"], "text": ["Rome", "Paris"]},
    {"label": ["A", "A"], "text": ["Rome", "Paris"]}, {1: "Rome"},
])  # fmt: skip
def test_choices_of_another_shape_are_an_error(value):
    with pytest.raises(ValueError, match="choices must be a list of strings or a mapping from letters to strings"):
        options_of(value)
