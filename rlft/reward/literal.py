"""Numbers that are read, not computed: dates, times, ratios, scores, ranges, versions, telephone numbers, ISBNs.

They are plain numbers between `-`, `/`, `:`, `.` and spaces. A reference of this form is compared as text, also where
it could be a difference (10-3), for references are no sums still to be done. An answer of this form is right for no
other reference, except for a fraction (3/4) and a plain difference (10-3) that does not look like a date.
"""

from __future__ import annotations

import re

from rlft.reward.notation import ASSIGNED, as_number

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_CLOCK = re.compile(r"([0-9]{1,2}(?:[:.][0-9]{2}){0,2})\s*([ap])\.?\s*m\.?")
_RANGE = re.compile(r"(?:from )?(\S.*?) to (\S.*)|between (\S.*?) and (\S.*)")
_GROUPS = r"[0-9]+(?:(?:\s*[-:/.]-*\s*|\s+)[0-9]+)"
_SEQUENCE = re.compile(
    rf"[v+]?\s*{_GROUPS}+(?:[ -]?x)?|\+?(?:[0-9]+[\s-]*)?\([0-9]{{3,5}}\)[\s-]*(?:[0-9]+|{_GROUPS}+)|"
    rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[t ][0-9:.+z-]+"
)
_SIGNED = re.compile(rf"-\s*({_NUMBER})\s*-\s*((?:-\s*)?)({_NUMBER})")  # a range whose first end is below 0
_FRACTION = re.compile(rf"(?!0[0-9]){_NUMBER}\s*/\s*(?!0[0-9]){_NUMBER}")
_DATE = re.compile(r"[0-9]{4}\s*-\s*[0-9]{1,2}\s*-\s*[0-9]{1,2}")
_DIFFERENCE = re.compile(rf"-?\s*(?!0[0-9]){_NUMBER}(?:\s*-\s*(?!0[0-9]){_NUMBER})+")


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
    if match := _RANGE.fullmatch(text):
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
