r"""The normal form of an answer that is read: a number and what follows it (a unit, currency, per cent), or a literal.

`18 dollars`, `\$18`, `18\text{ cm}^2`, `18 km/h` and `18 marbles left` are a value and a unit. What is known of units
is their grammar (factors, powers, `per`, `square`) and the abbreviations of the common ones; any other words are the
unit that they name. A unit that only one of two answers states makes no difference, but two have to agree: no unit is
converted into another. Words that change or repeat a number (thousand, half, or) are no unit. assets/units.yaml has
the names and these words.

Literals are dates, times, ratios, scores, ranges, versions, telephone numbers, ISBNs: plain numbers between `-`, `/`,
`:`, `.` and spaces. A reference of this form is compared as text, also where it could be a difference (10-3), for
references are no sums still to be done. An answer of this form is right for no other reference, except for a fraction
(3/4) and a plain difference (10-3) that does not look like a date.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rlft.reward.notation import ASSIGNED, NAMES, as_number, is_alphabetic, unwrapped
from rlft.system.files import asset

MAX_UNIT_CHARS = 100  # of the longest unit that is looked for behind a value

_WORDS: Mapping[str, Any] = asset("units.yaml")


def _table() -> dict[str, str]:
    """{a unit's name, plural or abbreviation: its first name}."""
    names: dict[str, str] = {}
    for (symbol, *words), (short, prefix) in itertools.product(
        map(str.split, _WORDS["prefixed"]), _WORDS["prefixes"].items()
    ):
        first = prefix + words[0]
        names |= {short + symbol: first, f"{short}{symbol}s": first} if short or len(symbol) > 1 else {symbol: first}
        names |= {prefix + word + plural: first for word in words for plural in ("", "s")}
    for line in map(str.split, _WORDS["others"]):
        names |= dict.fromkeys(line, line[0]) | {f"{name}s": line[0] for name in line if len(name) > 1}
    return names


_UNITS, _MEANING = _table(), _WORDS["meanings"]
_FOLDED = {name.lower(): unit for name, unit in _UNITS.items() if len(name) > 1 and name != "us"}
_KINDS, _SAYS_NOTHING, _NOT_LAST = ({*_WORDS[key].split()} for key in ("kinds", "says_nothing", "not_last"))
_NO_UNIT = NAMES | {*_WORDS["no_unit"].split()}
_NUMERAL = re.compile("|".join(_WORDS["numerals"]))
_CHANGES = {"squared": "2", "cubed": "3"}
_SCALES = {"celsius", "fahrenheit"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_PRIMES = {"minute-mark": ("foot", "minute"), "second-mark": ("inch", "second")}
_CONSONANTS = re.compile(r"[b-df-hj-np-tv-xz]+")
_STEMS = ((re.compile(r"(?<=[sxz])es$|(?<=[cs]h)es$|(?<![su])s$"), ""), (re.compile(r"(?:ie|y)$"), "i"),
          (re.compile(r"e$"), ""), (re.compile(r"v$"), "f"))  # fmt: skip

_TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|[mh]box|operatorname|math(?:rm|it|bf|sf|normal))\s*"
_TEXT += r"\{(?:[^{}]|\^\{-?[0-9]\})*\}"
_SIGNS = "$€£¥₹¢₽元"
_LETTERS = "A-Za-zÀ-ÖØ-öø-ɏЀ-ӿ"
_PART = (
    rf"{_TEXT}|\\?[{_SIGNS}]|(?<=[0-9])['\"]|\^\s*\\circ|\^\s*\{{?\s*-?[0-9]\s*\}}?|\\(?:cdot|times)(?![a-z])|[{_LETTERS}]+|"
    r"(?<=[A-Za-z])[23](?![0-9])|[./*()\s-]"
)
_TAIL = re.compile(
    rf"(?:(?<=[0-9)}}\]$*`%])\s*(?=[{_LETTERS}/('\"]|-[A-Za-z]{{2}}|\\?[{_SIGNS}])|(?:(?<=\\pi)|(?<=\\infty))\s+(?=[A-Za-z])|"
    rf"(?<=\S)\s*(?={_TEXT}|\^\s*\\circ))(?P<unit>(?:{_PART})++)$"
)
_TOKEN = re.compile(
    rf"(?P<text>{_TEXT})|(?P<degree>\^\s*\\circ)|(?:\^\s*\{{?\s*)?(?P<power>-?[0-9])|\\[a-z]+|"
    rf"(?P<word>[{_LETTERS}]+|[{_SIGNS}'\"])|(?P<per>/)"
)
_ABBREVIATED = re.compile(r"\s*(?:[ap]\.\s*m|b\.\s*c(?:\.\s*e)?|c\.\s*e|a\.\s*d)\.?", re.IGNORECASE)
_CURRENCY = re.compile(
    r"([+-]?)\s*((?:US|AU|CA)?\\?[$£€¥₹]|(?:USD|EUR|GBP|INR|JPY|CNY|CAD|AUD|R[Ss])(?=[.\s0-9])\.?)\s*(?=[-+.0-9\\])"
)
_DELIMITED = re.compile(r"^\$([^$\s](?:[^$]*[^$\s\\])?)\$(?=[^$]*$)")
PERCENT = re.compile(r"\s*\\?%$")
_BETWEEN = re.compile(
    r"(?<=[A-Za-z.}$€£¢])\s*(?:,|\band\b)?\s+(?=\\?[$€£]?[0-9])|(?:(?<=\\circ)|(?<=['\"]))\s*(?=[0-9])"
)
_NUMBER = r"[+-]?\s*[0-9][0-9.,]*"
_RANGE = re.compile(
    rf"(?:from |(?P<between>between ))?(?P<sign>\\?[{_SIGNS}]|)\s*(?P<first>{_NUMBER})\s*(?P<mark>[^0-9+-]*?)"
    rf"\s*(?(between)and|(?:-|to))\s*(?P=sign)\s*(?P<last>{_NUMBER})\s*(?P<end>[^0-9+-]*)"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """The normal form of a unit: powers of its factors, and words that describe it (tall, american)."""

    factors: frozenset[tuple[str, int]] = frozenset()
    words: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.factors or self.words)

    def read_as(self, reading: int) -> set[tuple[str, int]]:
        """The factors, where ' and " are feet and inches (0) or minutes and seconds (1)."""
        return {(_PRIMES[name][reading] if name in _PRIMES else name, power) for name, power in self.factors}


NO_UNIT = Unit()


@dataclass(frozen=True, slots=True)
class Quantity:
    """A plain answer as a value and a unit."""

    value: str  # the answer without its unit; a name that it is assigned to and a percent sign are kept
    number: Fraction | None  # the value, in per cent if `is_percentage`; None for another expression
    is_percentage: bool = False
    unit: Unit = NO_UNIT
    is_symbol: bool = False  # the unit is one letter behind a number, which may be a variable

    def agrees(self, other: Quantity) -> bool:
        """Whether two answers may have these units: one has none, or they are the same up to words left out.

        Per cent and a unit are two.
        """
        one, another = self.unit, other.unit
        if self.is_percentage != other.is_percentage and (another if self.is_percentage else one):
            return False
        same = not one or not another or any(one.read_as(reading) == another.read_as(reading) for reading in (0, 1))
        return same and (one.words <= another.words or another.words <= one.words)

    def expression(self, text: str) -> str:
        """The answer as an expression, of this text: without its unit, unless that may be a variable."""
        return text if self.is_symbol else self.value


@functools.lru_cache(maxsize=1024)
def quantity(text: str) -> Quantity:
    r"""The value and the unit of a plain answer.

    >>> [quantity(text).value for text in (r"18\text{ cm}^2", "18 km/h", r"x = \$18", "18 marbles left", "18 thousand")]
    ['18', '18', 'x = 18', '18', '18 thousand']
    >>> [str(quantity(text).number) for text in (r"90^\circ", "1,000 m", r"1.2\times10^{3}", "8+10", r"50\%")]
    ['90', '1000', '1200', 'None', '50']
    """
    if (number := as_number(text)) is not None:
        return Quantity(text, number)
    match = ASSIGNED.match(text)
    name, body = ("", text) if match is None else (match[0], text[match.end() :])
    if (ends := _RANGE.fullmatch(body)) is not None and (several := _of_range(name, ends)) is not None:
        return several
    head, unit, phrase = _split(_DELIMITED.sub(r"\1", body))
    head = unwrapped(head)
    currency = _CURRENCY.match(head)
    if currency and (money := _unit(currency[2])):
        head = currency[1] + head[currency.end() :]
        unit = Unit(money.factors | unit.factors, money.words | unit.words)
    percent = PERCENT.search(head)
    number = as_number(head if percent is None else head[: percent.start()])
    is_symbol = len(phrase) == 1 and phrase.isascii() and phrase.isalpha()
    is_scale = phrase in ("K", "B") or (currency and re.fullmatch(r"\s*[A-Za-z]", phrase))  # 18K, $18m
    if is_scale or (is_symbol and number is None):
        return Quantity(text, None)
    return Quantity(name + head, number, percent is not None, unit, is_symbol)


def _of_range(name: str, ends: re.Match[str]) -> Quantity | None:
    """A range whose numbers have one mark (%, a unit, a currency) at both ends, or per cent behind the last."""
    last = quantity(f"{ends['sign']}{ends['last']}{ends['end']}")
    is_marked = ends["mark"] == ends["end"].strip() or (last.is_percentage and not ends["mark"])
    if not is_marked or not (last.unit or last.is_percentage):
        return None
    return Quantity(f"{name}{ends['first']}-{ends['last']}", None, last.is_percentage, last.unit)


def same_number(a: Quantity, b: Quantity) -> bool | None:
    """Whether an answer is the same number as a reference; None unless both are numbers, or percentages of numbers.

    A percentage equals the fraction that it is, and its own number if that is whole or the reference is in per cent.

    >>> [same_number(quantity("50%"), quantity(b)) for b in ("50%", "0.5", "50", "5", "1/2")]
    [True, True, True, False, None]
    """
    if a.number is None or b.number is None:
        return None
    if a.is_percentage == b.is_percentage:
        return a.number == b.number
    part, other = (a.number, b.number) if a.is_percentage else (b.number, a.number)
    return part / 100 == other or (part == other and (b.is_percentage or part.denominator == 1))


def quantities(text: str) -> list[Quantity]:
    r"""The values of an answer that is several with a unit each, as 3 hours and 20 minutes, by unit; else [].

    >>> [(str(part.number), bool(part.unit)) for part in quantities("5 ft 6 in")]
    [('5', True), ('6', True)]
    """
    parts = [quantity(part) for part in _BETWEEN.split(text)]
    is_several = len(parts) > 1 and all(part.number is not None and part.unit for part in parts)
    return sorted(parts, key=lambda part: (sorted(part.unit.factors), sorted(part.unit.words))) if is_several else []


def _split(text: str) -> tuple[str, Unit, str]:
    """(what stands before the unit behind a value, the unit, its text); the text alone without a unit."""
    match = _TAIL.search(text, max(1, len(text) - MAX_UNIT_CHARS))
    if match is not None:
        head, phrase = text[: match.start()], match["unit"]
        is_value = re.search(r"[0-9]|\\pi|\\infty", head) or phrase.startswith(("\\text", "\\math", "\\mbox"))
        if head.strip() and is_value and not _ABBREVIATED.fullmatch(phrase) and (unit := _unit(phrase)) is not None:
            return head.strip(), unit, phrase if match.start() == match.start("unit") else f" {phrase}"
    return text, NO_UNIT, ""


def _tokens(phrase: str, is_text: bool = False) -> Iterator[tuple[str, bool]]:
    """(a word, or ^ and a power; whether it is set as text, in which no letter is a variable)."""
    for match in _TOKEN.finditer(phrase):
        token = match[0]
        if match["text"]:
            yield from _tokens(token[token.index("{") + 1 : -1], is_text=True)
        elif match["power"]:
            yield f"^{match['power']}", is_text
        elif match["degree"] or match["per"]:
            yield "degree" if match["degree"] else "per", is_text
        elif match["word"]:
            meaning = _MEANING.get(token) or _MEANING.get(token.lower())
            yield from ((word, True) for word in meaning.split()) if meaning else [(token, is_text)]


def _unit(phrase: str) -> Unit | None:
    """The unit that a phrase names; None where it names none, or says something else of the value."""
    factors: Counter[str] = Counter()
    words: set[str] = set()
    sign, power, last = 1, 1, ""
    tokens = list(_tokens(phrase))
    for place, (token, is_text) in enumerate(tokens, start=1):
        word, name = token.lower(), _known(token)
        if word in _CHANGES or word.startswith("^"):
            if not last:
                return None
            factors[last] *= int(_CHANGES.get(word, word[1:]))
        elif word == "per" or (word in ("a", "an") and place < len(tokens)):
            sign = -1
        elif word in _POWERS:
            power = _POWERS[word]
        elif word in _KINDS and place < len(tokens) and _known(tokens[place][0]):
            factors[word] += sign
        elif word in _SCALES:
            factors["degree"] = 1
            words.add(word)
        elif name is not None and not (word == "in" and (factors or words)):
            factors[name] += sign * power
            last, power = name, 1
        elif word in _NO_UNIT or word.removesuffix("s") in _NO_UNIT or _NUMERAL.fullmatch(word):
            return None
        elif word in _NOT_LAST and place == len(tokens):
            return None  # 3 right, which is not 3 left
        elif word in _SAYS_NOTHING:
            continue
        elif not is_text and (len(word) < 3 or _CONSONANTS.fullmatch(word) or is_alphabetic(word)):
            return None  # letters that are a product of variables
        elif sign < 0:
            factors[_stem(word)] -= power
        else:
            words.add(_stem(word))
    return Unit(frozenset(pair for pair in factors.items() if pair[1]), frozenset(words))


def _known(token: str) -> str | None:
    """The first name of a unit that is known; abbreviations of one letter are told apart by case."""
    word = token.lower()
    return _UNITS.get(token) or (None if word in _NO_UNIT else _FOLDED.get(word))


def _stem(word: str) -> str:
    """A word without its plural: the same for both, if not a word."""
    for pattern, ending in _STEMS:
        word = pattern.sub(ending, word)
    return word


# -- literals ----------------------------------------------------------------------------------------------------------
_PLAIN_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_CLOCK = re.compile(r"([0-9]{1,2}(?:[:.][0-9]{2}){0,2})\s*([ap])\.?\s*m\.?")
_FROM_TO = re.compile(r"(?:from )?(\S.*?) to (\S.*)|between (\S.*?) and (\S.*)")
_GROUPS = r"[0-9]+(?:(?:\s*[-:/.]-*\s*|\s+)[0-9]+)"
_SEQUENCE = re.compile(
    rf"[v+]?\s*{_GROUPS}+(?:[ -]?x)?|\+?(?:[0-9]+[\s-]*)?\([0-9]{{3,5}}\)[\s-]*(?:[0-9]+|{_GROUPS}+)|"
    rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[t ][0-9:.+z-]+"
)
_SIGNED = re.compile(rf"-\s*({_PLAIN_NUMBER})\s*-\s*((?:-\s*)?)({_PLAIN_NUMBER})")  # a range whose first end is below 0
_FRACTION = re.compile(rf"(?!0[0-9]){_PLAIN_NUMBER}\s*/\s*(?!0[0-9]){_PLAIN_NUMBER}")
_DATE = re.compile(r"[0-9]{4}\s*-\s*[0-9]{1,2}\s*-\s*[0-9]{1,2}")
_DIFFERENCE = re.compile(rf"-?\s*(?!0[0-9]){_PLAIN_NUMBER}(?:\s*-\s*(?!0[0-9]){_PLAIN_NUMBER})+")


def literal(text: str) -> str | None:
    """The normal form of a plain answer that is read, not computed, or of a list with such items; None for every other.

    >>> [literal(text) for text in ("2021-03-05", "12:30 p.m.", "3 to 5", "1,000 -- 2,000", "+1 (555) 123-4567")]
    ['2021-03-05', '12:30pm', '3-5', '1000-2000', '+1 (555) 123-4567']
    >>> [literal(text) for text in ("18", "-5", "3/4", "1,000", "1, 2, 3", "(3, 5)", "2x-5")]
    [None, None, None, None, None, None, None]
    """
    items = _items(text)
    read = [_literal(item) for item in items]
    return ", ".join(form or item for form, item in zip(read, items, strict=True)) if any(read) else None


def is_difference(text: str) -> bool:
    """Whether a plain answer that is a literal may be computed, too: numbers with - between them that are no date."""
    read = [item for item in _items(text) if _literal(item) is not None]
    return all(_DIFFERENCE.fullmatch(item) is not None and not _DATE.fullmatch(item) for item in read)


def _items(text: str) -> list[str]:
    """The items of a list, or the text alone, in lower case without separators of thousands and a name."""
    match = ASSIGNED.match(text)
    text = _THOUSANDS.sub("", text if match is None else text[match.end() :]).casefold().strip()
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        text = text[1:-1]
    return [item.strip() for item in re.split("[,;]", text)]


def _literal(text: str) -> str | None:
    if as_number(text) is not None:
        return None
    if clock := _CLOCK.fullmatch(text):
        return f"{clock[1]}{clock[2]}m"
    if match := _FROM_TO.fullmatch(text):
        ends = [end for end in match.groups() if end]
        read = [end if as_number(end) is not None else _literal(end) for end in ends]
        return None if None in read else "-".join(map(str, read))
    if match := _SIGNED.fullmatch(text):
        return f"-{match[1]}-{match[2].strip()}{match[3]}"
    if text.endswith("x") and sum(map(str.isdigit, text)) not in (7, 9):
        return None  # 3-2x is an expression, 0-306-40615-x an ISBN, 2434-561x an ISSN
    if _FRACTION.fullmatch(text) or not _SEQUENCE.fullmatch(text):
        return None
    return " ".join(re.sub(r"\s*([-:/.])[-\s]*", r"\1", text).split())
