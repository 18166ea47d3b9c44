"""Tokens of texts in which a special token that somebody spelled stays text.

A question, a system prompt, a demonstration or the answer of a tool may hold the characters `<|im_end|>`. Only the chat
template ends turns, so these characters must not become the token. They are cut after their first character before the
template is rendered, by a character that occurs nowhere else, and the parts of its text are tokenised one by one: no
tokenizer finds a special token in them. What the template itself writes stays whole. Texts that spell no special token
have the tokens that they always had.

In an assistant's turn a block that models say, such as `<think>` and `</think>` where they are special tokens, is made
of these tokens.

A text from outside that has the markers which a chat template puts around turns is rendered already. Markers of the
model's own template are found by rendering. Templates of other families are known by their form: a token in bars before
the name of a role, a token that names a role, and Mistral's and Gemma's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from rlft.tokens.text import (
    FIRST,
    SECOND,
    SPOKEN,
    TAG,
    USER,
    Conversation,
    RunTokenizer,
    num_common,
    rendered_if_taken,
    said_special_ids,
    special_pattern,
    special_tokens,
    written_special_tokens,
)
from rlft.types import UserError, well_formed

GAPS = range(0xE000, 0xF8FF)  # characters for private use, one of which cuts
ROLES = r"(?:system|user|assistant|model|tool|developer|human|ipython|chatbot|bot)"
OTHERS = re.compile(
    rf"<[|｜][^<>|｜\s]+[|｜]>\s?{ROLES}\b|<[|｜](?:im_)?{ROLES}(?:_token)?[|｜]>|<start_of_turn>\s?{ROLES}\b"
    rf"|<\|turn>\s?{ROLES}\b|\[/?INST\]|<</?SYS>>|\[/?SYSTEM_PROMPT\]",
    re.IGNORECASE,
)
NONE = re.compile(r"(?!)")
LEAST = 6  # characters of a marker without a tag: fewer may stand in any text


class PlainText:
    """The special tokens of a tokenizer, and the tokens of texts that may spell them."""

    def __init__(self, tokenizer: RunTokenizer) -> None:
        self._tokenizer, self._special = tokenizer, special_tokens(tokenizer)
        said = said_special_ids(tokenizer)
        self._given = special_pattern(self._special)
        self._said = special_pattern([text for text, token in self._special.items() if token not in said])
        self._some_special = next(iter(self._special), "")
        self.markers = markers_of(tokenizer)

    def spelled(self, texts: Iterable[str]) -> str:
        """The first special token that is spelled in texts from outside; "" if there is none."""
        return next((match[0] for text in texts if (match := self._given.search(text))), "")

    def cut(
        self, conversations: Sequence[Conversation], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]], str]:
        """(the messages, the tools, the character that cuts the special tokens in them; "" if they spell none)."""
        plain = [[_mapped(message, well_formed) for message in conversation] for conversation in conversations]
        schemas = [_mapped(tool, well_formed) for tool in tools]
        spells = any(self._of(m).search(text) for c in plain for m in c for text in _texts(m))
        if not spells and not self.spelled(_texts(schemas)):
            return plain, schemas, ""
        gap = _unused([*_texts(plain), *_texts(schemas)])
        cut = [[_mapped(m, partial(_parted, pattern=self._of(m), gap=gap)) for m in c] for c in plain]
        return cut, _mapped(schemas, partial(_parted, pattern=self._given, gap=gap)), gap

    def cut_texts(self, texts: Sequence[str], *, said: bool) -> tuple[list[str], str]:
        """(the texts, the character that cuts the special tokens in them or ""); `said`: by an assistant.

        In a prompt that is a rendering of the model's own chat template, the tokens that it writes stay whole.
        """
        patterns = [self._said if said else self.of_prompt(text) for text in texts]
        pairs = list(zip(texts, patterns, strict=True))
        if not any(pattern.search(text) for text, pattern in pairs):
            return list(texts), ""
        gap = _unused(texts)
        return [_parted(text, pattern, gap) for text, pattern in pairs], gap

    def of_prompt(self, text: str) -> re.Pattern[str]:
        """Finds the special tokens that stay text in a prompt without a chat template."""
        if not self.markers.is_rendering(text):
            return self._given
        return special_pattern([name for name in self._special if not self.markers.written.fullmatch(name)])

    def ids(
        self, texts: Sequence[str], gap: str, begin: Callable[[list[str]], Sequence[Sequence[int]]] | None = None
    ) -> list[list[int]]:
        """The tokens of each text that is cut by `gap`.

        `begin` tokenises texts up to the first cut; without it they get no tokens that they do not spell.

        Raises UserError: the tokenizer makes a special token of what is cut.
        """
        firsts, others = [], []
        for text in texts:
            first, *rest = text.split(gap) if gap else [text]
            firsts.append(first)
            others.append(rest)
        rows = [list(row) for row in (begin or self._tokenised)(firsts)]
        for row, parts in zip(rows, others, strict=True):
            for part in parts:
                # Behind a special token no tokenizer takes a part for the beginning of a text.
                [first, *behind] = self._tokenised([self._some_special + part])[0]
                self._check(part, first, behind)
                row += behind
        return rows

    def ids_said(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts that an assistant says."""
        return self.ids(*self.cut_texts(texts, said=True))

    def _check(self, part: str, first: int, ids: Sequence[int]) -> None:
        written = {self._special[text] for text in self._given.findall(part)}  # by the template
        unknown: Any = self._tokenizer.unk_token_id
        made = {*self._special.values()} & {*ids} - {*written, unknown}
        if made or first != self._special[self._some_special]:
            problem = "its tokenizer makes a special token of a text that spells one, and cannot be told not to"
            remedy = "leave it out of the data, or use another model"
            raise UserError("model.path", problem, got=repr(part[:40]), remedy=remedy)

    def _tokenised(self, texts: list[str]) -> Sequence[Sequence[int]]:
        # Not verbose: what exceeds the model's context is refused, cut or dropped afterwards.
        ids: Any = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _of(self, message: Mapping[str, Any]) -> re.Pattern[str]:
        return self._said if message.get("role") == "assistant" else self._given


def _parted(text: str, pattern: re.Pattern[str], gap: str) -> str:
    """The text, cut after the first character of everything that the pattern finds."""
    return re.sub(f"(?=(?:{pattern.pattern}))(.)", rf"\1{gap}", text, flags=re.DOTALL)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value, such as a message or a schema, with each of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in chain(value, value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _unused(texts: Sequence[str]) -> str:
    """A character that is in none of the texts."""
    return next(c for c in map(chr, GAPS) if not any(c in text for text in texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Finds the markers of chat templates in texts."""

    question: str = ""  # what its own template writes before what the user says; "": it cannot be found out
    answer: str = ""  # likewise, before what the assistant says; both without the end of the turn before
    begins: tuple[str, ...] = ()  # what its renderings begin with, after the beginning of the text
    written: re.Pattern[str] = NONE  # finds the special tokens that it writes
    bos: str = ""  # the token of the beginning of the text; "" without one

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


@lru_cache(maxsize=8)
def markers_of(tokenizer: RunTokenizer) -> Markers:
    """The markers of the tokenizer's template, if it has one."""
    if not tokenizer.chat_template:
        return Markers()
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
