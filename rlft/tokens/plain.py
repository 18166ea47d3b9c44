"""Tokens of texts in which a special token that somebody spelled stays text.

A question, a system prompt, a demonstration or the answer of a tool may hold the characters `<|im_end|>`. Only the chat
template ends turns, so these characters must not become the token. They are cut after their first character before the
template is rendered, by a character that occurs nowhere else, and the parts of its text are tokenised one by one: no
tokenizer finds a special token in them. What the template itself writes stays whole. Texts that spell no special token
have the tokens that they always had.

In an assistant's turn a block that models say, such as `<think>` and `</think>` where they are special tokens, is made
of these tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlft.tokens.ends import special_pattern, special_tokens
from rlft.tokens.markers import markers_of
from rlft.tokens.text import said_special_ids
from rlft.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Conversation = Sequence[Mapping[str, Any]]
GAPS = range(0xE000, 0xF8FF)
"""Characters for private use, one of which cuts."""


class PlainText:
    """The special tokens of a tokenizer, and the tokens of texts that may spell them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
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
        plain = [[_well_formed(message) for message in conversation] for conversation in conversations]
        schemas = [_well_formed(tool) for tool in tools]
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
    parts, start = [], 0
    while match := pattern.search(text, start):
        parts.append(text[start : match.start() + 1])
        start = match.start() + 1
    return gap.join([*parts, text[start:]])


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


def _well_formed(value: Any) -> Any:
    """The value with `?` for lone surrogates, which no tokenizer accepts."""
    return _mapped(value, lambda text: text.encode("utf-8", "replace").decode())


def _unused(texts: Sequence[str]) -> str:
    """A character that is in none of the texts."""
    return next(c for c in map(chr, GAPS) if not any(c in text for text in texts))
