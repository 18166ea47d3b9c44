"""Finds the answer in a completion, and numbers in an answer, for every reward that compares answers.

Completions are hostile text: an optimiser writes them. So everything here is linear in the length of the text
(str.find, and patterns without nested repetition), digits are ASCII digits, and a completion that gives several answers
has none unless the config says which one counts.

The other way round, a completion is written that gives an answer, where a regular expression finds it too.
"""

from __future__ import annotations

import re
import re._compiler as compiler  # pyright: ignore[reportMissingImports]
import re._constants as op  # pyright: ignore[reportMissingImports]
import re._parser as parser  # pyright: ignore[reportMissingImports]
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, ClassVar

from rlft.tokens.answers import boxed, closing_brace as closing_brace, hashed, tagged
from rlft.tokens.reasoning import without_reasoning
from rlft.types import Group, Prompt, Unscorable, Unscored, UserError, Verdict, require

MAX_NUMBER_CHARS = 100

SAMPLES = ("a", " ", "0", "A", "-", "é")  # for the parts of a pattern that allow many characters

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")


class AnswerIn(StrEnum):
    """Where a completion puts its answer."""

    tag = "tag"
    boxed = "boxed"
    hashes = "hashes"
    text = "text"
    pattern = "pattern"


class Which(StrEnum):
    """Which of several answers in one completion counts: none of them, or the last one."""

    only = "only"
    last = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerKeys:
    """The config keys of every reward that looks for an answer."""

    reads_answers: ClassVar[bool] = True  # whether its scores are Verdicts

    answer_in: AnswerIn
    tag: str
    pattern: str | None
    which: Which
    in_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.answer_in == AnswerIn.pattern:
            remedy = r"write a regular expression with one group, such as 'Answer: ([0-9]+)'"
            num_groups = check_regex(self.pattern, remedy)
            require(num_groups, "pattern", "has no group for the answer", got=self.pattern, remedy=remedy)

    def extract(self, text: str) -> str | None:
        """The answer, stripped, or None if the completion gives none (or several).

        Reasoning gives none, unless `in_reasoning`. The same answer given again is one answer. Tags, however, are a
        template, in which each stands once.
        """
        text = composed(text if self.in_reasoning else without_reasoning(text))
        tag = composed(self.tag)
        is_template = text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1
        if self.which == Which.only and self.answer_in == AnswerIn.tag and not is_template:
            return None
        answers = [answer.strip() for answer in self._answers(text)]
        if not answers or (self.which == Which.only and len(set(answers)) > 1):
            return None
        return answers[-1] or None

    def written(self, answer: str) -> str | None:
        """A completion that gives this answer where the reward looks for it; None if none can be made for a pattern."""
        if self.answer_in == AnswerIn.pattern:
            return written_for(self.pattern or "", answer)
        forms = {
            AnswerIn.tag: f"<{self.tag}>{answer}</{self.tag}>",
            AnswerIn.boxed: f"\\boxed{{{answer}}}",
            AnswerIn.hashes: f"#### {answer}",
        }
        return forms.get(self.answer_in, answer)

    def reference_text(self, prompt: Prompt) -> str | None:
        """A completion with the prompt's reference answer, which should get full marks; None if none is compared.

        Unscorable if the reference is of no use.
        """
        return self.written(prompt.answer)

    def __call__(self, group: Group) -> list[Any]:
        """1.0 for each completion that gives the reference answer, else 0.0; a reward may score otherwise."""
        scores = [None if right is None else Verdict(bool(right), answer) for right, answer in self._compared(group)]
        if None in scores:
            raise Unscored("took too much processor time to compare an answer,", tuple(scores))
        return scores

    def right(self, group: Group) -> list[bool]:
        """Whether each completion gives the reference answer. Unscorable if there is none."""
        return [bool(right) for right, _ in self._compared(group, forms=False)]

    def _compared(self, group: Group, *, forms: bool = True) -> list[tuple[bool | None, str | None]]:
        """`_judged` of each, whatever a subclass makes of it; one after the other, for a worker watches them."""
        references = reference_answers(group.prompt)
        return [self._judged(self.extract(each.completion.text), references, forms) for each in group.rollouts]

    def _judged(self, answer: str | None, references: Sequence[str], forms: bool) -> tuple[bool | None, str | None]:
        """(whether an answer is one of the references, its normal form), the latter None without answer or `forms`.

        The former is None if it is none of those that were compared in time, and one was not. A right answer has the
        form of its reference, and a wrong one has not, because `is_right` need not be transitive: in `math`, 50% is
        0.5 and 50, and 18 is 18 cm and 18 kg.
        """
        if answer is None:
            return False, None
        verdicts = []
        for reference in references:
            verdicts.append(self.is_right(answer, reference))
            if verdicts[-1]:
                return True, self.normal(reference) if forms else None
        is_right = None if None in verdicts else False
        if not forms:
            return is_right, None
        form = self.normal(answer)
        return is_right, answer if form in map(self.normal, references) else form

    def normal(self, answer: str) -> str:
        """The same text for answers that this reward takes for the same, as far as their texts show it."""
        return " ".join(answer.split())

    def is_right(self, answer: str, reference: str) -> bool | None:
        """Whether an answer is the reference by normal form; a reward may compare otherwise. None: it took too long."""
        return self.normal(answer) == self.normal(reference)

    def _answers(self, text: str) -> Iterator[str]:
        match self.answer_in:
            case AnswerIn.tag:
                return tagged(text, composed(self.tag))
            case AnswerIn.boxed:
                return boxed(text)
            case AnswerIn.hashes:
                return hashed(text)
            case AnswerIn.pattern:
                return (match[1] or "" for match in re.finditer(composed(self.pattern or ""), text))
            case _:
                return iter((text,))


def plain_number(text: str) -> Decimal | None:
    """The value of a plain decimal number, else None: ASCII digits, thousands separated properly or not at all.

    >>> plain_number("1,000") == plain_number("1000.0") == plain_number("+1000")
    True
    >>> [plain_number(text) for text in ("1,00", "1e3", "18 apples", "$18", "18.", "")]
    [None, None, None, None, None, None]
    """
    if len(text) > MAX_NUMBER_CHARS or not text.strip("+-.,") or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))


def reference_answers(prompt: Prompt) -> tuple[str, ...]:
    """All answers that are right, the reference answer first, stripped. Unscorable if there is none."""
    if not prompt.answer.strip():
        raise Unscorable(f"prompt {prompt.id!r} has no reference answer to compare with")
    return composed(prompt.answer.strip()), *map(composed, prompt.other_answers)


def composed(text: str) -> str:
    """The text in Unicode's composed form (NFC): the same letters may be stored in two ways that look alike.

    Tokenizers may change one into the other, so whatever is compared as text is composed first.
    """
    return unicodedata.normalize("NFC", text)


def check_regex(pattern: str | None, remedy: str) -> int:
    """The number of groups of a regular expression. UserError of the key `pattern` for what is none."""
    try:
        return re.compile(pattern or "").groups
    except re.error as error:
        raise UserError("pattern", f"is not a regular expression ({error})", got=pattern, remedy=remedy) from None


def written_for(pattern: str, answer: str) -> str | None:
    """The shortest text for the pattern, with the answer in place of its first group; None for one that finds nothing.

    The answer may still not be what the pattern finds: it may cut it, or not match it.
    """
    try:
        parts = parser.parse(pattern)
        found = re.search(pattern, "".join(_shortest(parts, None)))
        return None if found is None else "".join(_shortest(parts, answer))
    except (re.error, RecursionError):
        return None


def _shortest(parts: Iterable[tuple[Any, Any]], answer: str | None) -> Iterator[str]:
    """The shortest texts of these parts of a pattern; group 1 becomes the answer, or its own shortest text if None."""
    for kind, value in parts:
        if kind is op.LITERAL:
            yield chr(value)
        elif kind in (op.ANY, op.NOT_LITERAL, op.IN):
            yield _character(kind, value)
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            least, _, repeated = value
            yield "".join(_shortest(repeated, answer)) * max(least, int(_has_answer(repeated)))
        elif kind is op.SUBPATTERN:
            yield answer if value[0] == 1 and answer is not None else "".join(_shortest(value[3], answer))
        elif kind is op.ATOMIC_GROUP:
            yield from _shortest(value, answer)
        elif kind is op.BRANCH:
            yield from _shortest(next(filter(_has_answer, value[1]), value[1][0]), answer)
        elif kind is op.ASSERT and value[0] < 0:  # what has to stand before
            yield from _shortest(value[1], answer)
        elif kind not in (op.AT, op.ASSERT, op.ASSERT_NOT):
            raise re.error(f"no text is made for {kind}")


def _has_answer(parts: Iterable[tuple[Any, Any]]) -> bool:
    """Whether the first group is one of these parts."""
    return any(kind is op.SUBPATTERN and value[0] == 1 for kind, value in parts)


def _character(kind: Any, value: Any) -> str:
    """A character for a part that allows many: a dot, or a set such as [a-z] or [^0-9]."""
    members = value if kind is op.IN else ()
    named = [
        chr(each if which is op.LITERAL else each[0]) for which, each in members if which in (op.LITERAL, op.RANGE)
    ]
    part = compiler.compile(parser.SubPattern(parser.State(), [(kind, value)]), re.UNICODE)
    for character in filter(part.fullmatch, (*named, *SAMPLES)):
        return character
    raise re.error(f"none of the sample characters is in {value}")
