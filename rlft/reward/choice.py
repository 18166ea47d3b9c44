r"""1 if the answer names the right choice of a multiple-choice question, else 0.

A choice is named by its letter as people and models write it (B, (B), B), B., **B**, \text{B}, \boxed{B}, Option B, The
answer is B), alone or with its text (B. Paris, \textbf{(B)}\ Paris), or by its text alone if the prompt's metadata hold
the choices. The whole answer has to name it: other prose around a letter, or a second letter, is no answer, so that
nothing is gained by naming several.
"""

from __future__ import annotations

import contextlib
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

from rlft.reward.answer import AnswerKeys, composed, reference_answer
from rlft.reward.exact_match import matches
from rlft.reward.notation import unwrapped
from rlft.types import Group, Prompt, Unscorable, UserError

MAX_CHARS = 2000
"""The most characters of an answer, on top of the longest choice's: what may stand around a choice."""

_LABEL = re.compile(r"\(([A-Za-z0-9])\)[.:]?|([A-Za-z0-9])[).:]?")
_LABEL_AND_TEXT = re.compile(r"(?:\(([A-Za-z0-9])\)[.:]?|([A-Za-z0-9])(?:[).:]|\s[-–—]\s))\s*(\S.*)", re.DOTALL)
# A letter that markup sets apart from what follows it: \\textbf{(C)}\\ 12, **C.** Paris
_SET_APART = re.compile(
    r"(?:\\(?:text|mathrm|textbf|mathbf)\{|\*\*)\s*\(?([A-Za-z0-9])[).:]*\s*(?:\}|\*\*)[.:]?(?:\\[ ,;:]|~|\s)*(\S.*)",
    re.DOTALL,
)
_LEAD = re.compile(
    r"[*_]*(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my)\s+)?(?:(?:final|correct|right|best)\s+){0,2}"
    r"(?:answer|option|choice|letter)[*_]*(?:\s+(?:is|would be|should be|must be))?(?:\s*[:=][*_]*\s*|\s+)",
    re.IGNORECASE,
)
_AROUND = (
    *(("_", "_"), ('"', '"'), ("'", "'"), ("“", "”")),
    *(("(", ")"), ("[", "]"), ("<b>", "</b>")),
)
_SECOND_LABEL = re.compile(r"\([A-Za-z0-9]\)|\b[A-Za-z0-9]\)|\b(?:[A-Z]|and|or|nor|not)\b")


class ReferenceIs(Enum):
    """How a reference answer names its choice: by letter or text, or by its place in the choices, from 0 or from 1."""

    auto = "auto"
    choice = "choice"
    index = "index"
    number = "number"


def named(answer: str, choices: Mapping[str, str], *, ignore_case: bool) -> str | None:
    """The letter of the only choice that an answer names, else None. An answer that is letter and text is a letter.

    `choices` is {letter: text}; where it is empty, any capital letter is a choice.

    >>> [named(text, {}, ignore_case=True) for text in ("B", "(B)", "b.", "Option B", "A or B", "AB")]
    ['B', 'B', 'B', 'B', None, None]
    >>> cities = {"A": "Rome", "B": "Paris"}
    >>> [named(text, cities, ignore_case=True) for text in ("paris", "B) Paris", "A) Paris", "C")]
    ['B', 'B', None, None]
    """
    if len(answer) > MAX_CHARS + max(map(len, choices.values()), default=0):
        return None
    answer = unwrapped(answer)
    for _ in range(2):  # the answer is: option B
        match = _LEAD.match(answer)
        answer = answer if match is None else unwrapped(answer[match.end() :])
    if (match := _LABEL.fullmatch(_bare(answer))) and (label := _known(match[1] or match[2], choices, ignore_case)):
        return label
    for form in (_SET_APART, _LABEL_AND_TEXT):
        if match := form.fullmatch(answer):
            *letters, text = match.groups()
            label = _known(next(filter(None, letters)), choices, ignore_case)
            is_alone = not choices and not _SECOND_LABEL.search(text)
            if label is not None and (is_alone or _is_text_of(label, text, choices, ignore_case)):
                return label
    matching = [label for label in choices if _is_text_of(label, answer, choices, ignore_case)]
    return matching[0] if len(matching) == 1 else None


def choices_of(value: Any) -> dict[str, str]:
    """{letter: text}, from any of the forms that data sets use; ValueError for other values.

    These are a list of texts (lettered A, B, ..), {"A": text, "B": text}, and {"label": ["A", "B"], "text": [..]}.
    """
    if isinstance(value, Mapping) and set(value) == {"label", "text"}:
        labels, texts = list(value["label"]), list(value["text"])
    elif isinstance(value, Mapping):
        labels, texts = list(value), list(value.values())
    elif isinstance(value, list | tuple):
        labels, texts = list(string.ascii_uppercase[: len(value)]), list(value)
    else:
        labels, texts = [], []
    lettered = all(isinstance(label, str) and _LABEL.fullmatch(label) and len(label) == 1 for label in labels)
    if not labels or len(labels) != len(texts) or len(set(labels)) != len(labels) or not lettered:
        raise ValueError(f"choices must be a list of strings or a mapping from letters to strings, got {value!r:.80}")
    return dict(zip(labels, (composed(str(text)) for text in texts), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(AnswerKeys):
    """1.0 for each completion whose answer names the choice that the reference answer names, else 0.0."""

    metadata_keys: ClassVar[tuple[str, ...]] = ("choices_field",)

    ignore_case: bool
    choices_field: str | None
    reference_is: ReferenceIs = ReferenceIs.auto

    def _compared(self, group: Group) -> list[bool | None]:
        choices = self._choices(group.prompt)
        prompt = group.prompt
        answers = prompt.answer, *prompt.other_answers
        letters = {self._right(replace(prompt, answer=answer), choices) for answer in answers}
        return [
            (answer := self.extract(rollout.completion.text)) is not None
            and named(answer, choices, ignore_case=self.ignore_case) in letters
            for rollout in group.rollouts
        ]

    def examine(self, prompts: Sequence[Prompt]) -> str | None:
        """Says that references are indices. UserError where they may be indices or texts: they are one in all rows."""
        if self.reference_is is not ReferenceIs.auto or self.choices_field is None:
            return None
        num_indices, only, both = 0, [], []
        for prompt in prompts:
            with contextlib.suppress(ValueError):  # rows that are unscorable are found elsewhere
                choices, reference = self._choices(prompt), prompt.answer.strip()
                index = None if reference in choices else _at_index(reference, choices)  # choices may be numbered
                if index is None:
                    continue
                num_indices += 1
                letter = named(reference, choices, ignore_case=self.ignore_case)
                if letter is None:
                    only.append(f"{reference} of prompt {prompt.id!r}")
                elif letter != index:
                    both.append(f"{reference} of prompt {prompt.id!r}, {letter} by its text and {index} by its index")
        if both and num_indices == len(prompts):
            problem = (
                f"all {num_indices} reference answers may be indices, and {len(both)} of them are also choices' texts"
            )
            raise self._unclear(problem, both[0])
        if only and num_indices < len(prompts):
            problem = (
                f"{len(only)} of {len(prompts)} reference answers name a choice only by its index, others otherwise"
            )
            raise self._unclear(problem, only[0])
        return f"all {num_indices} reference answers are read as indices of choices, counted from 0" if only else None

    def _unclear(self, problem: str, first: str) -> UserError:
        remedy = "set it to index (counted from 0, as in MMLU), number (from 1) or choice (letters and texts)"
        return UserError("reference_is", f"{problem} (the first: {first})", got=self.reference_is, remedy=remedy)

    def _right(self, prompt: Prompt, choices: Mapping[str, str]) -> str:
        """The letter that the prompt's reference answer names. Unscorable if it names none."""
        reference = reference_answer(prompt)
        right = None
        if self.reference_is in (ReferenceIs.auto, ReferenceIs.choice):
            right = named(reference, choices, ignore_case=self.ignore_case)
        if right is None and self.reference_is is not ReferenceIs.choice:
            right = _at_index(reference, choices, first=int(self.reference_is is ReferenceIs.number))
        if right is None:
            among = f"one of its choices {', '.join(choices)}" if choices else "a letter"
            raise Unscorable(f"the reference answer {reference!r:.80} of prompt {prompt.id!r} is not {among}")
        return right

    def reference_text(self, prompt: Prompt) -> str | None:
        return self.written(self._right(prompt, self._choices(prompt)))

    def _choices(self, prompt: Prompt) -> dict[str, str]:
        if self.choices_field is None:
            return {}
        if self.choices_field not in prompt.metadata:
            known = ", ".join(prompt.metadata) or "nothing"
            raise ValueError(f"prompt {prompt.id!r} has no {self.choices_field!r} in its metadata, only {known}")
        return choices_of(prompt.metadata[self.choices_field])


def _bare(answer: str) -> str:
    """The answer without emphasis, quotes or brackets around all of it."""
    before = None
    while answer != before:
        before = answer
        for opening, closing in _AROUND:
            inner = answer[len(opening) : -len(closing)]
            if answer.startswith(opening) and answer.endswith(closing) and opening not in inner:
                answer = unwrapped(inner)
    return answer


def _is_text_of(label: str, text: str, choices: Mapping[str, str], ignore_case: bool) -> bool:
    if label not in choices:
        return False
    return matches(unwrapped(text), unwrapped(choices[label]), numeric=True, ignore_case=ignore_case)


def _at_index(reference: str, choices: Mapping[str, str], first: int = 0) -> str | None:
    """The letter of the choice with this index, counted from `first`; None if the reference is no index of theirs."""
    is_index = reference.isdecimal() and len(reference) < 3 and 0 <= int(reference) - first < len(choices)
    return list(choices)[int(reference) - first] if is_index else None


def _known(label: str, choices: Mapping[str, str], ignore_case: bool) -> str | None:
    """The label as the choices write it; None if it is not one of theirs."""
    labels = tuple(choices) or tuple(string.ascii_uppercase)
    if label in labels:
        return label
    return next((known for known in labels if ignore_case and known.casefold() == label.casefold()), None)
