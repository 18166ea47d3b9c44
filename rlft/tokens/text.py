"""What a chat template writes of messages, the text of tokens, and where an assistant's turn begins and ends.

Every text that a template writes in a run comes from here: of a `RunTokenizer`, which has what the run has decided of
it. A template may write today's date (`strftime_now`, as Llama 3.2's and gpt-oss's do). A run's prompts must not depend
on the day on which they are rendered, or a resume would have other prompts, so the date is the model's (`model.date`).

A text of tokens shows no special token that marks turns: the tokenizer's named ones (bos, eos, pad ..), and those that
the chat template puts around what is said. Every other special token is something that the model says, such as the
`<think>` and `[THINK]` of some models, and is shown; rewards, people and files read it.

What ends a turn is one notion that data, engines, conversations and exports share. In chat style it is what the chat
template puts after an assistant's text, found by rendering: of the special tokens there those that neither the end of
the whole conversation nor the next turn brings. Command-R has two of them: both are learned, and the last one ends the
turn. What the generation config and the tokenizer name as ends ends a completion as well.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rlft.types import UserError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
AUTO_DATE = "auto"  # the value of model.date for the day on which a run starts

Conversation = Sequence[Mapping[str, Any]]

TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}},
    },
}
CALL_ID = "000000000"  # nine letters or digits, as Mistral's templates require
THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that templates have for an assistant's thoughts."""
CALL = {"type": "function", "id": CALL_ID, "function": {"name": "tool", "arguments": {"a": "b"}}}
USER, FIRST, SECOND = "mark0mark", "mark1mark", "mark2mark"  # texts that a template leaves as they are
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
SHOWN = r"(?:(?!mark[0-2]mark|A tool\.).)*?"
BLOCK = re.compile(rf"<([\w:.-]+)>{SHOWN}</\1>|\[(\w+)\]{SHOWN}\[/\2\]", re.DOTALL)
"""A block with none of what is said in it, nor tools: thinking that is empty, or explained in a system message."""
XML_TOOLS = "xml_tools"  # the name that SmolLM3's template has for the tools
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception")
"""Variables and functions of every rendering."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TAG = re.compile(r"<\|?(/?)([A-Za-z][\w:.-]*)\|?>|\[(/?)([A-Z][A-Z_]*)\]")
CLOSING_WORDS = ("end", "END")
OPENED = re.compile(r"(?:<(?:think\w*|thought\w*|reason\w*|answer)>|\[(?:THINK\w*|REASON\w*)\])\s*\Z")
"""A tag at the end of a text that opens what the model thinks or answers, not a role or a field of the prompt."""


def today() -> str:
    """Today's date, such as 2026-11-25."""
    return _now().date().isoformat()


def _now() -> datetime.datetime:
    return datetime.datetime.now()


@dataclass(frozen=True, slots=True, eq=False)
class RunTokenizer:
    """A tokenizer of transformers, with what a run has decided of its texts.

    It is called and asked as that one is: attributes that are not listed here are those of `own`.
    """

    own: PreTrainedTokenizerBase  # transformers' tokenizer, for what takes no other
    date: str = field(default_factory=today)  # the date that its chat template writes, as 2026-11-25
    variables: Mapping[str, Any] = field(default_factory=dict)  # of its template, such as {"enable_thinking": False}
    ends: tuple[int, ...] = ()  # tokens that the model's generation config names as ends, which texts do not show
    processor: Callable[[], Any] | None = None  # gives the model's processor of images; None: it is not known

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.own(*texts, **options)

    def __len__(self) -> int:
        return len(self.own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def with_variables(
        self, variables: Mapping[str, Any], section: str = "prompts.template_variables."
    ) -> RunTokenizer:
        """The tokenizer whose template has these variables as well (`prompts.template_variables`).

        Raises UserError: the template does not read one of them, or it is one that every rendering has; its key begins
        with `section`.
        """
        read = _read_by(self) - {XML_TOOLS} if variables else frozenset[str]()
        for name, value in variables.items():
            key, got = f"{section}{name}", repr(value)
            if name in OWN_VARIABLES:
                raise UserError(key, "is given by rlft in every rendering", got=got, remedy="leave it out")
            problem = "the model's chat template does not read it" if read else "the model's chat template reads none"
            remedy = f"use one that it reads: {', '.join(sorted(read))}" if read else "leave it out"
            require(name in read, key, problem, got=got, remedy=remedy)
        return replace(self, variables={**self.variables, **variables}) if variables else self


@lru_cache(maxsize=8)
def _read_by(tokenizer: RunTokenizer) -> frozenset[str]:
    """The variables that the chat template reads, besides those that every rendering has."""
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    own: Any = tokenizer.chat_template or ""
    environment, read = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]), set[str]()
    for source in own.values() if isinstance(own, dict) else [own]:
        with contextlib.suppress(TemplateError):  # the first rendering says what is wrong
            tree = environment.parse(re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source))
            read |= meta.find_undeclared_variables(tree)
    return frozenset(read.difference(tokenizer.special_tokens_map, OWN_VARIABLES))


def rendered(
    tokenizer: RunTokenizer,
    conversations: Sequence[Conversation],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    start: bool = False,
) -> list[str]:
    """The text of each conversation as the tokenizer's chat template writes it.

    `tools` are JSON schemas that the template shows; with `start` the text ends with the start of the assistant's turn.

    Raises Exception: whatever the template raises, which is a program of somebody else's.
    """
    plain = [[_as_templates_take_it(tokenizer, message) for message in each] for each in conversations]
    schemas = [dict(tool) for tool in tools]
    if schemas:
        return _applied(tokenizer, plain, schemas, start=start)
    from jinja2.exceptions import TemplateError

    try:
        return _applied(tokenizer, plain, None, start=start)
    except TemplateError:
        raise
    except Exception:  # some templates go through the tools without asking whether there are any
        return _applied(tokenizer, plain, [], start=start)


def _applied(
    tokenizer: RunTokenizer, conversations: Sequence[list[dict[str, Any]]], tools: list[Any] | None, *, start: bool
) -> list[str]:
    date = datetime.date.fromisoformat(tokenizer.date)
    variables = {**tokenizer.variables, "strftime_now": partial(formatted, date)}
    if tools and XML_TOOLS in _read_by(tokenizer):
        variables[XML_TOOLS] = tools
    texts = tokenizer.apply_chat_template(
        list(conversations), tools=tools, add_generation_prompt=start, tokenize=False, **variables
    )
    return [str(text) for text in texts]


def render(
    tokenizer: RunTokenizer, conversation: Conversation, *, tools: Sequence[Mapping[str, Any]] = (), start: bool = False
) -> str:
    """The text of one conversation, see `rendered`."""
    return rendered(tokenizer, [conversation], tools=tools, start=start)[0]


def rendered_if_taken(
    tokenizer: RunTokenizer, conversation: Conversation, *, tools: Conversation = (), start: bool = False
) -> str | None:
    """As `render`; None if the template does not take the conversation, whatever it raises then."""
    try:
        return render(tokenizer, conversation, tools=tools, start=start)
    except Exception:  # a template is a program of somebody else's: it may raise anything
        return None


def _as_templates_take_it(tokenizer: RunTokenizer, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thoughts under each name, and with the arguments of its calls in the template's form."""
    thoughts = next((message[name] for name in THINKING_FIELDS if message.get(name)), None)
    made = {**message, **(dict.fromkeys(THINKING_FIELDS, thoughts) if thoughts else {})}
    if message.get("tool_calls"):
        as_text = _arguments_as_text(tokenizer)
        made["tool_calls"] = [_with_arguments(call, as_text=as_text) for call in message["tool_calls"]]
    return made


def _with_arguments(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON stays text
            read = json.loads(arguments)
            arguments = read if isinstance(read, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


@lru_cache(maxsize=8)
def _arguments_as_text(tokenizer: RunTokenizer) -> bool:
    """Whether the template takes the arguments of a call as JSON text: it fails or writes Python for an object."""
    shown = {}
    for as_text in (False, True):
        call = _with_arguments({**CALL, "function": {"name": "tool", "arguments": {"a": FIRST}}}, as_text=as_text)
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        for conversation in ([WITH_TOOLS[0], turn], [WITH_TOOLS[0], turn, *WITH_TOOLS[2:]]):
            with contextlib.suppress(Exception):  # a template is a program of somebody else's: it may raise anything
                shown[as_text] = _applied(tokenizer, [conversation], [TOOL], start=False)[0]
                break
    as_object = shown.get(False, "")
    return FIRST in shown.get(True, "") and (FIRST not in as_object or "{'a'" in as_object)


def formatted(date: datetime.date, form: str) -> str:
    """The date in this format, with English names in every locale, and midnight as the time."""
    month, day = MONTHS[date.month - 1], DAYS[date.weekday()]
    names = {"%B": month, "%b": month[:3], "%h": month[:3], "%A": day, "%a": day[:3], "%p": "AM", "%x": "%m/%d/%y"}
    english = re.sub("%.", lambda directive: names.get(directive[0], directive[0]), form, flags=re.DOTALL)
    return datetime.datetime.combine(date, datetime.time()).strftime(english)


def decoded(tokenizer: RunTokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """The text of each row of token ids, without the special tokens that mark turns."""
    if not visible_special_ids(tokenizer):
        return tokenizer.batch_decode([list(row) for row in rows], skip_special_tokens=True)
    hidden = hidden_special_tokens(tokenizer)
    return tokenizer.batch_decode([[t for t in row if t not in hidden] for row in rows], skip_special_tokens=False)


def decode(tokenizer: RunTokenizer, row: Sequence[int]) -> str:
    return decoded(tokenizer, [list(row)])[0]


def visible_special_ids(tokenizer: RunTokenizer) -> frozenset[int]:
    """The special tokens that a text shows."""
    return _special_tokens(tokenizer)[0]


def written_special_tokens(tokenizer: RunTokenizer) -> set[int]:
    """The special tokens that the template writes around what is said, and those of the beginning and the end."""
    written = "".join(_around(tokenizer))
    ends = {str(tokenizer.bos_token), str(tokenizer.eos_token)}
    return {i for i, name in hidden_special_tokens(tokenizer).items() if name in written or name in ends}


def said_special_ids(tokenizer: RunTokenizer) -> frozenset[int]:
    """The special tokens that are tokens in an assistant's text: blocks that it says, such as `<think>`, `</think>`."""
    visible = visible_special_ids(tokenizer)
    texts = {str(tokenizer.convert_ids_to_tokens(token)): token for token in visible}
    closers = {text: _closers(text) & texts.keys() for text in texts}
    return frozenset(texts[each] for text, ends in closers.items() if ends for each in (text, *ends))


def _closers(text: str) -> set[str]:
    """What may close a block that this special token opens.

    >>> sorted(_closers("<think>")), "<|END_THINKING|>" in _closers("<|START_THINKING|>")
    (['</think>'], True)
    """
    pairs = (("<", "</"), ("[", "[/"), ("<|", "<|/"), ("begin", "end"), ("start", "end"), ("START", "END"))
    return {text.replace(opens, closes, 1) for opens, closes in pairs if opens in text and not text.startswith("</")}


def hidden_special_tokens(tokenizer: RunTokenizer) -> Mapping[int, str]:
    """{id: special token} of those that a text does not show."""
    return _special_tokens(tokenizer)[1]


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: RunTokenizer) -> tuple[frozenset[int], Mapping[int, str]]:
    """(those that are said, those that mark turns)."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: token.content for i, token in added.items() if token.special}
    named = {str(getattr(tokenizer, name, None)) for name in NAMED}
    written = "".join(_around(tokenizer))
    marks = {i: token for i, token in special.items() if i in tokenizer.ends or token in named or token in written}
    return frozenset(special) - frozenset(marks), marks


def _around(tokenizer: RunTokenizer) -> Iterator[str]:
    """What the template writes around what is said, as far as it takes such conversations."""
    if not getattr(tokenizer, "chat_template", None):
        return
    with_tools = (WITH_TOOLS, WITH_TOOLS[:3])  # some templates take no question right after an answer of a tool
    for conversation, tools in (*((spoken, ()) for spoken in SPOKEN), *((each, (TOOL,)) for each in with_tools)):
        text = rendered_if_taken(tokenizer, conversation, tools=tools)
        if text is not None:
            yield BLOCK.sub("", text)


def tail(tokenizer: RunTokenizer, prompt: str, *, by_template: bool) -> str:
    """The end of a prompt that belongs to the assistant's turn: what has begun there with a tag that is left open.

    Templates of reasoning models open `<think>` for the policy, which then never says it; so may a prompt that is no
    chat. Rewards read it together with the completion. "" where nothing is left open.
    """
    if by_template:
        opened = _opening_of_turn(tokenizer)
        if opened is not None:
            return opened if opened and prompt.endswith(opened) else ""
    match = OPENED.search(prompt)
    if match is None or match[0].strip() in hidden_special_tokens(tokenizer).values():
        return ""
    return match[0]


@lru_cache(maxsize=4)
def _opening_of_turn(tokenizer: RunTokenizer) -> str | None:
    """What the template has begun to say for the assistant, behind the header of earlier turns; None if unknown."""
    spoken, prompt = rendered_if_taken(tokenizer, SPOKEN[0]), rendered_if_taken(tokenizer, SPOKEN[0][:1], start=True)
    if spoken is None or prompt is None:
        return None
    header = spoken[: spoken.find(FIRST)]
    if FIRST not in spoken or not prompt.startswith(header):
        return None
    opened = prompt[len(header) :]
    tags = list(TAG.finditer(opened))
    return opened if tags and _opens(tags[-1]) else ""


def _opens(tag: re.Match[str]) -> bool:
    """Whether a tag opens something: neither `</think>` nor `[/THINK]`, `<|END_THINKING|>` or `<channel|>`."""
    is_half = re.match(r"<[^|].*\|>", tag[0])
    return not (tag[1] or tag[3] or (tag[2] or tag[4]).startswith(CLOSING_WORDS) or is_half)


def last_tag(text: str) -> str:
    """The last tag in a text, such as `<think>`; "" if it has none."""
    return next((match[0] for match in reversed(list(TAG.finditer(text)))), "")


def without_tail(text: str, tail: str) -> str:
    """What is left to say of a turn of which the prompt has begun this much."""
    if tail and text.startswith(tail):
        return text[len(tail) :]
    bare = text.lstrip()
    return bare[len(tail.strip()) :].lstrip() if tail.strip() and bare.startswith(tail.strip()) else text


# -- ends of turns -----------------------------------------------------------------------------------------------------
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
