"""Stop strings and stop tokens: with which token a completion ends, and what its text is.

A stop string is searched in the completion's own text as it grows, as vLLM does: it may begin inside one token and
end inside another, and the bytes of one character may come in several tokens. The completion ends with the token that
completes the string, and keeps all of its tokens. Its text ends before the string, unless
`include_stop_str_in_output` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlft.config.schema import GenerationConfig
from rlft.tokens.text import decode, decoded, hidden_special_tokens, turn_ends, visible_special_ids
from rlft.types import Sampling, UserError

Decode = Callable[[Sequence[int]], str]  # the text of token ids, as `rlft.tokens.text` decodes them
MISSING_BYTES = "\ufffd"  # what a decoder writes for bytes that are no character (yet)

PROMPT_TAIL = 8
"""Tokens of the prompt that are decoded before a completion's first one: some tokenizers drop a text's first space."""


class GrowingText:
    """The text of one completion, token by token.

    A token that ends inside a character is held back as a whole until the character is complete: vLLM does so, and both
    engines have to stop at the same token.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-PROMPT_TAIL:])
        self._num_read, self._read = len(self._ids), decode(self._ids)

    def add(self, token: int) -> str:
        """The characters that this token completes.

        It is decoded together with a few tokens before it, whose text is removed: alone it may be decoded differently.
        """
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(MISSING_BYTES) or len(text) <= len(self._read):
            return ""
        new = text[len(self._read) :]
        self._ids = self._ids[self._num_read :]
        self._num_read, self._read = len(self._ids), self._decode(self._ids)
        return new


class ShownText:
    """The text of one completion as people see it, in pieces: no stop string, and nothing that could begin one."""

    def __init__(self, decode: Decode, sampling: Sampling, ends: Collection[int] = ()) -> None:
        self._hidden = {*ends, *sampling.stop_token_ids}
        self._text, self._sampling, self._all, self._num_shown = GrowingText(decode, ()), sampling, "", 0
        self._num_held = 0 if sampling.include_stop_str_in_output else max(map(len, sampling.stop), default=1) - 1

    def add(self, token: int) -> str:
        """The characters that this token makes certain to be shown; "" if there are none."""
        if token in self._hidden:
            return ""
        self._all += self._text.add(token)
        text = cut(self._all, self._sampling)
        shown = text if len(text) < len(self._all) else text[: len(text) - min(len(text), self._num_held)]
        new = shown[self._num_shown :]
        self._num_shown += len(new)
        return new


class StopStrings:
    """Watches the completions of a batch for stop strings; `stopped` holds the rows whose text contains one.

    `rows` has the token ids of each completion's prompt.
    """

    def __init__(self, strings: Sequence[str], decode: Decode, rows: Sequence[Sequence[int]]) -> None:
        self.strings = tuple(strings)
        self.stopped: set[int] = set()
        self._texts = [GrowingText(decode, prompt) for prompt in rows]
        self._tails = [""] * len(self._texts)
        self._num_kept = max(map(len, self.strings)) - 1  # characters that may begin a stop string

    def completes(self, row: int, token: int) -> bool:
        """Adds the row's next token; returns whether its text now contains a stop string, which ends the row."""
        new = self._texts[row].add(token)
        if not new:
            return False
        text = self._tails[row] + new
        self._tails[row] = text[len(text) - min(len(text), self._num_kept) :]
        if any(string in text for string in self.strings):
            self.stopped.add(row)
        return row in self.stopped


def plain_decoder(tokenizer: Any) -> Decode:
    """How single tokens are decoded: by the tokenizers library itself where it can, ten times faster."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and visible_special_ids(tokenizer):
        hidden = hidden_special_tokens(tokenizer)
        return lambda ids: backend.decode([t for t in ids if t not in hidden], skip_special_tokens=False)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=True)
    if visible_special_ids(tokenizer):
        return lambda ids: decode(tokenizer, ids)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def shown_texts(
    tokenizer: Any,
    rows: Sequence[Sequence[int]],  # token ids of each completion
    stopped: Sequence[bool],  # whether each completion ended otherwise than by the length limit
    sampling: Sampling,  # its stop strings and stop tokens are cut off
    # The tokens that end a turn, which are never shown, even if the tokenizer does not call them special.
    ends: Collection[int] = (),
) -> list[str]:
    """The text of each completion as rewards and people see it."""
    hidden = {*ends} if sampling.include_stop_str_in_output else {*ends, *sampling.stop_token_ids}
    shown = [row[:-1] if row and row[-1] in hidden else row for row in rows]
    texts = decoded(tokenizer, shown)
    return [cut(text, sampling) if ended else text for text, ended in zip(texts, stopped, strict=True)]


def cut(text: str, sampling: Sampling) -> str:
    """The text up to its first stop string, which is kept only with include_stop_str_in_output.

    >>> cut("a;b.", Sampling(max_tokens=9, temperature=1.0, stop=(".", ";")))
    'a'
    """
    places = [(text.find(string), string) for string in sampling.stop]
    ends = [(start + len(string), start) for start, string in places if start >= 0]
    if not ends:
        return text
    end, start = min(ends)
    return text[:end] if sampling.include_stop_str_in_output else text[:start]


def check_stops(
    generation: GenerationConfig, tokenizer: Any, vocabulary: int, ends: Collection[int] | None = None
) -> None:
    """Checks that every stop can happen with this tokenizer.

    vocabulary: number of tokens that the model can produce.
    ends: the tokens that end a turn; None: those that the tokenizer names.

    Raises UserError: a token id that the model never produces, or a string that no completion contains.
    """
    sampling, ends = generation.sampling, turn_ends(tokenizer, "raw").ids if ends is None else ends
    for token in sampling.stop_token_ids:
        if token >= vocabulary:
            problem = f"is not a token id of the model, which has {vocabulary:,}"
            raise UserError("generation.stop", problem, got=token, remedy=f"use 0 to {vocabulary - 1}, or a string")
    special = {str(added): token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for string in sampling.stop:
        for token in (token for token in special if token in string):
            why = (
                "engines do not look for in texts"
                if special[token] in visible_special_ids(tokenizer)
                else "the text of a completion never shows"
            )
            problem = f"holds the special token {token}, which {why}"
            remedy = f"use its token id, generation.stop=[{special[token]}]"
            if special[token] in ends:
                remedy = "leave it out, since every completion ends at it anyway"
            raise UserError("generation.stop", problem, got=string, remedy=remedy)
