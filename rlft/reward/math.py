"""1 if the answer is mathematically equal to the reference answer (by the math-verify library), else 0.

This differs from calling the library on the whole completion: the answer is taken from one place (AnswerKeys), so that
scattering guesses over a completion earns nothing; an answer with the reference's own text is right without parsing; if
the reference is a number, the answer must be one, so that copying the question's own sum is no answer; what the library
does not see (bases, units, kinds of brackets, relative size) counts (`notation.py`); and an answer that would take for
ever to compare is wrong by its size, or has no score but `on_error` after MAX_SECONDS of processor time. The library's
own time-outs are off, since it sets them by the same alarm as the scorer.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rlft.config.bounds import PositiveInt
from rlft.reward.answer import AnswerKeys
from rlft.reward.notation import differ, plain, spaced, words
from rlft.reward.quantity import PERCENT, Quantity, is_difference, literal, quantities, quantity, same_number
from rlft.system.process.running_time import OutOfProcessorTime, within_processor_time

MAX_SECONDS = 0.8  # of processor time, in which an answer has to be compared
MAX_DIGITS = 2000
MAX_NESTING = 40
MAX_COMPARED = 12  # elements of sets that are compared by value, each with each

_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)")
_NUMBER_COMMANDS = {"\\text", "\\mathrm", "\\,", "\\;", "\\ ", "\\%", "\\$"}
_OPERATORS = re.compile(r"[+*^!|×·÷]|-\s*-|[0-9A-Za-z)}]\s*-|[0-9)}]\s*=|[,;]")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")
_FRACTION = re.compile(
    r"(-?)\s*(?:([0-9]{1,99})\s*/\s*([1-9][0-9]{0,99})|"
    r"\\frac\s*\{\s*([0-9]{1,99})\s*\}\s*\{\s*([1-9][0-9]{0,99})\s*\})"
)
_LARGE = re.compile(r"[0-9]{5}|[\^!]")
_TOWER = re.compile(r"(?:\^\s*\w\s*){10}")
_EMPTY_SET = re.compile(r"\\(?:emptyset|varnothing|phi)|\\\{\s*\\\}")
# How far apart two equal values may be, relative to the larger: exact ones, which sympy evaluates to 100 digits if they
# cancel; ones by numerical integration and the like; and where one of them is a rounded decimal.
_EXACT, _NUMERICAL, _ROUNDED = 1e-40, 1e-9, 1e-2


def compared(answer: str, reference: str, *, unevaluated: bool, max_chars: int) -> bool | None:
    """Whether two answers are the same text, number, words or expression; None where the time did not suffice."""
    if answer.split() == reference.split():
        return True
    if len(answer) > max_chars:
        return False
    answer, reference = plain(answer), plain(reference)
    if spaced(answer) == spaced(reference):
        return True
    if is_costly(answer) or is_costly(reference) or differ(answer, reference):
        return False
    given, due = quantity(answer), quantity(reference)
    if (same := _same_reading(given, due, answer, reference)) is not None:
        return same
    number = None if due.is_percentage else due.number
    if number is not None and not unevaluated and not is_finished(given.value, whole=number.denominator == 1):
        return False
    _library()  # loading it is not the answer's time
    try:
        sides = given.expression(answer), due.expression(reference)
        return within_processor_time(MAX_SECONDS, _compare, *sides, number is not None)
    except OutOfProcessorTime:
        return None


def _same_reading(given: Quantity, due: Quantity, answer: str, reference: str) -> bool | None:
    """Whether two plain answers are the same as they are read: literals, quantities, words. None for expressions."""
    parts, others = quantities(reference), quantities(answer)
    if parts or others:
        pairs = zip(parts, others, strict=False)
        return len(parts) == len(others) and all(a.agrees(b) and same_number(a, b) for a, b in pairs)
    if not given.agrees(due):
        return False
    read, expected = literal(given.value), literal(due.value)
    if expected is not None or (read is not None and not is_difference(given.value)):
        return read == expected
    if not (due.is_symbol and not given.unit) and (same := same_number(given, due)) is not None:
        return same
    if due.number is not None and words(answer) is not None:
        return False  # 18 thousand
    if not due.unit and (expected := words(reference)) is not None:
        return words(answer) == expected or answer.casefold() == reference.casefold()
    return None


@functools.lru_cache(maxsize=1024)
def normal(answer: str) -> str:
    r"""The normal form of an answer that is a number, a quantity without its unit, a fraction, a literal or words.

    Of a percentage it is that of its number. An expression is not evaluated: it is its own text in one notation.

    >>> [normal(text) for text in (r"\(1{,}000\)", "x = 18.0 cm", "50%", r"\dfrac{2}{4}", "Bob and Al", "x + 1")]
    ['1000', '18', '50', '1/2', 'al, bob', 'x+1']
    """
    text = plain(answer)
    if is_costly(text):
        return spaced(text)
    read = quantity(text)
    if read.number is not None:
        return str(read.number)
    if fraction := _FRACTION.fullmatch(read.value):
        sign, *parts = fraction.groups()
        return str(Fraction(*map(int, filter(None, parts))) * (-1 if sign else 1))
    return literal(read.value) or ", ".join(words(text) or [spaced(text)])


def is_costly(answer: str) -> bool:
    """Whether merely parsing an answer would cost seconds: deep nesting, or large binomials (evaluated at once)."""
    depths = itertools.accumulate(((sign in "({[") - (sign in ")}]") for sign in answer), initial=0)
    is_large = _TOWER.search(answer) or ("binom" in answer and _LARGE.search(answer))
    return max(depths) > MAX_NESTING or bool(is_large)


def is_finished(answer: str, *, whole: bool) -> bool:
    r"""Whether a plain answer is a single number, not a list or an unevaluated sum. Fractions are unless `whole`.

    >>> [is_finished(text, whole=True) for text in ("x = -5", r"18\%", "36/2", "10^3", "20 - 2")]
    [True, True, False, False, False]
    """
    allowed = _NUMBER_COMMANDS if whole else _NUMBER_COMMANDS | {"\\frac"}
    bare = _THOUSANDS.sub("", _COMMAND.sub(" ", answer))
    is_sum = _OPERATORS.search(bare) or (whole and re.search(r"[/:]", answer))
    return not is_sum and allowed.issuperset(_COMMAND.findall(answer))


def digits(expression: Any) -> float:
    """About how many digits the largest number would have that evaluating a sympy expression would produce.

    Those of a fraction are its larger part's. Symbols, functions and infinity count as small.

    >>> import sympy
    >>> tower = sympy.Pow(9, sympy.Pow(9, 9, evaluate=False), evaluate=False)
    >>> round(digits(tower) / 1e6)  # 9 ** 9 = 387,420,489, times log10(9) = 0.954
    370
    """
    if expression.is_Matrix:
        return max((digits(part) for part in expression), default=0.0)
    if expression.is_Number:
        if not expression.is_finite:
            return 0.0
        exact = expression if expression.is_Rational else expression.ceiling()
        return math.log10(max(1, abs(exact.p), exact.q))
    parts = [digits(part) for part in expression.args]
    largest = max(parts, default=0.0)
    if expression.is_Pow and expression.exp.is_number:
        return max(largest, parts[0] * 10 ** min(parts[1], 300.0))
    if type(expression).__name__ in ("factorial", "factorial2", "binomial", "Sum", "Product"):
        return max(largest, 10 ** min(largest, 300.0))
    return sum(parts) if expression.is_Mul else largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Math(AnswerKeys):
    """1.0 for each completion whose answer is mathematically equal to the reference answer, else 0.0."""

    unevaluated: bool
    max_chars: PositiveInt

    def start(self) -> None:
        """Loads the library, one second, before any time limit runs."""
        _library()

    def is_right(self, answer: str, reference: str) -> bool | None:
        return compared(answer, reference, unevaluated=self.unevaluated, max_chars=self.max_chars)

    def normal(self, answer: str) -> str:
        return AnswerKeys.normal(self, answer) if len(answer) > self.max_chars else normal(answer)


def _compare(answer: str, reference: str, needs_value: bool) -> bool:
    """Whether the library finds two plain answers equal, and they are not apart in a way that it overlooks.

    With `needs_value` the answer must be a value without variables.
    """
    parsed, expected = _parse(answer), _parse_reference(reference)
    if parsed is None or expected is None:
        return False
    if type(parsed).__name__ == "EmptySet" and not _EMPTY_SET.search(answer):
        return False  # an interval with its ends exchanged
    if (needs_value and _value(parsed).free_symbols) or not (_is(parsed, "Number") or digits(parsed) <= MAX_DIGITS):
        return False
    if _are_apart(_value(parsed), _value(expected)) or not _verify(parsed, expected):
        return False
    # Where a value is due, an equation may state it, x = 3, or go on to it, 1/2 = 0.5; but 2 = 3 does not say 3.
    stated = [] if _is(expected, "Relational") or _is(expected, "Boolean") else _sides(parsed)
    return all(_verify(side, expected) for side in stated)


def _verify(answer: Any, reference: Any) -> bool:
    return _library().verify([reference], [answer], allow_set_relation_comp=True, timeout_seconds=None)


def _parse(text: str) -> Any:
    """The expression as the library parses it, or None. Dollar signs are removed, so that it is one, not several."""
    library = _library()
    percent = PERCENT.search(text)
    bare = (text if percent is None else text[: percent.start()]).replace("\\$", " ").replace("$", " ")
    latex = f"${bare}$" if percent is None else f"${bare}$%"
    parsed = library.parse(latex, [_latex_without_units()], parsing_timeout=None)
    # A text that it can't parse comes back as itself, and the relation of two sets as a truth value.
    return next((part for part in parsed if hasattr(part, "free_symbols")), None)


_parse_reference = functools.lru_cache(maxsize=256)(_parse)


@functools.cache
def _latex_without_units() -> Any:
    """How the library reads LaTeX, but for the letters and words that it takes for units (`quantity.py` reads them)."""
    config = _library().LatexExtractionConfig()
    return replace(config, normalization_config=replace(config.normalization_config, units=False))


@functools.cache
def _library() -> Any:
    import math_verify

    # It warns that its time-outs are off; they are, because the scorer's limit covers the whole call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The first comparison imports sympy's solvers and fills the parser's tables, which would count as an answer's time.
    library: Any = math_verify
    first, second = (library.parse(f"${text}$", parsing_timeout=None) for text in (r"\frac{x^2}{2} = y", "x^2 = 2y"))
    library.verify(first, second, timeout_seconds=None)
    return library


def _is(parsed: Any, kind: str) -> bool:
    """Whether sympy calls it so; matrices know only a few kinds."""
    return bool(getattr(parsed, f"is_{kind}", False))


def _equations(parsed: Any) -> list[Any]:
    """The equations of a chain such as x = 1 + 2 = 3, in order; [] for everything that is no equation."""
    is_chain = _is(parsed, "Boolean") and not _is(parsed, "Relational")
    parts = getattr(parsed, "_unsorted_args", parsed.args) if is_chain else [parsed]
    return list(parts) if all(_is(part, "Equality") for part in parts) else []


def _sides(parsed: Any) -> list[Any]:
    """The sides of an equation or a chain of equations, except those that are names, as x in x = 3."""
    from latex2sympy2_extended import is_expr_of_only_symbols

    return [side for each in _equations(parsed) for side in each.args if not is_expr_of_only_symbols(side)]


def _value(parsed: Any) -> Any:
    """What the last equals sign assigns to a name, 3 in x = 3; all of another expression."""
    last = _equations(parsed)[-1:]
    return last[0].rhs if last and _sides(last[0]) == [last[0].rhs] else parsed


def _are_apart(a: Any, b: Any) -> bool:
    """Whether two expressions differ by more than rounding at one point, or two lists or matrices in an entry.

    This is what simplifying would take long to find, and what the library overlooks where it compares up to 1e-15 or
    six decimals instead of relative to the values. False where nothing can be said.
    """
    import sympy

    if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
        few = len(a) <= MAX_COMPARED and len(b) <= MAX_COMPARED
        return few and any(all(_are_apart(x, y) for y in b) for x in a)
    if (_is(a, "Matrix") and _is(b, "Matrix")) or (type(a) is type(b) and isinstance(a, sympy.Tuple | sympy.Interval)):
        both: list[Any] = [a, b]
        parts_a, parts_b = (list(each if _is(each, "Matrix") else each.args) for each in both)
        return len(parts_a) == len(parts_b) and any(map(_are_apart, parts_a, parts_b))
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr) or _is_unclear(a) or _is_unclear(b):
        return False
    # The symbols of an expression are real or complex, by the library's choice: a name has one value.
    symbols = a.free_symbols | b.free_symbols
    names = sorted({str(symbol) for symbol in symbols})
    point: dict[Any, Any] = {symbol: sympy.Rational(7 + 4 * names.index(str(symbol)), 5) for symbol in symbols}
    try:
        difference, *sizes = (abs(part.evalf(20, subs=point)) for part in (a - b, a, b))
    except Exception:  # sympy raises whatever it likes on what has no value there, and the library will see the same
        return False
    if not all(size.is_Number and size.is_finite for size in (difference, *sizes)):
        return False
    return bool(difference > _tolerance(a, b) * max(sizes))


def _tolerance(*expressions: Any) -> float:
    import sympy
    from sympy.concrete.expr_with_limits import ExprWithLimits

    if any(expression.has(sympy.Float) for expression in expressions):
        return _ROUNDED
    numerical = (ExprWithLimits, sympy.Limit, sympy.Derivative)
    return _NUMERICAL if any(expression.has(*numerical) for expression in expressions) else _EXACT


def _is_unclear(parsed: Any) -> bool:
    """Whether it is a percentage, which may equal 0.05 and 5, or letters, which may be a word or a product."""
    import sympy

    factors = parsed.args if parsed.is_Mul else (parsed,)
    return parsed.has(sympy.UnevaluatedExpr) or all(factor.is_Symbol or factor == sympy.E for factor in factors)
