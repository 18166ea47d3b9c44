"""What ends a turn of an assistant: the one notion that data, engines, conversations and exports share.

In chat style it is what the chat template puts after an assistant's text, found by rendering: of the special tokens
there those that neither the end of the whole conversation nor the next turn brings. Command-R has two of them: both
are learned, and the last one ends the turn. What the generation config and the tokenizer name as ends ends a completion
as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from rlft.tokens.text import CALL_ID, TOOL, RunTokenizer, rendered_if_taken

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""The chat template's text of messages, without the start of a next turn; None if it does not take them."""

NO_TEMPLATE_NOTE = "The tokenizer has no chat template: prompts are the plain texts of their messages."
QUESTION = {"role": "user", "content": "question"}
SAID, REPLY, THOUGHT = "saidsaid", "replyreply", "thoughtthought"
"""Texts that a template leaves as they are, and that occur in none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """What ends an assistant's turn with one tokenizer."""

    ids: tuple[int, ...]  # at which a completion ends, the one that is learned first; empty if there are none
    lead: str = ""  # plain text between an assistant's text and `closing`, which is learned
    closing: tuple[int, ...] = ()  # the tokens that are learned after it; the last one is `ids[0]`
    last: str = ""  # the text that the chat template puts after the last turn of a conversation
    names: Mapping[int, str]  # {token id: its text} of `ids`
    notes: tuple[str, ...] = ()  # what the person watching should know

    @property
    def row(self) -> tuple[str, str, str]:
        """The row of the start-up table (name, value, explanation)."""
        if not self.ids:
            return "end-of-turn token", "none", "neither template nor tokenizer has an end token: only limits end it"
        first, *others = (self.names[token] for token in self.ids)
        also = f"; {', '.join(others)} would end it too" if others else ""
        return "end-of-turn token", first, f"learned and sampled, token {self.ids[0]}{also}"


def turn_ends(tokenizer: RunTokenizer, style: str, eos_token_id: Any = None) -> TurnEnds:
    """What ends an assistant's turn.

    style: `chat`: the chat template's turns; `raw`, or a tokenizer without a template: the tokenizer's end token.
    eos_token_id: what the model's generation config names as ends: a token id, a list of them, or None.
    """
    eos_id = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else None
    own, configured = [] if eos_id is None else [eos_id], configured_ids(eos_token_id)
    ends, closing, lead, last, note = [*own, *configured], own, "", "", ""
    if style == "chat" and not tokenizer.chat_template:
        note = NO_TEMPLATE_NOTE
    elif style == "chat":
        eos = str(tokenizer.eos_token) if own else ""
        pattern = special_pattern(special_tokens(tokenizer))
        render = partial(rendered_if_taken, tokenizer)
        turn, answer = {"role": "assistant", "content": SAID}, {"role": "user", "content": REPLY}
        lead, run, last = closing_of(render, [QUESTION], turn, answer, SAID, REPLY, pattern, eos)
        called = _end_of_calls(tokenizer, pattern, eos)
        ends = [*own, *called, *configured]
        name = pattern.findall(run)[-1] if run else ""
        ids = list(tokenizer(run, add_special_tokens=False)["input_ids"]) if run else []
        if not run:
            how = f"with no special token: the tokenizer's {eos} ends it, learned and sampled"
            note = f"the chat template ends a turn {how}" if own else ""
        elif name in _inside(render, pattern):
            closing = [*ids, *own]
            how = f"{eos} after it ends one, learned and sampled" if own else "only a limit ends one"
            note = f"the chat template ends a turn with {name}, which is also inside its turns: {how}"
        else:
            ends, closing = [ids[-1], *called, *own, *configured], ids
            its = f"the tokenizer's end token is {eos}" if own else "the tokenizer names no end token"
            such = f"the end-of-turn token is {tokenizer.convert_ids_to_tokens(ids[-1])}, as the chat template has it"
            note = f"{such}, while {its}: sampling and exports end at both" if ids[-1] != eos_id else ""
    distinct = tuple(dict.fromkeys(map(int, ends)))
    return TurnEnds(
        ids=distinct,
        lead=lead,
        closing=tuple(closing) or distinct[:1],
        last=last,
        names={token: str(tokenizer.convert_ids_to_tokens(token)) for token in distinct},
        notes=(note,) if note else (),
    )


def configured_ids(eos_token_id: Any) -> list[int]:
    """The token ids of a config's `eos_token_id`, which is one, a list of them, or None."""
    given = eos_token_id if isinstance(eos_token_id, list | tuple) else [eos_token_id]
    return [token for token in given if isinstance(token, int)]


def special_tokens(tokenizer: RunTokenizer) -> dict[str, int]:
    """{text: id} of the special tokens, those without a name too, such as Llama 3's `<|eot_id|>`."""
    special = {str(t.content): i for i, t in tokenizer.added_tokens_decoder.items() if t.special and len(t.content) > 1}
    if isinstance(tokenizer.eos_token_id, int):
        special.setdefault(str(tokenizer.eos_token), tokenizer.eos_token_id)
    return special


def special_pattern(special: Collection[str]) -> re.Pattern[str]:
    """Finds these texts, the longest first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")


def closing_of(
    render: Render,
    opening: Sequence[Message],  # messages before the turn
    turn: Message,  # the assistant's message, whose last text is `said`, which the template leaves as it is
    answer: Message,  # the message after it, whose text is `reply`, another such text
    said: str,
    reply: str,
    special: re.Pattern[str],  # finds special tokens
    eos: str,  # the tokenizer's end token; "" if it has none
) -> tuple[str, str, str]:
    """What the template puts after an assistant's turn and before whatever follows it.

    (lead: plain text, such as the line break before `<|end|>` in some templates; run: the special tokens up to the last
    end token, with what is between them, "" if there are none; last: all that follows the last turn of a conversation).
    """
    last = _tail(render, [*opening, turn], said)
    onward = _tail(render, [*opening, turn, answer], said)
    onward = None if onward is None or reply not in onward else onward[: onward.index(reply)]
    ended = list(special.finditer(last or ""))
    going_on = list(special.finditer(onward or ""))
    openers = set(_leading(render, opening, special)) - {eos}
    text, tokens = last or "", ended
    if ended and going_on:
        # Phi-3's template ends the conversation with one more token. Where nothing is common, as in gpt-oss, the turn
        # is rewritten when somebody answers.
        same = [a for a, _ in takewhile(lambda pair: pair[0][0] == pair[1][0], zip(ended, going_on, strict=False))]
        tokens = same or ended
    elif going_on:  # the template leaves the last turn open
        text, tokens = onward or "", going_on
        openers.add(going_on[-1][0])
    tokens = list(takewhile(lambda token: token[0] not in openers, tokens))
    if not tokens:
        return "", "", last or ""
    start, end = tokens[0].start(), tokens[-1].end()
    return text[:start], text[start:end], last or ""


def num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The number of characters, or tokens, with which both begin.

    >>> num_common("abc", "abd"), num_common("a", "abc")
    (2, 1)
    """
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next((n for n, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), shorter)


def _tail(render: Render, messages: Sequence[Message], said: str) -> str | None:
    """The text after what was said; None if the template does not write it."""
    _, found, after = (render(messages) or "").rpartition(said)
    return after if found else None


def _leading(render: Render, opening: Sequence[Message], special: re.Pattern[str]) -> Iterator[str]:
    """The special tokens that a conversation begins with: the beginning of the text, and of a turn."""
    text = render(opening) or ""
    position = 0
    while match := special.match(text, position):
        yield match[0]
        position = match.end() + len(text[match.end() :]) - len(text[match.end() :].lstrip())


def _inside(render: Render, special: re.Pattern[str]) -> set[str]:
    """The special tokens that the template puts between an assistant's thoughts and its answer."""
    thinking = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}
    text = render([QUESTION, thinking]) or ""
    between = text.partition(THOUGHT)[2].rpartition(SAID)[0]
    return set(special.findall(between))


def _end_of_calls(tokenizer: RunTokenizer, special: re.Pattern[str], eos: str) -> list[int]:
    """The token that ends a turn with a call of a tool; none if the template shows no tools."""
    render = partial(rendered_if_taken, tokenizer, tools=[TOOL])
    call = {"type": "function", "id": CALL_ID, "function": {"name": "tool", "arguments": {"argument": SAID}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "name": "tool", "tool_call_id": CALL_ID, "content": REPLY}
    before, found, _ = (render([QUESTION, turn]) or "").rpartition(SAID)
    if not found:
        return []
    _, run, _ = closing_of(render, [QUESTION], turn, answer, SAID, REPLY, special, eos)
    own = before[num_common(before, render([QUESTION]) or "") :]
    if run and (end := special.findall(run)[-1]) not in special.findall(own):
        return [special_tokens(tokenizer)[end]]
    return []
