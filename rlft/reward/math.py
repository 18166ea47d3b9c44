"""1 if the answer is mathematically equal to the reference answer (by the math-verify library), else 0.

This differs from calling the library on the whole completion: the answer is taken from one place (AnswerKeys), so that
scattering guesses over a completion earns nothing; if the reference is a number, the answer must be one, so that
copying the question's own sum is no answer; and expressions that would take for ever to evaluate are wrong without
evaluation. The library's own time-outs are off, since it sets them by the same alarm as the scorer.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from dataclasses import dataclass
from typing import Any

from rlft.keys.bounds import PositiveInt
from rlft.reward.answer import AnswerKeys, plain_number, reference_answer
from rlft.types import Group

MAX_DIGITS = 2000
MAX_NESTING = 40

_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)")
_NUMBER_COMMANDS = {"\\boxed", "\\text", "\\mathrm", "\\left", "\\right", "\\,", "\\!", "\\;", "\\ ", "\\%", "\\$"}
_FRACTION_COMMANDS = {"\\frac", "\\dfrac", "\\tfrac"}
_OPERATORS = re.compile(r"[+*^!×·÷]|[0-9A-Za-z)}]\s*[-−]|[0-9)}]\s*=|[,;]")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")
_LARGE = re.compile(r"[0-9]{4}|[\^!]")
_WORDS = re.compile(r"[A-Za-z ]*[A-Za-z]{3}[A-Za-z ]*")


def equal(answer: str, reference: str, *, unevaluated: bool, max_chars: int) -> bool:
    r"""Whether two answers are the same number, the same word, or the same expression.

    >>> equal(r"\frac{1}{2}", "0.5", unevaluated=False, max_chars=300)
    True
    >>> equal("8 + 10", "18", unevaluated=False, max_chars=300), equal("8 + 10", "18", unevaluated=True, max_chars=300)
    (False, True)
    """
    if len(answer) > max_chars or is_costly(answer):
        return False
    number = plain_number(reference)
    value = plain_number(answer)
    if number is not None and value is not None:
        return number == value
    if _WORDS.fullmatch(reference):
        return answer.casefold().split() == reference.casefold().split()
    if number is not None and not unevaluated and not is_finished(answer, whole=number == number.to_integral_value()):
        return False
    return _equal_expressions(answer, reference)


def is_costly(answer: str) -> bool:
    """Whether merely parsing an answer would cost seconds: deep nesting, or large binomials (evaluated at once).

    >>> is_costly("(" * 50 + "1" + ")" * 50), is_costly(r"\\binom{10}{3}")
    (True, False)
    """
    nesting = sum(answer.count(opening) for opening in "({[^")
    return nesting > MAX_NESTING or ("binom" in answer and _LARGE.search(answer) is not None)


def is_finished(answer: str, *, whole: bool) -> bool:
    r"""Whether an answer is a single number, not a list or an unevaluated sum. Fractions are numbers unless `whole`.

    >>> [is_finished(text, whole=True) for text in ("x = -5", r"\boxed{18}", "36/2", "10^3", "20 - 2")]
    [True, True, False, False, False]
    """
    allowed = _NUMBER_COMMANDS if whole else _NUMBER_COMMANDS | _FRACTION_COMMANDS
    bare = _THOUSANDS.sub("", _COMMAND.sub(" ", answer))
    if _OPERATORS.search(bare) or (whole and "/" in answer):
        return False
    return all(command in allowed for command in _COMMAND.findall(answer))


def digits(expression: Any) -> float:
    """About how many digits the largest number would have that evaluating a sympy expression would produce.

    Symbols and functions count as small.

    >>> import sympy
    >>> tower = sympy.Pow(9, sympy.Pow(9, 9, evaluate=False), evaluate=False)
    >>> round(digits(tower) / 1e6)  # 9 ** 9 = 387,420,489, times log10(9) = 0.954
    370
    """
    if expression.is_Number:
        return _log10(expression)
    parts = [digits(part) for part in expression.args]
    largest = max(parts, default=0.0)
    if expression.is_Pow and expression.exp.is_number:
        return max(largest, parts[0] * 10 ** min(parts[1], 300.0))
    if type(expression).__name__ in ("factorial", "factorial2", "binomial", "Sum", "Product"):
        return max(largest, 10 ** min(largest, 300.0))
    return sum(parts) if expression.is_Mul else largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Math(AnswerKeys):
    r"""1.0 for each completion whose answer is mathematically equal to the reference answer, else 0.0.

    The other keys say where the answer is (AnswerKeys).

    Attributes:
        unevaluated: whether an unevaluated sum or product, such as 6*3, is accepted if the reference is a number.
        max_chars: the most characters of an answer; longer ones are wrong. It bounds the parser's work.
    """

    unevaluated: bool
    max_chars: PositiveInt

    def start(self) -> None:
        """Loads the library, half a second, before any time limit runs."""
        _library()

    def __call__(self, group: Group) -> list[float]:
        reference = reference_answer(group.prompt.answer, group.prompt.id)
        return [float(self._is_right(rollout.completion.text, reference)) for rollout in group.rollouts]

    def _is_right(self, text: str, reference: str) -> bool:
        answer = self.extract(text)
        if answer is None:
            return False
        return equal(answer, reference, unevaluated=self.unevaluated, max_chars=self.max_chars)


def _equal_expressions(answer: str, reference: str) -> bool:
    parsed = _parse(answer)
    if any(not isinstance(part, str) and digits(part) > MAX_DIGITS for part in parsed):
        return False
    return _library().verify(list(_parse_reference(reference)), parsed, timeout_seconds=None)


def _parse(text: str) -> list[Any]:
    """The expression as the library parses it. Dollar signs are removed, so that it is one expression, not several."""
    library = _library()
    bare = text.replace("\\$", " ").replace("$", " ")
    return library.parse(f"${bare}$", [library.LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]


@functools.lru_cache(maxsize=256)
def _parse_reference(text: str) -> tuple[Any, ...]:
    return tuple(_parse(text))


@functools.cache
def _library() -> Any:
    import math_verify

    # It warns that its time-outs are off; they are, because the scorer's limit covers the whole call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _log10(number: Any) -> float:
    """log10 of a sympy number's absolute value, or of a fraction's larger part; at least 0."""
    if number.is_Rational:
        return math.log10(max(1, abs(number.p), number.q))
    return _log10(number.ceiling()) if number.is_finite else math.inf
