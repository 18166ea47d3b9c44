r"""1 if the answer names the right choice of a multiple-choice question, else 0.

A choice is named by its letter as people and models write it (B, (B), B), B., **B**, \text{B}, \boxed{B}, Option B, The
answer is B), alone or with its text (B. Paris, \textbf{(B)}\ Paris), or by its text alone if the prompt's metadata hold
the choices. The whole answer has to name it: other prose around a letter, or a second letter, is no answer, so that
nothing is gained by naming several.

Where the reference answer names several choices (["A", "C"], or A, C), the answer has to name all of them and no other,
in any order: A, C; A and C; AC; (A)(C); Rome, Oslo.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from rlft.reward.answer import AnswerKeys, composed, reference_answers
from rlft.reward.exact_match import normal
from rlft.reward.notation import unwrapped
from rlft.tokens.options import LABEL, letters, options_of, placed_options
from rlft.types import Group, Prompt, Unscorable, UserError

MAX_CHARS = 2000  # of an answer, on top of the longest choice's: what may stand around a choice

LETTERS = tuple(letters(26))
_LABEL = re.compile(rf"\(({LABEL})\)[.:]?|({LABEL})[).:]?")
_LABEL_AND_TEXT = re.compile(rf"(?:\(({LABEL})\)[.:]?|({LABEL})(?:[).:]|\s[-–—]\s))\s*(\S.*)", re.DOTALL)
# A letter that markup sets apart from what follows it: \\textbf{(C)}\\ 12, **C.** Paris
_SET_APART = re.compile(
    rf"(?:\\(?:text|mathrm|textbf|mathbf)\{{|\*\*)\s*\(?({LABEL})[).:]*\s*(?:\}}|\*\*)[.:]?(?:\\[ ,;:]|~|\s)*(\S.*)",
    re.DOTALL,
)
_LEAD = re.compile(
    r"[*_]*(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my)\s+)?(?:(?:final|correct|right|best)\s+){0,2}"
    r"(?:answer|option|choice|letter)s?[*_]*(?:\s+(?:is|are|would be|should be|must be))?(?:\s*[:=][*_]*\s*|\s+)",
    re.IGNORECASE,
)
_AROUND = (
    *(("_", "_"), ('"', '"'), ("'", "'"), ("“", "”")),
    *(("(", ")"), ("[", "]"), ("<b>", "</b>"), (r"\{", r"\}")),
)
_BETWEEN = re.compile(r"\s*(?:[,;/&+|、，；]|\band\b|(?<=[)\]])(?=[(\[])|\s)\s*(?:and\s+)?")
MAX_PIECES = 40  # of an answer that names several choices
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
    answer = _without_lead(answer)
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


def all_named(answer: str, choices: Mapping[str, str], *, ignore_case: bool) -> frozenset[str]:
    """The letters of the choices of which an answer names one after the other; none if a part of it names no choice.

    >>> [sorted(all_named(text, {}, ignore_case=True)) for text in ("A, C", "(C)(A)", "A and C", "AC", "A or C")]
    [['A', 'C'], ['A', 'C'], ['A', 'C'], ['A', 'C'], []]
    >>> sorted(all_named("New York, Salt and Oil", {"A": "Oil", "B": "New York", "C": "Salt and Oil"}, ignore_case=0))
    ['B', 'C']
    """
    answer = _without_lead(answer)
    answer = _bare(re.sub(r"^both\s+", "", answer, flags=re.IGNORECASE))
    found: set[str] = set()
    longest = 3 + max((len(text.split()) for text in choices.values()), default=0)
    gaps = [(0, 0), *(gap.span() for gap in _BETWEEN.finditer(answer)), (len(answer), len(answer))]
    at, last = 0, len(gaps) - 1
    while at < last and len(gaps) <= MAX_PIECES:
        # The longest piece that is a choice: its text may be "New York", or "Salt and Oil".
        for end in range(min(last, at + longest), at, -1):
            if label := named(answer[gaps[at][1] : gaps[end][0]], choices, ignore_case=ignore_case):
                found.add(label)
                at = end
                break
        else:
            break
    if at == last:
        return frozenset(found)
    # AC, but not a word: without the choices only the first capital letters are taken for labels.
    labels = [_known(letter, choices, ignore_case) if choices else letter for letter in answer]
    is_known = None not in labels and ({*labels} <= {*LETTERS[:10]} or bool(choices))
    return frozenset(filter(None, labels)) if is_known and len({*labels}) == len(labels) else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(AnswerKeys):
    """1.0 for each completion whose answer names the choice that the reference answer names, else 0.0."""

    metadata_keys: ClassVar[tuple[str, ...]] = ("choices_field",)

    ignore_case: bool
    choices_field: str | None
    reference_is: ReferenceIs = ReferenceIs.auto

    def _compared(self, group: Group, *, forms: bool = True) -> list[tuple[bool | None, str | None]]:
        choices = self._choices(group.prompt)
        right = self._right(group.prompt, choices)
        answers, several = (self.extract(rollout.completion.text) for rollout in group.rollouts), len(right) > 1
        of_each = [frozenset() if a is None else self._names(a, choices, several=several) for a in answers]
        return [(letters == right, ", ".join(sorted(letters)) or None) for letters in of_each]

    def _names(self, answer: str, choices: Mapping[str, str], *, several: bool = True) -> frozenset[str]:
        """The letters of what an answer names; none if it names no choice, or without `several` more than one."""
        letter = named(answer, choices, ignore_case=self.ignore_case)
        if letter is not None or not several:
            return frozenset(filter(None, [letter]))
        return all_named(answer, choices, ignore_case=self.ignore_case)

    def examine(self, prompts: Sequence[Prompt]) -> str | None:
        """Says that references are indices. UserError where they may be indices or texts: they are one in all rows."""
        if self.reference_is is not ReferenceIs.auto or self.choices_field is None:
            return None
        num_indices, only, both = 0, [], []
        for prompt in prompts:
            with contextlib.suppress(ValueError):  # rows that are unscorable are found elsewhere
                choices, reference = self._choices(prompt), prompt.answer.strip()
                is_label = reference in choices  # choices may be numbered
                index = None if is_label else _at_index(reference, self._placed(prompt))
                if index is None:
                    continue
                num_indices += 1
                letter = named(reference, choices, ignore_case=self.ignore_case)
                if letter is None:
                    only.append(f"{reference} of prompt {prompt.id!r}")
                elif letter != index:
                    both.append(f"{reference} of prompt {prompt.id!r}, {letter} by its text and {index} by its index")
        answers = "reference answers"
        if both and num_indices == len(prompts):
            problem = f"all {num_indices} {answers} may be indices, and {len(both)} of them are also choices' texts"
        elif only and num_indices < len(prompts):
            problem = f"{len(only)} of {len(prompts)} {answers} name a choice only by its index, others otherwise"
        else:
            return f"all {num_indices} {answers} are read as indices of choices, counted from 0" if only else None
        first = (both if num_indices == len(prompts) else only)[0]
        remedy = "set it to index (counted from 0, as in MMLU), number (from 1) or choice (letters and texts)"
        remedy += ", or let choices_field name a field with the rows' own labels and texts"
        raise UserError("reference_is", f"{problem} (the first: {first})", got=self.reference_is, remedy=remedy)

    def _right(self, prompt: Prompt, choices: Mapping[str, str]) -> frozenset[str]:
        """The letters that the prompt's reference answers name together, or their indices. Unscorable: one has none."""
        right: set[str] = set()
        for reference in reference_answers(prompt):
            found: frozenset[str] = frozenset()
            if self.reference_is in (ReferenceIs.auto, ReferenceIs.choice):
                found = self._names(reference, choices)
            if not found and self.reference_is is not ReferenceIs.choice:
                placed, first = self._placed(prompt), int(self.reference_is is ReferenceIs.number)
                places = re.split(r"[\s,;\[\]]+", reference.strip("[] "))
                at = [_at_index(place, placed, first=first) for place in places]
                found = frozenset(filter(None, at)) if None not in at else found
            if not found:
                among = f"one of its choices {', '.join(choices)}" if choices else "a letter"
                raise Unscorable(f"the reference answer {reference!r:.80} of prompt {prompt.id!r} is not {among}")
            right |= found
        return frozenset(right)

    def reference_text(self, prompt: Prompt) -> str | None:
        choices = self._choices(prompt)
        right = self._right(prompt, choices)
        return self.written(", ".join(letter for letter in choices or LETTERS if letter in right))

    def _choices(self, prompt: Prompt) -> dict[str, str]:
        if self.choices_field is None:
            return {}
        if self.choices_field not in prompt.metadata:
            known = ", ".join(prompt.metadata) or "nothing"
            raise ValueError(f"prompt {prompt.id!r} has no {self.choices_field!r} in its metadata, only {known}")
        options = options_of(prompt.metadata[self.choices_field])
        return {label: composed(text) for label, text in options.items()}

    def _placed(self, prompt: Prompt) -> list[str | None]:
        """The letter at each index of the choices, None where one is null."""
        placed = [] if self.choices_field is None else placed_options(prompt.metadata[self.choices_field])
        return [option and option[0] for option in placed]


def _without_lead(answer: str) -> str:
    """The answer without what stands around all of it, and without words such as "the answer is: option" before it."""
    answer = unwrapped(answer)
    for _ in range(2):
        match = _LEAD.match(answer)
        answer = answer if match is None else unwrapped(answer[match.end() :])
    return answer


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
    own, its = (normal(unwrapped(each), numeric=True, ignore_case=ignore_case) for each in (text, choices[label]))
    return own == its


def _at_index(reference: str, placed: Sequence[str | None], first: int = 0) -> str | None:
    """The letter of the choice with this index, counted from `first`; None if the reference is no index of theirs."""
    is_index = reference.isdecimal() and len(reference) < 3 and 0 <= int(reference) - first < len(placed)
    return placed[int(reference) - first] if is_index else None


def _known(label: str, choices: Mapping[str, str], ignore_case: bool) -> str | None:
    """The label as the choices write it; None if it is not one of theirs."""
    labels = tuple(choices) or LETTERS
    if label in labels:
        return label
    return next((known for known in labels if ignore_case and known.casefold() == label.casefold()), None)
