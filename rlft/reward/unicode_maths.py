r"""Mathematics in Unicode as LaTeX, and digits, signs and spaces of any script as those of ASCII.

What a character is, Unicode's own tables say (superscript, fraction, digit, dash, space ..); only operators have one
here.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata

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
