from __future__ import annotations

import random
import time
from dataclasses import dataclass

from in_one_test import each

from rlft.reward.notation import as_latex, differ, plain, spaced, words
from rlft.reward.quantity import literal, quantity
from tests.reward.answer_cases import SUPERSCRIPTS, in_script, right


@each("piece", [
    "{", "}", r"\text{", "$", "**", r"\(", "(", ",", "1,", "_8", " ", r"\ ", "a ", "^", "=", "9", ".", r"\overline{3}",
])  # fmt: skip
def test_long_answers_take_no_time(piece):
    text = piece * (2000 // len(piece))  # the longest answer that is looked at
    start = time.process_time()
    bare = plain(text)
    quantity(bare), literal(bare), words(bare), differ(bare, bare), spaced(bare)
    assert time.process_time() - start < 1


FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅚": (5, 6), "⅞": (7, 8),
    "⅑": (1, 9),
}  # fmt: skip
SIGNS = {" × ": r" \times ", "·": r" \cdot ", " ÷ ": r" \div ", " + ": " + ", " − ": " - "}
RELATIONS = {"≤": r"\leq", "≥": r"\geq", "<": "<", ">": ">"}
BOLD = {ord("x"): "𝑥", ord("y"): "𝐲", ord("z"): "𝗓"}


@dataclass(frozen=True)
class Both:
    """The same expression in Unicode and in LaTeX, and whether it needs brackets as a part of another."""

    unicode: str
    latex: str
    is_sum: bool = False

    def bracketed(self):
        return Both(f"({self.unicode})", f"({self.latex})") if self.is_sum else self


def atom(rng):
    match rng.randrange(4):
        case 0:
            digits = str(rng.randint(2, 19))
            return Both(digits.translate(in_script(rng.choice("０٠۰०𝟎"))), digits)
        case 1:
            name = rng.choice("xyz")
            return Both(name.translate(BOLD), name)
        case 2:
            return rng.choice([Both("π", r"\pi"), Both("α", r"\alpha"), Both("θ", r"\theta")])
        case _:
            text, (a, b) = rng.choice([*FRACTIONS.items()])
            return Both(text, rf"\frac{{{a}}}{{{b}}}")


def expression(rng, depth):
    if depth == 0:
        return atom(rng)
    part = expression(rng, depth - 1)
    match rng.randrange(4):
        case 0:
            index, root = rng.choice([("", "√"), ("[3]", "∛"), ("[4]", "∜")])
            return Both(f"{root}({part.unicode})", rf"\sqrt{index}{{{part.latex}}}")
        case 1:
            power = rng.choice(["2", "3", "4", "12", "-1"])
            return Both(f"({part.unicode}){power.translate(SUPERSCRIPTS)}", f"({part.latex})^{{{power}}}")
        case _:
            other, (sign, command) = expression(rng, depth - 1).bracketed(), rng.choice([*SIGNS.items()])
            first = part.bracketed()
            return Both(f"{first.unicode}{sign}{other.unicode}", f"{first.latex}{command}{other.latex}", is_sum=True)


def test_an_expression_in_unicode_is_the_one_in_latex():
    rng = random.Random(3)
    pairs = [expression(rng, rng.choice([1, 1, 2])) for _ in range(2000)]
    differing = [pair for pair in pairs if squeezed(plain(pair.unicode)) != squeezed(plain(pair.latex))]
    assert differing == []


def squeezed(text):
    return text.replace(" ", "")


def test_an_expression_in_unicode_is_right_and_another_is_wrong():
    rng = random.Random(4)
    for _ in range(60):
        one = expression(rng, 1)
        relation, command = rng.choice([*RELATIONS.items()])
        assert right(one.unicode, one.latex), one
        assert right(one.latex, one.unicode), one
        assert not right(f"{one.bracketed().unicode}·¾", one.latex), one
        assert right(f"y {relation} {one.unicode}", f"y {command} {one.latex}"), one


ALIKE = [
    ("∞", r"\infty"), ("−∞", r"-\infty"), ("x²", "x^2"), ("√2", r"\sqrt{2}"), ("5(√3 + 1)", r"5(\sqrt{3}+1)"),
    ("2√3", r"2\sqrt3"), ("1½", r"1\frac{1}{2}"), ("x ≠ 4", r"x \neq 4"), ("90°", r"90^\circ"), ("∅", r"\emptyset"),
    ("x₁ + x₁₂", "x_1+x_{12}"), ("³√5", r"\sqrt[3]{5}"), ("{1, 2} ∪ {3}", r"\{1,2\} \cup \{3\}"), ("eˣ", "e^x"),
    ("ℝ", r"\mathbb{R}"), ("(−∞, 2]", r"(-\infty,2]"), ("log₂3", r"\log_2 3"), ("（１，２）", "(1,2)"),
    ("1±√5", r"1\pm\sqrt{5}"), ("2πr", r"2\pi r"),
]  # fmt: skip
APART = [
    ("x²", "x^3"), ("x²", "2x"), ("x²", "x2"), ("x₂", "x^2"), ("√2", r"\sqrt{3}"), ("∛2", r"\sqrt{2}"), ("10³", "103"),
    ("½", r"\frac{1}{3}"), ("1½", r"\frac{1}{2}"), ("x ≤ 4", r"x \geq 4"), ("x ≤ 4", "x < 4"), ("∞", r"-\infty"),
]  # fmt: skip


def test_signs_that_stand_alone():
    assert [pair for pair in ALIKE if not (right(*pair) and right(*reversed(pair)))] == []
    assert [pair for pair in APART if right(*pair) or right(*reversed(pair))] == []


def test_words_keep_their_letters():
    texts = ("Hà Nội", "Αθήνα", "naïve", "Ωμέγα", "北京", "संस्कृत")
    assert [text for text in texts if as_latex(text) != text] == []


def test_long_texts_take_no_time_to_speak_of():
    # Each √ is looked at once, and its argument once: far below a million steps.
    for piece in ("√", "√(", "²", "½", "θ ", "∛["):
        assert len(as_latex(piece * 200)) > 200
