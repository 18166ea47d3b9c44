"""What a chat template writes of messages, the text of tokens, and where in a prompt the assistant's turn begins.

Every text that a template writes in a run comes from here, on the run's date. A template may write today's date
(`strftime_now`, as Llama 3.2's and gpt-oss's do). A run's prompts must not depend on the day on which they are
rendered, or a resume would have other prompts, so the date is the model's (`model.date`).

A text of tokens shows no special token that marks turns: the tokenizer's named ones (bos, eos, pad ..), and those that
the chat template puts around what is said. Every other special token is something that the model says, such as the
`<think>` and `[THINK]` of some models, and is shown; rewards, people and files read it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DATE = "rlft_date"
"""The attribute of a tokenizer that holds the date that its template writes; a tokenizer without it writes today's."""

AUTO_DATE = "auto"
"""The value of model.date for the day on which a run starts."""

Conversation = Sequence[Mapping[str, Any]]

TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}},
    },
}
CALL_ID = "000000000"
"""Nine letters or digits, as Mistral's templates require."""
CALL = {"type": "function", "id": CALL_ID, "function": {"name": "tool", "arguments": {"a": "b"}}}
USER, FIRST, SECOND = "mark0mark", "mark1mark", "mark2mark"
"""Texts that a template leaves as they are."""
SPOKEN: tuple[Conversation, ...] = (
    ({"role": "user", "content": USER}, {"role": "assistant", "content": FIRST}, {"role": "user", "content": SECOND}),
    ({"role": "system", "content": FIRST}, {"role": "user", "content": USER}),
)
WITH_TOOLS: Conversation = (
    {"role": "user", "content": USER},
    {"role": "assistant", "content": FIRST, "tool_calls": [CALL]},
    {"role": "tool", "name": "tool", "tool_call_id": CALL_ID, "content": SECOND},
    {"role": "user", "content": USER},
)
BLOCK = re.compile(r"<([\w:.-]+)>(?:(?!mark[0-2]mark).)*?</\1>|\[(\w+)\](?:(?!mark[0-2]mark).)*?\[/\2\]", re.DOTALL)
"""A block with none of what is said in it: thinking that is empty, or shown in a template's own system message."""
ENDS = "rlft_ends"
"""The attribute of a tokenizer that holds the ends of `with_ends`."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TAG = re.compile(r"<\|?(/?)([A-Za-z][\w:.-]*)\|?>|\[(/?)([A-Z][A-Z_]*)\]")
CLOSING_WORDS = ("end", "END")
OPENED = re.compile(r"(?:<(?:think\w*|thought\w*|reason\w*|answer)>|\[(?:THINK\w*|REASON\w*)\])\s*\Z")
"""A tag at the end of a text that opens what the model thinks or answers, not a role or a field of the prompt."""


def dated(tokenizer: PreTrainedTokenizerBase, date: str) -> PreTrainedTokenizerBase:
    """The tokenizer, whose template writes this date (2026-11-25); `auto`: today's."""
    setattr(tokenizer, DATE, today() if date == AUTO_DATE else date)
    return tokenizer


def date_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The date that the tokenizer's template writes."""
    return getattr(tokenizer, DATE, None) or today()


def today() -> str:
    """Today's date, such as 2026-11-25."""
    return _now().date().isoformat()


def _now() -> datetime.datetime:
    return datetime.datetime.now()


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    start: bool = False,
) -> list[str]:
    """The text of each conversation as the tokenizer's chat template writes it.

    `tools` are JSON schemas that the template shows; with `start` the text ends with the start of the assistant's turn.

    Raises:
        Exception: whatever the template raises, which is a program of somebody else's.
    """
    date = datetime.date.fromisoformat(date_of(tokenizer))
    plain = [[dict(message) for message in conversation] for conversation in conversations]
    schemas = [dict(tool) for tool in tools]

    def written(shown: list[dict[str, Any]] | None) -> list[str]:
        variables = {"strftime_now": lambda form: formatted(date, form)}
        texts = tokenizer.apply_chat_template(
            plain, tools=shown, add_generation_prompt=start, tokenize=False, **variables
        )
        return [str(text) for text in texts]

    if schemas:
        return written(schemas)
    from jinja2.exceptions import TemplateError

    try:
        return written(None)
    except TemplateError:
        raise
    except Exception:  # some templates go through the tools without asking whether there are any
        return written([])


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    start: bool = False,
) -> str:
    """The text of one conversation, see `rendered`."""
    return rendered(tokenizer, [conversation], tools=tools, start=start)[0]


def formatted(date: datetime.date, form: str) -> str:
    """The date in this format, with English names in every locale, and midnight as the time.

    >>> formatted(datetime.date(2026, 7, 5), "%d %b %Y, %A %H:%M")
    '05 Jul 2026, Sunday 00:00'
    """
    month, day = MONTHS[date.month - 1], DAYS[date.weekday()]
    names = {"%B": month, "%b": month[:3], "%h": month[:3], "%A": day, "%a": day[:3], "%p": "AM", "%x": "%m/%d/%y"}
    english = re.sub("%.", lambda directive: names.get(directive[0], directive[0]), form, flags=re.DOTALL)
    return datetime.datetime.combine(date, datetime.time()).strftime(english)


def decoded(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """The text of each row of token ids, without the special tokens that mark turns."""
    if not visible_special_ids(tokenizer):
        return tokenizer.batch_decode(rows, skip_special_tokens=True)
    hidden = hidden_special_tokens(tokenizer)
    return tokenizer.batch_decode([[t for t in row if t not in hidden] for row in rows], skip_special_tokens=False)


def decode(tokenizer: PreTrainedTokenizerBase, row: Sequence[int]) -> str:
    """The text of one row, see `decoded`."""
    return decoded(tokenizer, [list(row)])[0]


def visible_special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special tokens that a text shows."""
    return _special_tokens(tokenizer, _template(tokenizer), getattr(tokenizer, ENDS, ()))[0]


def hidden_special_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """{id: special token} of those that a text does not show."""
    return _special_tokens(tokenizer, _template(tokenizer), getattr(tokenizer, ENDS, ()))[1]


def with_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> PreTrainedTokenizerBase:
    """The tokenizer, whose texts do not show these tokens, which the model's generation config names as ends."""
    setattr(tokenizer, ENDS, tuple(ids))
    return tokenizer


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template as text, which may be a dict of several."""
    return str(getattr(tokenizer, "chat_template", None))


@lru_cache(maxsize=4)
def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, template: str, ends: tuple[int, ...]
) -> tuple[frozenset[int], Mapping[int, str]]:
    """(those that are said, those that mark turns) of a tokenizer with this template and these further ends."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: token.content for i, token in added.items() if token.special}
    named = {str(getattr(tokenizer, name, None)) for name in NAMED}
    written = "".join(_around(tokenizer, template))
    marks = {i: token for i, token in special.items() if i in ends or token in named or token in written}
    return frozenset(special) - frozenset(marks), marks


def _around(tokenizer: PreTrainedTokenizerBase, template: str) -> Iterator[str]:
    """What the template writes around what is said, as far as it takes such conversations."""
    if template == "None":
        return
    for conversation, tools in (*((spoken, ()) for spoken in SPOKEN), (WITH_TOOLS, (TOOL,))):
        try:
            yield BLOCK.sub("", render(tokenizer, conversation, tools=tools))
        except Exception:  # a template is a program of somebody else's: it may raise anything
            continue


def tail(tokenizer: PreTrainedTokenizerBase, prompt: str, *, by_template: bool) -> str:
    """The end of a prompt that belongs to the assistant's turn: what has begun there with a tag that is left open.

    Templates of reasoning models open `<think>` for the policy, which then never says it; so may a prompt that is no
    chat. Rewards read it together with the completion. "" where nothing is left open.
    """
    if by_template:
        opened = _opening_of_turn(tokenizer, _template(tokenizer))
        if opened is not None:
            return opened if opened and prompt.endswith(opened) else ""
    match = OPENED.search(prompt)
    if match is None or match[0].strip() in hidden_special_tokens(tokenizer).values():
        return ""
    return match[0]


@lru_cache(maxsize=4)
def _opening_of_turn(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """What the template has begun to say for the assistant: where a prompt goes beyond the header of earlier turns.

    None if the header cannot be found out.
    """
    try:
        spoken, prompt = render(tokenizer, SPOKEN[0]), render(tokenizer, SPOKEN[0][:1], start=True)
    except Exception:  # as above
        return None
    header = spoken[: spoken.find(FIRST)]
    if FIRST not in spoken or not prompt.startswith(header):
        return None
    opened = prompt[len(header) :]
    tags = list(TAG.finditer(opened))
    is_open = tags and not (tags[-1][1] or tags[-1][3] or (tags[-1][2] or tags[-1][4]).startswith(CLOSING_WORDS))
    return opened if is_open else ""


def last_tag(text: str) -> str:
    """The last tag in a text, such as `<think>`; "" if it has none."""
    return next((match[0] for match in reversed(list(TAG.finditer(text)))), "")


def without_tail(text: str, tail: str) -> str:
    r"""What is left to say of a turn of which the prompt has begun this much.

    >>> without_tail("<think>\nyes</think>", "<think>\n"), without_tail("<think>yes</think>", "<think>\n")
    ('yes</think>', 'yes</think>')
    >>> without_tail("yes", "<think>\n")
    'yes'
    """
    if tail and text.startswith(tail):
        return text[len(tail) :]
    bare = text.lstrip()
    return bare[len(tail.strip()) :].lstrip() if tail.strip() and bare.startswith(tail.strip()) else text
