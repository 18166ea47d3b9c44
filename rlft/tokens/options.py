"""The options of a multiple-choice question in a row of data: their labels and texts, for what shows or reads them."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from itertools import count, islice, product
from typing import Any

FORMS = ({"label", "text"}, {"key", "value"})  # the fields of an option that is an object
LABEL = r"[^\W_]{1,4}"
_OWN_LABEL = re.compile(rf"[(\[]?({LABEL})[)\].:]*")
_PREFIX = re.compile(
    rf"\s*(?:\*\*)?(?:\(({LABEL})\)[.:]?|\[({LABEL})\]|({LABEL})(?:\)|[.:](?=[\s*]|[^\W\d]{3})))(?:\*\*)?\s*(?=\S)"
)
"""A label before an option's text: (A), [A], A), A. or A:, also in bold."""
_ROMAN = ["i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x"]


def letters(number: int) -> list[str]:
    """The labels of so many options that have none: A to Z, then AA, AB, ..

    >>> letters(28)[24:]
    ['Y', 'Z', 'AA', 'AB']
    """
    longer = (product(string.ascii_uppercase, repeat=length) for length in count(1))
    return ["".join(each) for each in islice((each for same in longer for each in same), number)]


def options_of(value: Any) -> dict[str, str]:
    """{label: text}, from any of the forms that data sets use; ValueError for other values.

    These are a list of texts (labelled A, B, .., or as all of them begin), {"A": text, "B": text},
    {"label": ["A", "B"], "text": [..]}, [{"label": "A", "text": text}, ..], and such a value as text. Options that are
    null or blank are none: they leave the labels of the others as they are. Texts that all begin with their labels lose
    them.

    >>> options_of(["(1) Rome", "(2) Paris"]), options_of({"A": "A. Rome", "B": "B. Paris", "C": None})
    ({'1': 'Rome', '2': 'Paris'}, {'A': 'Rome', 'B': 'Paris'})
    >>> options_of(["Rome", None, "Paris"])
    {'A': 'Rome', 'C': 'Paris'}
    """
    return dict(filter(None, placed_options(value)))


def placed_options(value: Any) -> list[tuple[str, str] | None]:
    """The label and the text of each option, see `options_of`; None for an item of a list that is none."""
    labels, items = _parts(value)
    places = _places(items)
    texts = [str(items[i]) for i in places]
    begun = [_PREFIX.match(text) for text in texts]
    begins = [next(filter(None, match.groups())) if match else "" for match in begun]
    if labels is None:
        all_letters = letters(len(items))
        is_own = _is_series([label.casefold() for label in begins], places)
        labels = begins if is_own else [all_letters[i] for i in places]
    else:
        labels = [str(labels[i]) for i in places]
    labels = [match[1] if (match := _OWN_LABEL.fullmatch(label.strip())) else "" for label in labels]
    if not texts or len(set(labels)) != len(labels) or "" in labels:
        raise ValueError(f"choices must be a list of strings or a mapping from letters to strings, got {value!r:.80}")
    if [label.casefold() for label in labels] == [label.casefold() for label in begins]:
        texts = [text[match.end() :] for text, match in zip(texts, begun, strict=True) if match]
    options: list[tuple[str, str] | None] = [None] * (places[-1] + 1)
    for place, label, text in zip(places, labels, texts, strict=True):
        options[place] = label, text
    return options


def _parts(value: Any) -> tuple[list[Any] | None, list[Any]]:
    """(the labels of options or None, their texts or null); no texts for what are no options."""
    for read in (json.loads, ast.literal_eval):
        if isinstance(value, str):
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                value = read(value.strip())
    if isinstance(value, list | tuple) and value and all(isinstance(e, Mapping) and len(e) == 2 for e in value):
        value = {key: [each.get(key) for each in value] for key in value[0]}
    if isinstance(value, Mapping) and value.keys() in FORMS:
        columns = [list(value[key]) for key in sorted(value)]
    elif isinstance(value, Mapping) and all(isinstance(label, str) for label in value):
        written = {label: text for label, text in value.items() if text is not None}  # others are a table's fillers
        columns = [list(written), list(written.values())]
    else:
        return None, list(value) if isinstance(value, list | tuple) else []
    return (columns[0], columns[1]) if len(columns[0]) == len(columns[1]) else ([], [])


def _places(texts: Sequence[Any]) -> list[int]:
    """Where there are options: not where a text is null (NaN in a table), nor where it is blank, unless all are."""
    given = [i for i, text in enumerate(texts) if text is not None and text == text]
    return [i for i in given if str(texts[i]).strip()] or given


def _is_series(labels: Sequence[str], places: Sequence[int]) -> bool:
    """Whether these are a, b, c, .. or 1, 2, .. or 0, 1, .. or i, ii, .., at least two, one by one or by place."""
    number = max(places, default=0) + 1
    counted = [[str(first + k) for k in range(number)] for first in (0, 1)]
    known = ([letter.lower() for letter in letters(number)], *counted, _ROMAN)
    taken = (range(len(labels)), places)
    return len(labels) > 1 and any(
        list(labels) == [series[i] for i in which if i < len(series)] for series in known for which in taken
    )
