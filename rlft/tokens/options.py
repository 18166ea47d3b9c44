"""The options of a multiple-choice question in a row of data: their labels and texts, for what shows or reads them."""

from __future__ import annotations

import ast
import contextlib
import re
import string
from collections.abc import Mapping, Sequence
from itertools import count, islice, product
from typing import Any

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
    null are none. Texts that all begin with their labels lose them.

    >>> options_of(["(1) Rome", "(2) Paris"]), options_of({"A": "A. Rome", "B": "B. Paris", "C": None})
    ({'1': 'Rome', '2': 'Paris'}, {'A': 'Rome', 'B': 'Paris'})
    """
    labels, texts = _parts(value)
    begun = [_PREFIX.match(text) for text in texts]
    begins = [next(filter(None, match.groups())) if match else "" for match in begun]
    if labels is None:
        labels = begins if _is_series([label.casefold() for label in begins]) else letters(len(texts))
    labels = [match[1] if (match := _OWN_LABEL.fullmatch(label.strip())) else "" for label in labels]
    if not texts or len(texts) != len(labels) or len(set(labels)) != len(labels) or "" in labels:
        raise ValueError(f"choices must be a list of strings or a mapping from letters to strings, got {value!r:.80}")
    if [label.casefold() for label in labels] == [label.casefold() for label in begins]:
        texts = [text[match.end() :] for text, match in zip(texts, begun, strict=True) if match]
    return dict(zip(labels, texts, strict=True))


def _parts(value: Any) -> tuple[list[str] | None, list[str]]:
    """(the labels of options or None, their texts) without those that are null; no texts for what are no options."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(value.strip())
    if isinstance(value, list | tuple) and value and all(isinstance(e, Mapping) and len(e) == 2 for e in value):
        value = {key: [each.get(key) for each in value] for key in value[0]}
    if isinstance(value, Mapping) and set(value) in ({"label", "text"}, {"key", "value"}):
        columns = [list(value[key]) for key in sorted(value)]
    elif isinstance(value, Mapping) and all(isinstance(label, str) for label in value):
        columns = [list(value), list(value.values())]
    else:
        texts = value if isinstance(value, list | tuple) else []
        return None, [str(text) for text in texts if text is not None]
    if len(columns[0]) != len(columns[1]):
        return [], []
    kept = [(str(label), str(text)) for label, text in zip(*columns, strict=True) if text is not None]
    return [label for label, _ in kept], [text for _, text in kept]


def _is_series(labels: Sequence[str]) -> bool:
    """Whether these are a, b, c, .. or 1, 2, .. or 0, 1, .. or i, ii, .., at least two."""
    number = len(labels)
    counted = [[str(first + k) for k in range(number)] for first in (0, 1)]
    known = ([letter.lower() for letter in letters(number)], *counted, _ROMAN[:number])
    return number > 1 and list(labels) in known
