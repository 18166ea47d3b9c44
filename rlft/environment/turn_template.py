r"""What conversations look like to one model: what its chat template puts between turns, and how it writes calls.

A conversation's tokens are concatenated and never made from text again: the prompt's, what was sampled, then a suffix
with the environment's answer and the start of the policy's next turn. With Qwen2.5's template, when a user answers "5":

    <|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n       the prompt
    5<|im_end|>                                                       sampled, with the end of the turn
    \n<|im_start|>user\nRight.<|im_end|>\n<|im_start|>assistant\n     the suffix

The suffix is found by rendering such a conversation with a mark in place of what was sampled (`_between`): behind the
mark stand the special tokens that end a turn, which are left out as far as they were sampled, and the rest.

Where a template rewrites earlier turns when a user speaks again (Qwen3 drops their thinking), the policy reads the
whole conversation as rewritten, in a branch of its row. This is found by rendering a conversation with and without
the answer (`_rewrites`). A template that does so when a tool answers is refused by name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from rlft.environment.calls import CallTemplate, Syntax, reader_of, shown_by, written
from rlft.environment.protocol import Call, Environment
from rlft.tokens.plain import PlainText
from rlft.tokens.text import (
    CALL_ID,
    RunTokenizer,
    closing_of,
    decode,
    num_common,
    render,
    rendered_if_taken,
    special_pattern,
    special_tokens,
)
from rlft.types import UserError

Role = Literal["tool", "user"]  # who answers the policy

Check = Callable[[str], None]


def unchecked(text: str) -> None:
    """For texts that were checked before."""


OPENING = ({"role": "user", "content": "question"},)
THOUGHT = "<think>\nthought\n</think>\n\n"
READING = "a reading"
PART_OF_A_TAG = re.compile(r"<[^<>\s]*$")
THOUGHTS_BEGUN = re.compile(r"(?:<\|?/?(?:\w*think\w*|channel|\w*reason\w*)\|?>(?:thought)?)*", re.IGNORECASE)
"""What prompts may begin or skip of an assistant's thoughts, such as `<think></think>`, without white space."""


class TurnTemplate:
    """A tokenizer's chat template, for conversations of several turns.

    Raises:
        UserError: there is no chat template; it cannot show tools or their answers, takes no second turn of a user,
            ends turns with no special token, or rewrites earlier turns when another role answers.
    """

    def __init__(
        self,
        tokenizer: RunTokenizer,
        roles: Collection[Role],  # who answers the policy
        *,
        # JSON schemas of tools, as `transformers.utils.get_json_schema` makes them, which the template shows.
        tools: Sequence[Mapping[str, Any]] = (),
        # Messages like those that conversations begin with; it matters whether they include a system message.
        opening: Sequence[Mapping[str, Any]] = OPENING,
        may_rewrite: Collection[Role] = ("user",),  # the roles at whose answers the template may rewrite earlier turns
    ) -> None:
        self._tokenizer, self._tools, self._opening = tokenizer, [dict(tool) for tool in tools], list(opening)
        special = [*special_tokens(tokenizer)]
        self._special = special_pattern(special)
        self._special_at_end = re.compile(f"(?:{self._special.pattern})$")
        self._plain = PlainText(tokenizer)
        if not tokenizer.chat_template:
            raise self._refused("tokenizer has no chat template, which says what stands between turns", "chat template")
        self._runs: dict[Role, str] = {}
        """For each role that answers, the special tokens that end the turn before, as text."""
        self._check_shows_tools()
        for role in roles:
            self._check_takes(role)
        try:
            self.rewriting: frozenset[Role] = frozenset(role for role in roles if self._rewrites(role, roles))
        except TemplateError as error:
            raise self._refused(f"chat template takes no second answer ({error})", "chat template that does") from error
        """The roles at whose answers earlier turns change: conversations then continue in branches (`prompt`)."""
        if not self.rewriting <= {*may_rewrite}:
            who = "a tool answers" if "tool" in self.rewriting else "a user speaks again"
            raise self._refused(
                f"chat template rewrites earlier turns when {who}, so no conversation with it goes on",
                "chat template that keeps them as they were",
            )

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, start: bool = True, check: Check = unchecked
    ) -> tuple[int, ...]:
        """The tokens of a conversation; with `start` up to the start of the policy's next turn.

        What looks like a special token in a message stays text, except for what an assistant says (`PlainText`).
        `check` is called with the text.
        """
        [cut], tools, gap = self._plain.cut([messages], self._tools)
        text = render(self._tokenizer, cut, tools=tools, start=start)
        check(text.replace(gap, ""))
        return tuple(self._plain.ids([text], gap)[0])

    def spoken(self, sampled: Sequence[int]) -> str:
        """The text of a turn with the special tokens in it, but without those at its end."""
        return self.stripped(str(self._tokenizer.decode(list(sampled), skip_special_tokens=False)))

    def stripped(self, text: str) -> str:
        """The text without special tokens at its end."""
        while (bare := text.rstrip()) and (match := self._special_at_end.search(bare)):
            text = bare[: match.start()]
        return text

    def suffix(
        self, sampled: Sequence[int], answers: Sequence[Mapping[str, Any]], check: Check = unchecked
    ) -> tuple[int, ...]:
        """The tokens that follow a turn of the policy: the answers, and the start of its next turn.

        They begin with the token that ends a turn if the policy did not sample it, because a limit or a stop string
        ended the turn. What looks like a special token in an answer stays text.

        `answers` are messages of one role at whose answers earlier turns stay as they are; those of tools in the order
        of the calls. `check` is called with their text.
        """
        roles = {answer["role"] for answer in answers}
        if len(roles) != 1 or roles & self.rewriting:
            raise ValueError(f"answers of the roles {sorted(roles)} have no suffix")
        run, rest, gap = self._between(roles.pop(), answers)
        check(rest.replace(gap, ""))
        return tuple(self._plain.ids([run + rest], gap)[0][num_said(sampled, self._ids(run)) :])

    # -- text ----------------------------------------------------------------------------------------------------------
    def _between(self, role: Role, answers: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
        """(the tokens that end a turn, the text from there to the next turn, a character at which that text is cut)."""
        [cut], tools, gap = self._plain.cut([answers], self._tools)
        mark = unused_mark([answer["content"] for answer in cut])
        if role == "tool":
            cut = [{**answer, "tool_call_id": answer.get("tool_call_id") or f"{k:09d}"} for k, answer in enumerate(cut)]
        turn = self._turn(role, mark, cut[0].get("tool_call_id", CALL_ID), cut[0].get("name"))
        text = render(self._tokenizer, [*self._opening, turn, *cut], tools=tools, start=True)
        return *self._after(text, mark, role), gap

    def _after(self, text: str, mark: str, role: Role, *, may_be_open: bool = False) -> tuple[str, str]:
        """(the special tokens that end the turn with the mark, the text after them). UserError: it has none."""
        behind = text[text.rindex(mark) + len(mark) :]
        match = self._special.search(behind)
        if match is None and may_be_open and role == "tool":  # such as GLM's, which the answer's first token ends
            return "", ""
        if match is None:
            raise self._refused(
                "chat template ends an assistant's turn with no special token", "chat template whose turns have ends"
            )
        # A conversation may end otherwise than a turn that is answered.
        run = self._runs.get(role, "")
        run = run if run and behind.startswith(run, match.start()) else match[0]
        return run, behind[match.start() + len(run) :]

    def _turn(self, role: Role, mark: str, call_id: str = CALL_ID, tool: str | None = None) -> dict[str, Any]:
        """A turn of the policy that `role` can answer, such as a call of this tool; the turn ends with the mark."""
        if role == "user":
            return {"role": "assistant", "content": THOUGHT + mark}
        name = tool or (self._tools[0]["function"]["name"] if self._tools else "tool")
        calls = [{"type": "function", "id": call_id, "function": {"name": name, "arguments": {"argument": mark}}}]
        return {"role": "assistant", "content": THOUGHT + mark, "tool_calls": calls}

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, start: bool) -> str:
        return render(self._tokenizer, messages, tools=self._tools, start=start)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    # -- what is refused -----------------------------------------------------------------------------------------------
    def _check_shows_tools(self) -> None:
        if self._tools:
            try:
                text = self._rendered(self._opening, start=True)
            except Exception as error:
                raise self._no_tools(f"({error})") from error
            for tool in self._tools:
                if tool["function"]["name"] not in text:
                    raise self._no_tools(f"({tool['function']['name']} is not shown)")

    def _check_takes(self, role: Role) -> None:
        """Raises UserError if the role cannot answer."""
        why = "(the answer is not shown)"
        try:
            text = self._rendered([*self._opening, self._turn(role, _mark(0)), _answer(role)], start=True)
            if READING in self._after(text, _mark(0), role)[1]:
                rendered = partial(rendered_if_taken, self._tokenizer, tools=self._tools)
                eos = str(self._tokenizer.eos_token or "")
                turn, answer = self._turn(role, _mark(0)), _answer(role)
                closing = closing_of(rendered, self._opening, turn, answer, _mark(0), READING, self._special, eos)
                self._runs[role] = closing[1]
                return
        except UserError:
            raise
        except Exception as error:  # a template is a program of somebody else's: it may raise anything
            why = f"({error})"
        if role == "tool":
            raise self._no_tools(why)
        raise self._refused(f"chat template takes no user's turn after an assistant's {why}", "chat template that does")

    def _rewrites(self, role: Role, roles: Collection[Role]) -> bool:
        """Whether the prompt or an earlier turn, whoever has answered it, changes once `role` has answered."""
        earlier = ([], *([self._turn(r, _mark(0)), _answer(r)] for r in roles))
        return any(self._changes([*self._opening, *turns], role) for turns in earlier)

    def _changes(self, history: Sequence[Mapping[str, Any]], role: Role) -> bool:
        """Whether this history, or a turn behind it, is written otherwise once `role` has answered that turn."""
        turn = self._turn(role, _mark(1))
        prompt, whole = self._rendered(history, start=True), self._rendered([*history, turn], start=False)
        said = whole.removesuffix(self._after(whole, _mark(1), role, may_be_open=True)[1])
        answered = self._rendered([*history, turn, _answer(role)], start=True)
        keeps_prompt = said.startswith(prompt) or (role == "tool" and _differs_in_thoughts(prompt, said))
        return not (keeps_prompt and answered.startswith(said))

    def _no_tools(self, why: str) -> UserError:
        return self._refused(
            f"chat template cannot show tools and their answers {why}", "chat template that does, as Qwen2.5's"
        )

    def _refused(self, problem: str, needed: str) -> UserError:
        name = self._tokenizer.name_or_path or None
        remedy = f"use a model with a {needed}, or put one into the model's folder as chat_template.jinja"
        return UserError("model.path", f"its {problem}", got=name, remedy=remedy)


class Dialect:
    """The chat template and the syntax of calls, for one environment, with `opening` as in `TurnTemplate`.

    Raises UserError: the template cannot show tools or their answers, rewrites earlier turns when a tool answers, or
    writes calls in a form that is not known here; or a tool has no types or docstring.
    """

    def __init__(self, environment: Environment, tokenizer: RunTokenizer, opening: Sequence[Mapping[str, Any]]) -> None:
        schemas = environment.schemas()
        visible = schemas if environment.show_tools else ()
        self.shown = shown_by(environment.syntax, CallTemplate(tokenizer, visible, opening))
        self._as_messages_of_tools = environment.syntax == "template" and not environment.plays_a_game
        shown_opening = self.shown.messages(opening)
        roles: set[Role] = {"tool" if self._as_messages_of_tools else "user"}
        try:
            self.template = TurnTemplate(tokenizer, roles, tools=self.shown.tools, opening=shown_opening)
        except UserError as error:
            if not self._as_messages_of_tools or not tokenizer.chat_template:
                raise
            remedy = f"set environment.syntax=json or xml, or {error.remedy}"
            raise UserError(error.key, error.problem, got=error.got, remedy=remedy) from None
        self._tokenizer = tokenizer
        self._syntax: Syntax = environment.syntax
        self._calls = CallTemplate(tokenizer, schemas, shown_opening)
        self._reader = None if environment.plays_a_game else reader_of(environment.syntax, self._calls)

    def opened(self, messages: Sequence[Mapping[str, Any]], text: str) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
        """(messages, tokens) of a prompt to which the environment adds this text."""
        joined = with_opening(self.shown.messages(messages), text)
        return joined, self.template.prompt(joined)

    def calls(self, sampled: Sequence[int]) -> list[Call]:
        """The calls in a turn of the policy, in order; those that cannot be made have a `problem`."""
        return [] if self._reader is None else self._reader.calls(self.template.spoken(sampled))

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the policy has to write it."""
        return self.template.stripped(written(self._syntax, self._calls, name, arguments))

    def suffix(self, sampled: Sequence[int], answers: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The tokens between this turn and the next: the answers, and the start of the policy's next turn.

        `answers` are (name of the tool, its answer) in the order of the calls, or ("", observation) of a game.
        """
        messages = self._messages(answers)
        ids = [call.id for call in self.calls(sampled)] if self._as_messages_of_tools else []
        if len(ids) == len(messages) and all(ids):
            named = [{**message, "tool_call_id": each} for message, each in zip(messages, ids, strict=True)]
            with contextlib.suppress(TemplateError):  # some templates refuse ids that are not of their form
                return self.template.suffix(sampled, named)
        return self.template.suffix(sampled, messages)

    @property
    def rewrites(self) -> bool:
        """Whether the template rewrites earlier turns at each answer; then `rewritten` takes the place of `suffix`."""
        return bool(self.template.rewriting)

    def rewritten(
        self,
        messages: Sequence[Mapping[str, Any]],  # the prompt's
        opened_with: str,  # what the environment has added to them
        history: Sequence[tuple[Sequence[int], Sequence[tuple[str, str]]]],  # each turn's ids and answers (`suffix`)
    ) -> tuple[int, ...]:
        """Tokens of the whole conversation up to the start of the policy's next turn, as the template has it now."""
        conversation = with_opening(self.shown.messages(messages), opened_with)
        for sampled, answers in history:
            conversation += [{"role": "assistant", "content": decode(self._tokenizer, sampled)}]
            conversation += self._messages(answers)
        return self.template.prompt(conversation)

    def _messages(self, answers: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        if self._as_messages_of_tools:
            return [{"role": "tool", "name": name or "tool", "content": text} for name, text in answers]
        return [{"role": "user", "content": "\n".join(text for _, text in answers)}]


# -- details -----------------------------------------------------------------------------------------------------------
def num_said(sampled: Sequence[int], closing: Sequence[int]) -> int:
    """How many tokens of what ends a turn have been sampled at its end; all if the last one has."""
    if len(sampled) and closing and sampled[-1] == closing[-1]:
        return len(closing)
    counts = range(min(len(sampled), len(closing)), 0, -1)
    return next((n for n in counts if list(sampled[-n:]) == list(closing[:n])), 0)


def with_opening(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    *earlier, last = (dict(message) for message in messages)
    return [*earlier, {**last, "content": f"{last['content']}\n\n{text}"} if text else last]


def _differs_in_thoughts(prompt: str, conversation: str) -> bool:
    r"""Whether a conversation begins with this prompt but for white space and what the prompt's end begins to think.

    A transcript keeps the prompt as it was read, so that neither moves a token between what was sampled.

    >>> _differs_in_thoughts("a b<think>", "a\nbc"), _differs_in_thoughts("a b", "a c")
    (True, False)
    """
    bare, whole = "".join(prompt.split()), "".join(conversation.split())
    left = bare[len(PART_OF_A_TAG.sub("", bare[: num_common(bare, whole)])) :]
    return THOUGHTS_BEGUN.fullmatch(left) is not None


def unused_mark(texts: Sequence[str]) -> str:
    """A text that templates leave as it is, and that is in none of these.

    >>> unused_mark(["mark0mark", "5"])
    'mark1mark'
    """
    return next(mark for mark in map(_mark, count()) if not any(mark in text for text in texts))


def _mark(number: int) -> str:
    return f"mark{number}mark"


def _answer(role: Role) -> dict[str, Any]:
    return {"role": role, "content": READING} | ({} if role == "user" else {"name": "tool", "tool_call_id": CALL_ID})
