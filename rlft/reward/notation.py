r"""What stands around a mathematical answer without changing its value, and what changes it though a parser drops it.

Delimiters, emphasis, spacing, units and separators of thousands change nothing: `**18**`, `\(18\)`, `18\text{ cm}^2`
and `1{,}000` are 18, 18, 18 and 1000. The base of a number (`10_8`), the kind of brackets around a list, and words such
as `\text{ or 19}` and `\text{ thousand}` do.
"""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction

from rlft.reward.answer import closing_brace, plain_number

MAX_EXPONENT = 300
"""The largest exponent of 10 in scientific notation."""

_DELIMITERS = (
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")),
    *(("**", "**"), ("*", "*"), ("__", "__"), ("`", "`")),
)
_WRAPPER = (
    r"(?:text(?:bf|it|rm|tt|sf|sc|up|normal)?|math(?:bf|rm|it|tt|sf|normal)|emph|mbox|underline|boldsymbol|bm|pmb)"
)
_COMMAND = re.compile(rf"\\(?:boxed|fbox|{_WRAPPER})?\s*\{{|\{{")
# Same value, other notation; in this order.
_REWRITTEN = (
    (re.compile(r"\\(?:displaystyle|textstyle|limits)|\\!\s*|\\(?:left|right)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:text)?color\s*\{\w+\}|^\s*(?:=|≈|\\(?:approx|therefore)(?![A-Za-z]))"), ""),
    (re.compile(rf"\\{_WRAPPER}\s*\{{\s*([0-9][0-9.,]*)\s*\}}"), r"\1"),
    (re.compile(r"\\(?:bf|rm|it|sf|tt|tiny|small|normalsize|[Ll]arge|LARGE|[Hh]uge)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])|(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"(?<!\\)\\(?:[,:; ]|q?quad(?![A-Za-z]))|~"), " "),
    (re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf|mathit)\s*\{\s*(and|or)\s*\}"), r" \1 "),
    (re.compile("[−–]"), "-"),
    (re.compile(r"(?<![0-9./^_{])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9./])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"°|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])"), r"^\\circ "),
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\{([0-9]+)\}")
_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")

_DEGREES = r"\^\\circ(?:\s*(?:\\(?:text|mathrm)\{\s*)?[CF]\}?)?"
_UNIT = re.compile(
    rf"(?P<degrees>{_DEGREES})|\\(?:text(?:bf|it|rm)?|mbox|math(?:rm|it|bf))\s*\{{(?P<word>[^{{}}]*)\}}"
    r"\s*(?:\^\s*\{?\s*(?P<power>[0-9])\s*\}?)?"
)
_NO_UNIT = re.compile(
    r"[0-9]|\b(?:and|or|nor|not|plus|minus|times|negative|squared|cubed|half|hundred|thousand|million|billion|trillion|"
    r"dozen|one|two|three|four|five|six|seven|eight|nine|ten|percent)\b",
    re.IGNORECASE,
)
_UNITS = {
    name: names.split()[0]
    for names in (
        "degrees degree deg",
        "radians radian rad",
        "mm millimeters millimeter millimetres millimetre",
        "cm centimeters centimeter centimetres centimetre",
        "m meters meter metres metre",
        "km kilometers kilometer kilometres kilometre",
        "inches inch in",
        "feet foot ft",
        "yards yard yd",
        "miles mile mi",
        "mg milligrams milligram",
        "g grams gram",
        "kg kilograms kilogram",
        "seconds second sec s",
        "minutes minute min",
        "hours hour hr hrs h",
        "days day",
        "weeks week",
        "months month",
        "years year",
        "cents cent",
        "dollars dollar",
    )
    for name in names.split()
}

_BASE = re.compile(r"(?<=[0-9])\}?_\s*(?:\{\s*(?:\\(?:text|mathrm)\{)?\s*(\w+)\s*\}?\s*\}|([0-9]+|[A-Za-z]))")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BRACKETS = re.compile(r"\\[{}]|\\[lr](?:brace|angle)(?![A-Za-z])|[()\[\],;]")
_SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus|backslash)(?![A-Za-z])")

_ASSIGNED = re.compile(r"([A-Za-z]\w*)\s*(?:=|\\approx(?![A-Za-z]))(?!.*=)\s*")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent(?:age)?|pct)\s*\}|\b(?:percent(?:age)?|pct))$")
_CURRENCY = re.compile(r"^([+-]?)\s*\\?[$£€]\s*|\\?[$£€]$")
_SCIENTIFIC = re.compile(
    r"(.*?[0-9.])(?:\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([0-9]))|(?i:e)([+-][0-9]+|[0-9]{2,}))"
)  # not 1e3, where e may be the number

_WORD = re.compile(r"[A-Za-z]{3,}")
_NO_TEXT = re.compile(r"[\\+*/=^<>_{}|]")
_SHORT_WORDS = {"no", "on", "in", "up", "am", "pm", "ok"}
_NAMES = {"inf", "infinity", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "arcsin", "arccos"} | {
    *("arctan", "sinh", "cosh", "tanh", "max", "min", "gcd", "lcm")
}
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def plain(text: str) -> str:
    r"""The answer without what stands around its value, in one notation.

    >>> [plain(text) for text in (r"\(18\)", "**18**.", r"\boxed{\text{Monday}}", r"1{,}000", r"\left(\dfrac12\right)")]
    ['18', '18', 'Monday', '1,000', '(\\frac12)']
    """
    text = unwrapped(text)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return unwrapped(_REPEATING.sub(_as_fraction, text))


def unwrapped(text: str) -> str:
    r"""The text without delimiters of formulas, emphasis, boxes and text commands around all of it, and a full stop.

    >>> [unwrapped(text) for text in (r"**(B)**.", r"$\textbf{B}$", r"\(x\) and \(y\)")]
    ['(B)', 'B', '\\(x\\) and \\(y\\)']
    """
    before = None
    while text != before:
        before, text = text, text.strip().removesuffix("\\")  # of a command for space, whose space is gone
        if text.endswith(".") and not text.endswith(("..", "\\.")):
            text = text[:-1].rstrip()
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : -len(closing)]
            around = text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing)
            bare = inner.replace("\\$", "")
            if around and opening not in bare and closing not in bare:
                text = inner.strip()
        match = _COMMAND.match(text)
        if match is not None and closing_brace(text, match.end()) == len(text) - 1:
            text = text[match.end() : -1].strip()
    return text


def same_text(a: str, b: str) -> bool:
    """Whether two plain answers are the same text, up to spaces that separate nothing."""
    return _SPACE.sub("", " ".join(a.split())) == _SPACE.sub("", " ".join(b.split()))


def words(text: str) -> list[str] | None:
    """The words of a plain answer that is text (a day, names, yes), in order within each item of a list; else None.

    The items are sorted. A run of neighbouring letters (xyz) is a product of variables, a name such as sqrt is none.

    >>> words("Monday"), words("Bob and Alice"), words("No"), words("June 20")
    (['monday'], ['alice', 'bob'], ['no'], ['june 20'])
    >>> [words(text) for text in ("xyz", "18 apples", "x > 3", "sqrt 2", "ab")]
    [None, None, None, None, None]
    """
    text = " ".join(text.casefold().split())
    first = _WORD.match(text)
    is_text = text in _SHORT_WORDS or (first is not None and first[0] not in _NAMES and first[0] not in _ALPHABET)
    if not is_text or _NO_TEXT.search(text):
        return None
    return sorted(item.strip() for item in re.split(r",|;|\band\b", text) if item.strip())


def number(text: str) -> Fraction | None:
    r"""The value of a plain answer that is one number written out, with or without a unit, a currency or `x =`.

    >>> [str(number(text)) for text in (r"90^\circ", r"18\text{ cm}^2", "1,000", r"1.2\times10^3", r"x = -\$5")]
    ['90', '18', '1000', '1200', '-5']
    >>> [number(text) for text in ("8+10", "36/2", "10^3", r"18\text{ or 19}", r"50\%", "90_8")]
    [None, None, None, None, None, None]
    """
    text = without_unit(text)
    if match := _ASSIGNED.match(text):
        text = text[match.end() :]
    text = _CURRENCY.sub(r"\1", text).strip()
    if text[:1] in ("-", "+"):
        text = text[0] + text[1:].lstrip()
    exponent = 0
    if match := _SCIENTIFIC.fullmatch(text):
        text, exponent = match[1], int(match[2] or match[3] or match[4])
    value: Decimal | None = plain_number(text.strip().removesuffix("."))
    return None if value is None or abs(exponent) > MAX_EXPONENT else Fraction(value) * Fraction(10) ** exponent


def without_percent(text: str) -> str | None:
    """What stands before the percent sign that ends a plain answer; None without one."""
    match = _PERCENT.search(text)
    return None if match is None else text[: match.start()]


def same_number(a: str, b: str) -> bool | None:
    """Whether two plain answers are the same number; None unless both are numbers, or percentages of numbers.

    A percentage equals the fraction that it is, and its own number if that is whole or both are meant in per cent.

    >>> [same_number("50%", b) for b in ("50%", "0.5", "50", "5", "1/2")]
    [True, True, True, False, None]
    """
    percent_a, percent_b = without_percent(a), without_percent(b)
    number_a = number(a if percent_a is None else percent_a)
    number_b = number(b if percent_b is None else percent_b)
    if number_a is None or number_b is None:
        return None
    if (percent_a is None) == (percent_b is None):
        return number_a == number_b
    part, other = (number_a, number_b) if percent_b is None else (number_b, number_a)
    return part / 100 == other or (part == other and (percent_b is not None or part.denominator == 1))


def without_unit(text: str) -> str:
    r"""A plain answer without the unit behind it: a degree sign, or words in a text command that change no value.

    >>> without_unit(r"18 \text{ km/h}"), without_unit(r"18\text{ thousand}"), without_unit(r"\text{odd}")
    ('18', '18\\text{ thousand}', '\\text{odd}')
    """
    begin = _begin_of_unit(text)
    word = _UNIT.match(text, begin)
    if word is None or (word["word"] is not None and _NO_UNIT.search(word["word"])):
        return text
    return text[:begin].strip()


def differ(a: str, b: str) -> bool:
    r"""Whether two plain answers differ in the name of a value, a base, a unit or a kind of bracket.

    Except for names, the library does not see them. What only one of them states makes no difference, but for bases.

    >>> differ("10_8", "10_9"), differ("90", "90_8"), differ("(1,2)", "[1,2]"), differ("1,2", r"\{1,2\}")
    (True, True, True, False)
    >>> differ("x = 3", "n = 3"), differ("x = 3", "3")
    (True, False)
    >>> differ(r"90^\circ", r"90\text{ rad}"), differ(r"18\text{ or 19}", "18"), differ(r"5\text{ cm}", "5")
    (True, True, False)
    """
    name_a, name_b = _ASSIGNED.match(a), _ASSIGNED.match(b)
    if name_a is not None and name_b is not None and name_a[1].casefold() != name_b[1].casefold():
        return True
    return _bases(a) != _bases(b) or _units_differ(_unit(a), _unit(b)) or _brackets_differ(a, b)


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match[1] or "0", match[2], match[3]
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _begin_of_unit(text: str) -> int:
    """Where the last text command or degree sign begins that ends the text, after a value; else the text's length."""
    for match in _UNIT.finditer(text):
        if match.end() == len(text.rstrip()) and text[: match.start()].strip():
            return match.start()
    return len(text)


def _unit(text: str) -> tuple[str, str]:
    """(the unit behind an answer in lower case, its power); ("", "") without one."""
    match = _UNIT.match(text, _begin_of_unit(text))
    if match is None:
        return "", ""
    word = "degrees" if match["degrees"] else " ".join(match["word"].casefold().split())
    return _UNITS.get(word, word), match["power"] or ""


def _units_differ(a: tuple[str, str], b: tuple[str, str]) -> bool:
    if a == b:
        return False
    if _NO_UNIT.search(a[0]) or _NO_UNIT.search(b[0]):
        return True
    known = set(_UNITS.values())
    return a[0] == b[0] or (a[0] in known and b[0] in known)


def _bases(text: str) -> Counter[str]:
    bases = (match[1] or match[2] for match in _BASE.finditer(text))
    return Counter(_BASES.get(base, base) for base in bases)


def _brackets_differ(a: str, b: str) -> bool:
    """Whether each has a list in brackets of a kind that the other has not. Without brackets a list may be any kind."""
    if _SET_OPERATION.search(a) or _SET_OPERATION.search(b):
        return False  # intervals may be united in several ways
    in_a, in_b = _list_brackets(a), _list_brackets(b)
    return bool(in_a - in_b) and bool(in_b - in_a)


def _list_brackets(text: str) -> Counter[str]:
    """How often a list with a comma or semicolon stands in each kind of brackets, such as `(]`."""
    kinds: Counter[str] = Counter()
    open_brackets: list[list[str]] = []  # [bracket, "," if a list]
    for match in _BRACKETS.finditer(text):
        sign = match[0].replace("\\lbrace", "{").replace("\\rbrace", "}").replace("langle", "(").replace("rangle", ")")
        sign = sign.removeprefix("\\")
        if sign in ",;":
            if open_brackets:
                open_brackets[-1][1] = ","
        elif sign in "([{":
            open_brackets.append([sign, ""])
        elif open_brackets:
            opening, is_list = open_brackets.pop()
            kinds[opening + sign] += bool(is_list)
    return +kinds
