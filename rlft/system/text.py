"""Formats text for people: makes model output safe to show, draws small curves, writes durations."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, format (bidi) marks, surrogates, line separators
# Fillers, blanks and variation selectors: by their category letters, signs or marks, but invisible.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
_JOINERS = {"\u200c", "\u200d"}  # they join letters and emoji, and move no other text
_KEPT = {"\n", "\t", *_JOINERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters that a view is drawn with."""

    bars: str
    plus_minus: str
    arrow: str
    right: str
    wrong: str
    cut: str


UNICODE = Glyphs(bars="▁▂▃▄▅▆▇█", plus_minus="±", arrow="→", right="✓", wrong="✗", cut="…")
ASCII = Glyphs(bars="_.-=+*#@", plus_minus="+-", arrow="->", right="ok", wrong="x", cut="...")


def glyphs_for(encoding: str) -> Glyphs:
    """The characters that a stream of this encoding can show."""
    return UNICODE if encoding.lower().replace("-", "").startswith("utf") else ASCII


def visible(text: str, *, joiners: bool = True) -> str:
    r"""The text with everything that could move, hide or recolour other text spelled out, as `\x1b` or `\u202e`.

    `joiners`: whether invisible characters that belong to some scripts and emoji stay as they are.
    """
    if "".join(text.split("\n")).isprintable() and (joiners or not _BLANK.search(text)):
        return text
    kept = _KEPT if joiners else _KEPT - _JOINERS
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if (char not in kept and unicodedata.category(char) in _ESCAPED_CATEGORIES)
        or (not joiners and _BLANK.match(char))
        else char
        for char in text
    )


def one_line(text: str, limit: int, cut: str = UNICODE.cut) -> str:
    """The visible text on one line of at most `limit` characters; the middle is cut, as answers come at the end."""
    line = " ".join(visible(text).split())
    if len(line) <= limit:
        return line
    tail = (limit - len(cut)) * 2 // 3
    head = limit - len(cut) - tail
    return f"{line[:head]}{cut}{line[len(line) - tail :]}"


def sparkline(values: Sequence[float], width: int, bars: str = UNICODE.bars) -> str:
    """A curve of the finite values with at most `width` bars; if there are more values, neighbours are averaged."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    columns = min(width, len(finite))
    edges = [column * len(finite) // columns for column in range(columns + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        return bars[len(bars) // 2 - 1] * columns
    return "".join(bars[round((mean - low) / (high - low) * (len(bars) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """Seconds as `0:07`, `12:05`, `3:04:05` or `2d 3:04:05`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if not hours:
        return f"{minute}:{second:02d}"
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock
