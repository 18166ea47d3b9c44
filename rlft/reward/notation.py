r"""What stands around a mathematical answer without changing its value, and what changes it though a parser drops it.

Delimiters, emphasis, spacing, units and separators of thousands change nothing: `**18**`, `\(18\)`, `18\text{ cm}^2`
and `1{,}000` are 18, 18, 18 and 1000. The base of a number (`10_8`), the kind of brackets around a list, and words such
as `\text{ or 19}` and `\text{ thousand}` do. Mathematics in Unicode is read as LaTeX, and digits, signs and spaces of
any script as those of ASCII: what a character is, Unicode's own tables say (superscript, fraction, digit, dash, space
..); only operators have one here.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import Counter
from decimal import Decimal
from fractions import Fraction

from rlft.reward.answer import closing_brace, plain_number

_SIGNS = r"""- − / ⁄∕ * ∗ : ∶ . ٫。 , ٬،、 % ٪ ° º˚ ' ’‘′ " “”″ √[3] ∛ √[4] ∜"""
_COMMANDS = (
    r"\times ×✕ \cdot ·⋅∙ \div ÷ \pm ± \mp ∓ \approx ≈ \leq ≤⩽≦ \geq ≥⩾≧ \neq ≠ \equiv ≡ \in ∈ \notin ∉ "
    r"\cup ∪ \cap ∩ \emptyset ∅⌀ \setminus ∖ \subset ⊂ \subseteq ⊆ \infty ∞ \sum ∑ \prod ∏ \int ∫ \partial ∂ "
    r"\to → \Rightarrow ⇒ \therefore ∴ \lfloor ⌊ \rfloor ⌋ \lceil ⌈ \rceil ⌉ \langle ⟨ \rangle ⟩ \angle ∠ "
    r"\triangle △ \land ∧ \lor ∨ \neg ¬ \perp ⊥ \parallel ∥ \circ ∘"
)


def _table(text: str, after: str) -> dict[str, str]:
    """{character: what is written for it}, of a text that has each of these before its characters."""
    written = text.split()
    pairs = zip(written[::2], written[1::2], strict=True)
    return {character: sign + after for sign, characters in pairs for character in characters}


_SYMBOLS = _table(_SIGNS, "") | _table(_COMMANDS, " ") | {"√": "√"}
_FRACTION = re.compile(r"\^\{([0-9]+)\}/_\{([0-9]+)\}")
_ROOT_INDEX = re.compile(r"\^\{([0-9]+)\}√")
_MICRO = re.compile(r"(?<=[0-9 ])[µμ](?=(?:m|g|s|l|L|A|V|W|F|mol)(?![A-Za-z]))")
_GREEK = re.compile("[\u0370-\u03ff\u1f00-\u1fff]+")
_OHM = re.compile("(?<=[0-9 kM])Ω(?![A-Za-z])")
_RADICAND = re.compile(r"[0-9]+(?:\.[0-9]+)?|\\[A-Za-z]+(?:\[[^\]]*\])?(?:\{(?:[^{}]|\{[^{}]*\})*\})*|[A-Za-z]")


def as_latex(text: str) -> str:
    r"""The text with mathematics of Unicode as LaTeX.

    >>> [as_latex(text) for text in ("2√3", "x²", "1½", "∛(x+1)", "１８", "١٨", "−5", "1.2×10³", "2πr")]
    ['2\\sqrt{3}', 'x^{2}', '1\\frac{1}{2}', '\\sqrt[3]{x+1}', '18', '18', '-5', '1.2\\times 10^{3}', '2\\pi r']
    """
    if text.isascii():
        return text
    text = "".join(map(_written, unicodedata.normalize("NFC", text)))
    text = text.replace("}^{", "").replace("}_{", "")  # one superscript of several characters
    text = _ROOT_INDEX.sub(r"√[\1]", _FRACTION.sub(r"\\frac{\1}{\2}", text))
    return _with_roots(_GREEK.sub(_greek, _OHM.sub("ohm", _MICRO.sub("u", text))))


@functools.lru_cache(maxsize=4096)
def _written(char: str) -> str:
    """One character in ASCII or LaTeX, or itself."""
    if char.isascii() or char in _SYMBOLS:
        return _SYMBOLS.get(char, char)
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    category = unicodedata.category(char)
    if category in ("Zs", "Pd", "Cf"):
        return {"Zs": " ", "Pd": "-", "Cf": ""}[category]
    kind, _, _ = unicodedata.decomposition(char).partition(" ")
    if not kind.startswith("<"):
        return char
    plain = unicodedata.normalize("NFKC", char).replace("−", "-")
    if kind == "<fraction>" and not plain.endswith("⁄"):
        return r"\frac{" + plain.replace("⁄", "}{") + "}"
    if unicodedata.name(char, "").startswith("DOUBLE-STRUCK CAPITAL"):
        return rf"\mathbb{{{plain}}}"
    return {"<super>": f"^{{{plain}}}", "<sub>": f"_{{{plain}}}"}.get(kind, plain)


def _greek(match: re.Match[str]) -> str:
    """Greek letters as commands; more than two in a row are a word."""
    names = [unicodedata.name(char).split() for char in match[0]]
    if len(names) > 2 or any(len(name) != 4 or name[2] != "LETTER" for name in names):
        return match[0]
    names = [(name[1], name[3].lower().replace("lamda", "lambda")) for name in names]
    return "".join(rf"\{name if case == 'SMALL' else name.capitalize()} " for case, name in names)


def _with_roots(text: str) -> str:
    """Each √ as a command with its argument: what stands in brackets behind it, a number, a letter or a command."""
    while (at := text.rfind("√")) != -1:
        head, tail = text[:at], text[at + 1 :].lstrip()
        index, _, rest = tail.partition("]") if tail.startswith("[") else ("", "", tail)
        index, rest = index + "]" * bool(index), rest.lstrip()
        end = _closing(rest)
        if end is not None:
            argument, rest = rest[1:end], rest[end + 1 :]
        elif match := _RADICAND.match(rest):
            argument, rest = match[0], rest[match.end() :]
        else:
            return text.replace("√", r"\sqrt ")
        text = rf"{head}\sqrt{index}{{{argument}}}{rest}"
    return text


def _closing(text: str) -> int | None:
    """Where the round bracket or brace closes that the text begins with; None if it begins with none."""
    pair = {"(": ")", "{": "}"}.get(text[:1])
    depths = itertools.accumulate((char == text[0]) - (char == pair) for char in (text if pair else ""))
    return next((position for position, depth in enumerate(depths) if depth == 0), None)


MAX_EXPONENT = 300  # of 10 in scientific notation

_DELIMITERS = (
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")),
    *(("**", "**"), ("*", "*"), ("__", "__"), ("`", "`")),
)
_WRAPPER = (
    r"(?:text(?:bf|it|rm|tt|sf|sc|up|normal)?|math(?:bf|rm|it|tt|sf|normal)|emph|mbox|underline|boldsymbol|bm|pmb)"
)
# Of siunitx, and a fraction of two units.
_SI = re.compile(
    r"\\(?:SI|qty)\s*(?:\[[^\]]*\])?\{([^{}]*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}|"
    r"\\(?:si|unit)\s*\{((?:[^{}]|\{[^{}]*\})*)\}|\\num\s*\{([^{}]*)\}|\\ang\s*\{([^{};]*)\}"
)
_UNIT_FRACTION = re.compile(
    r"\\frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}(\^\{?[0-9]\}?)?\s*\}"
)
_SI_PREFIX = re.compile(r"\\(nano|micro|milli|centi|deci|hecto|kilo|mega|giga|tera)\s*\\")
_COMMAND = re.compile(rf"\\(?:boxed|fbox|{_WRAPPER})?\s*\{{|\{{")


def _as_power(match: re.Match[str]) -> str:
    return rf"\times10^{{{3 + 3 * ('thousand', 'million', 'billion', 'trillion').index(match[2])}}}"


# Same value, other notation; in this order.
_REWRITTEN = (
    (re.compile(r"\\(?:displaystyle|textstyle|limits)|\\!\s*|\\(?:left|right)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:text)?color\s*\{\w+\}|^\s*(?:=|≈|\\(?:approx|therefore)(?![A-Za-z]))"), ""),
    (re.compile(rf"\\{_WRAPPER}\s*\{{\s*([0-9][0-9.,]*)\s*\}}"), r"\1"),
    (re.compile(r"\{\s*\\rm\s+([A-Za-z/ ]+)\}"), r"\\text{\1}"),
    (re.compile(r"(?<=[0-9])\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*(st|nd|rd|th)(?![a-z])\s*\}{0,2}"), r"\\text{\1}"),
    (re.compile(r"(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan)|log|ln|cot|csc)(?=[(_^])"), r"\\\1"),
    (re.compile(r"\\(?:bf|rm|it|sf|tt|tiny|small|normalsize|[Ll]arge|LARGE|[Hh]uge)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])|(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"(?<!\\)\\(?:[,:; ]|q?quad(?![A-Za-z]))|~"), " "),
    (re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf|mathit)\s*\{\s*(and|or|to|-+|\\?[$€£¥₹])\s*\}"), r" \1 "),
    # Scientific notation, but not 1e3, where e may be the number.
    (
        re.compile(
            r"(?<![\w.])([0-9][0-9.,]*)\s*(?:\\(?:times|cdot|ast)(?![A-Za-z])|[*xX])\s*10\s*(?:\^|\*\*)\s*"
            r"(?:\{\s*([+-]?[0-9]+)\s*\}|\(\s*([+-]?[0-9]+)\s*\)|([+-]?[0-9]+)(?![0-9.]))"
        ),
        r"\1\\times10^{\2\3\4}",
    ),
    (re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]*)?)[eE]([+-][0-9]+|[0-9]{2,})(?![\w.])"), r"\1\\times10^{\2}"),
    (re.compile(r"(?<![\w.])([0-9]+\.[0-9]*)[eE]([0-9])(?![\w.])"), r"\1\\times10^{\2}"),
    (re.compile(r"\s*(?:\\text\{\s*(?:per ?cent(?:age)?|pct)\s*\}|\b(?:per ?cent(?:age)?|pct)\b)"), r"\%"),
    (re.compile(r"(?<=[0-9])\s*(?:(\\text\{)\s*|\b)(thousand|million|billion|trillion)\b(?(1)\s*\})"), _as_power),
    (re.compile(r"(?<![0-9./^_{])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9./])"), r"\1\\frac{\2}{\3}"),
    (
        re.compile(r"(?<![0-9.,/^_])[0-9]{1,3}(?:[ '][0-9]{3})+(?![0-9/]|[ '][0-9])"),
        lambda match: re.sub("[ ']", ",", match[0]),
    ),
    (
        re.compile(
            r"°|(?<=[0-9])\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])"
        ),
        r"^\\circ ",
    ),
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\{([0-9]+)\}")
_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")

_BASE = re.compile(r"(?<=[0-9])\}?_\s*(?:\{\s*(?:\\(?:text|mathrm)\{)?\s*(\w+)\s*\}?\s*\}|([0-9]+|[A-Za-z]))")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BRACKETS = re.compile(r"\\[{}]|\\[lr](?:brace|angle)(?![A-Za-z])|[()\[\],;]")
_SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus|backslash)(?![A-Za-z])")

ASSIGNED = re.compile(r"([A-Za-z]\w*)\s*(?:=|\\approx(?![A-Za-z]))(?!.*=)\s*")
_SCIENTIFIC = re.compile(r"(.*?[0-9.])\s*\\times10\^\{([+-]?[0-9]+)\}")

_WORD = re.compile(r"(?<![A-Za-z])(?!(?:and|or)\b)[a-z]{3,}")
_NO_TEXT = re.compile(r"[\\+*/=^<>_{}|]")
_SHORT_WORDS = {"no", "on", "in", "up", "am", "pm", "ok"}
NAMES = {"inf", "infinity", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "arcsin", "arccos"} | {
    *("arctan", "sinh", "cosh", "tanh", "max", "min", "gcd", "lcm")
}


def plain(text: str) -> str:
    r"""The answer without what stands around its value, in one notation.

    >>> [plain(text) for text in (r"\(18\)", "**18**.", r"\boxed{\text{Monday}}", r"1{,}000", r"\left(\dfrac12\right)")]
    ['18', '18', 'Monday', '1,000', '(\\frac12)']
    """
    text = _UNIT_FRACTION.sub(_spelled_fraction, _SI.sub(_spelled, unwrapped(as_latex(text))))
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


def spaced(text: str) -> str:
    """A plain answer without spaces that separate nothing."""
    return _SPACE.sub("", " ".join(text.split()))


def words(text: str) -> list[str] | None:
    """The words of a plain answer that is text (a day, names, yes), in order within each item of a list; else None.

    The items are sorted. A run of neighbouring letters (xyz) is a product of variables, a name such as sqrt is none.

    >>> words("Monday"), words("Bob and Alice"), words("No"), words("June 20")
    (['monday'], ['alice', 'bob'], ['no'], ['june 20'])
    >>> [words(text) for text in ("xyz", "3, 4 and 5", "x > 3", "sqrt 2", "ab")]
    [None, None, None, None, None]
    """
    text = " ".join(text.casefold().split())
    first = _WORD.search(text)
    is_text = text in _SHORT_WORDS or (first is not None and first[0] not in NAMES and not is_alphabetic(first[0]))
    if not is_text or _NO_TEXT.search(text):
        return None
    return sorted(item.strip() for item in re.split(r",|;|\band\b", text) if item.strip())


def is_alphabetic(text: str) -> bool:
    """Whether letters are neighbours in the alphabet, as the variables of a product are: xyz."""
    return text in "abcdefghijklmnopqrstuvwxyz"


def as_number(text: str) -> Fraction | None:
    r"""The value of a plain answer that is one number written out.

    >>> [str(as_number(text)) for text in ("1,000", r"1.2\times10^{3}", "- 5", "18.", "18 cm", "8+10", "36/2", "10^3")]
    ['1000', '1200', '-5', '18', 'None', 'None', 'None', 'None']
    """
    text = text.strip()
    if text[:1] in ("-", "+"):
        text = text[0] + text[1:].lstrip()
    exponent = 0
    if match := _SCIENTIFIC.fullmatch(text):
        text, exponent = match[1], int(match[2])
    value: Decimal | None = plain_number(text.removesuffix("."))
    return None if value is None or abs(exponent) > MAX_EXPONENT else Fraction(value) * Fraction(10) ** exponent


def differ(a: str, b: str) -> bool:
    r"""Whether two plain answers differ in the name of a value, a base or a kind of bracket.

    Except for names, the library does not see them. What only one of them states makes no difference, but for bases.

    >>> differ("10_8", "10_9"), differ("90", "90_8"), differ("(1,2)", "[1,2]"), differ("1,2", r"\{1,2\}")
    (True, True, True, False)
    >>> differ("x = 3", "n = 3"), differ("x = 3", "3")
    (True, False)
    """
    name_a, name_b = ASSIGNED.match(a), ASSIGNED.match(b)
    if name_a is not None and name_b is not None and name_a[1].casefold() != name_b[1].casefold():
        return True
    if _bases(a) != _bases(b):
        return True
    if _SET_OPERATION.search(a) or _SET_OPERATION.search(b):
        return False  # intervals may be united in several ways
    # Each has a list in brackets of a kind that the other has not. Without brackets a list may be any kind.
    in_a, in_b = _list_brackets(a), _list_brackets(b)
    return bool(in_a - in_b) and bool(in_b - in_a)


def _spelled(match: re.Match[str]) -> str:
    r"""A command of siunitx as a value and its unit as text: `\SI{5}{\kilo\meter\per\hour}` is 5 kilometer per hour."""
    value, unit, alone, number, angle = (part or "" for part in match.groups())
    words = re.sub(r"\\([A-Za-z]+)", r" \1 ", _SI_PREFIX.sub(r"\\\1", unit or alone))
    words = re.sub("[{}]", "", words)
    return f"{value}\\text{{ {words} }}" if words else f"{value}{number}{angle}" + r"^\circ" * bool(angle)


def _spelled_fraction(match: re.Match[str]) -> str:
    power = re.sub("[{}]", "", match[3] or "")
    return f"\\text{{ {match[1]} per {match[2]}{power} }}"


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match[1] or "0", match[2], match[3]
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _bases(text: str) -> Counter[str]:
    bases = (match[1] or match[2] for match in _BASE.finditer(text))
    return Counter(_BASES.get(base, base) for base in bases)


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
