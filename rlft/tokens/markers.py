"""Markers that a chat template puts around turns, found in texts from outside: such a text is rendered already.

Those of the model's own template are found by rendering. Templates of other families are known by their form: a token
in bars before the name of a role, a token that names a role, and Mistral's and Gemma's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from rlft.tokens.ends import num_common, special_pattern, special_tokens
from rlft.tokens.text import FIRST, SECOND, SPOKEN, TAG, USER, rendered_if_taken, template_of, written_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = r"(?:system|user|assistant|model|tool|developer|human|ipython|chatbot|bot)"
OTHERS = re.compile(
    rf"<[|｜][^<>|｜\s]+[|｜]>\s?{ROLES}\b|<[|｜](?:im_)?{ROLES}(?:_token)?[|｜]>|<start_of_turn>\s?{ROLES}\b"
    rf"|<\|turn>\s?{ROLES}\b|\[/?INST\]|<</?SYS>>|\[/?SYSTEM_PROMPT\]",
    re.IGNORECASE,
)
NONE = re.compile(r"(?!)")
LEAST = 6
"""Characters of a marker without a tag: fewer may stand in any text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Finds the markers of chat templates in texts.

    Attributes:
        question, answer: what the tokenizer's own template writes before what the user and the assistant say, without
            the end of the turn before; "" if that cannot be found out.
        begins: what its renderings begin with, after the beginning of the text.
        written: finds the special tokens that it writes.
        bos: the token of the beginning of the text; "" without one.
    """

    question: str = ""
    answer: str = ""
    begins: tuple[str, ...] = ()
    written: re.Pattern[str] = NONE
    bos: str = ""

    def in_text(self, text: str) -> str:
        """The first marker of the own template in a text, or else of another one; "" if there is none."""
        own = (marker for marker in (self.question, self.answer) if marker and marker in text)
        if first := next(own, ""):
            return first
        match = OTHERS.search(text)
        return match[0] if match else ""

    def is_rendering(self, text: str) -> bool:
        """Whether a text is a conversation as the own template writes it, up to the start of the assistant's turn."""
        _, found, turn = text.rpartition(self.answer) if self.answer else ("", "", "")
        begins = text.lstrip().removeprefix(self.bos).lstrip().startswith(self.begins)
        return begins and bool(found) and not self.written.search(turn)


def markers_of(tokenizer: PreTrainedTokenizerBase) -> Markers:
    """The markers of the tokenizer's template, if it has one."""
    return _markers(tokenizer, template_of(tokenizer)) if tokenizer.chat_template else Markers()


@lru_cache(maxsize=8)
def _markers(tokenizer: PreTrainedTokenizerBase, template: str) -> Markers:
    spoken, prompt = rendered_if_taken(tokenizer, SPOKEN[0]), rendered_if_taken(tokenizer, SPOKEN[0][:1], start=True)
    if spoken is None or prompt is None or not spoken.find(USER) < spoken.find(FIRST) < spoken.find(SECOND):
        return Markers()
    special = special_tokens(tokenizer)
    tags = re.compile(f"({special_pattern(special).pattern}|{TAG.pattern})")
    answer, question = spoken.partition(USER)[2].partition(FIRST)[0], spoken.partition(FIRST)[2].partition(SECOND)[0]
    begun = prompt.partition(USER)[2]
    answer = answer[: num_common(answer, begun)] or answer
    of_answer, of_question = list(_pieces(tags, answer)), list(_pieces(tags, question))
    pairs = enumerate(zip(of_answer, of_question, strict=False))
    ended = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(of_answer), len(of_question)))
    bos = str(tokenizer.bos_token or "")
    opened = [spoken, rendered_if_taken(tokenizer, SPOKEN[1]) or ""]
    begins = (next((piece for piece in _pieces(tags, text.removeprefix(bos)) if piece.strip()), "") for text in opened)
    written = written_special_tokens(tokenizer)
    return Markers(
        question=_marker(tags, of_question, ended),
        answer=_marker(tags, of_answer, ended),
        begins=tuple(begin for begin in begins if tags.fullmatch(begin)),
        written=special_pattern([name for name, token in special.items() if token in written]),
        bos=bos,
    )


def _marker(tags: re.Pattern[str], pieces: Sequence[str], ended: int) -> str:
    """The pieces behind the end of the turn before, with the tag that a role follows; "" if any text may hold that."""
    while 0 < ended < len(pieces) and not tags.fullmatch(pieces[ended]):
        ended -= 1
    marker = "".join(pieces[ended:]).strip()
    return marker if any(map(str.isalpha, marker)) and (tags.search(marker) or len(marker) >= LEAST) else ""


def _pieces(tags: re.Pattern[str], text: str) -> Iterator[str]:
    """The tags in a text, and what stands between them."""
    start = 0
    for match in tags.finditer(text):
        yield from filter(None, (text[start : match.start()], match[0]))
        start = match.end()
    if text[start:]:
        yield text[start:]


@dataclass(slots=True)
class Tally:
    """A count of texts in which something was found, and the first that was."""

    number: int = 0
    first: str = ""

    def add(self, found: str) -> None:
        """Counts a text, unless nothing was found in it ("")."""
        self.number += bool(found)
        self.first = self.first or found
