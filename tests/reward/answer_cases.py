"""Pairs of an answer and a reference whose meaning is known, and whether reward=math finds it."""

import random
import string
import sys
import unicodedata
from collections.abc import Iterable

from rlft.reward.math import compared

Case = tuple[str, str, bool]
"""(answer, reference, whether they mean the same)"""
ZEROS = [chr(code) for code in range(sys.maxunicode) if unicodedata.decimal(chr(code), None) == 0]
"""The zero of each script that has decimal digits; its other digits follow it."""
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def right(answer: str, reference: str, *, unevaluated: bool = False) -> bool:
    return compared(answer, reference, unevaluated=unevaluated, max_chars=200) is True


def wrong_of(cases: Iterable[Case]) -> list[Case]:
    """The cases that are judged otherwise."""
    return [(answer, reference, equal) for answer, reference, equal in cases if right(answer, reference) is not equal]


def sampled(cases: Iterable[Case], number: int, seed: int = 51) -> list[Case]:
    """So many of the cases, each once."""
    every = list(dict.fromkeys(cases))
    return random.Random(seed).sample(every, min(number, len(every)))


def in_script(zero: str) -> dict[int, str]:
    """For `str.translate`: ASCII digits as those of the script with this zero."""
    return {ord(digit): chr(ord(zero) + int(digit)) for digit in string.digits}
