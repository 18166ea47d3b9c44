import pytest
from in_one_test import each

from rlft.environment.calculator import calculate


@each(("expression", "value"), [
    ("2+3*4", "14"), ("-(2-5)", "3"), ("7/2", "3.5"), ("8/2", "4"), ("7//2", "3"), ("7%4", "3"),
    (" 12345*6789 ", "83810205"),
])  # fmt: skip
def test_it_computes(expression, value):
    assert calculate(expression) == value


@each(
    "expression", ["", "2+", "a", "2**9", "(1).real", "True", "'a'*9", "[1]", "1<2", "9*" * 200 + "9", "f(1)", "(" * 99]
)
def test_it_computes_nothing_else(expression):
    with pytest.raises(ValueError, match=r"expression|numbers"):
        calculate(expression)


def test_a_division_by_zero_is_told():
    with pytest.raises(ZeroDivisionError):
        calculate("1/0")
