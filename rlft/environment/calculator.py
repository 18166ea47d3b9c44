"""`environment=calculator`: a tool that computes sums, differences, products and quotients."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlft.environment.tools import Tools

OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_CHARACTERS = 200  # of an expression: products of numbers this long are still computed in an instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculator(Tools):
    """`environment=tools` with this tool."""

    tools: Sequence[str] = ("rlft.environment.calculator.calculate",)


def calculate(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: numbers, + - * / // % and parentheses, such as 12*(3+4)

    Returns:
        The value.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    value = _value(tree.body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(operand))
        case _:
            raise ValueError("only numbers, + - * / // % and parentheses can be computed")
