"""A row of somebody's data (a mapping of fields) as a `Prompt`: what `hub` and `jsonl` have in common."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlft.types import Message, Prompt, Split, UserError

logger = logging.getLogger(__name__)

PLACEHOLDER = "{question}"
ROLES = ("system", "user", "assistant")


class RowError(Exception):
    """What is wrong with one row; whoever knows its file and line turns it into a UserError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A prompt and the identity of its question: equal for equal questions, whatever the instruction around them."""

    identity: str
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKeys:
    """The config keys that say how a row becomes a prompt.

    prompt_field: the field of the question, a text; not used where messages_field is set.
    messages_field: the field of a chat, a list of {"role", "content"}. The prompt ends before a last assistant message.
    answer_field: the field of the answer, a text or number; None: the chat's last assistant message.
    answer_pattern: regular expression; its last match in the answer's text (the first group, if any) is the answer.
    answer_remove: characters taken out of the answer, such as the commas of "1,000".
    system_prompt: put first in a prompt that has no system message of its own.
    prompt_template: the (last) user message, with {question} standing for the row's own text.
    """

    prompt_field: str
    messages_field: str | None
    answer_field: str | None
    answer_pattern: str | None
    answer_remove: str
    system_prompt: str | None
    prompt_template: str

    def __post_init__(self) -> None:
        check_template(self.prompt_template)
        if self.answer_field is None and self.messages_field is None:
            raise UserError(
                "data.answer_field",
                "is null, and without data.messages_field no other field can hold the answer",
                remedy="name the field of the answer",
            )
        try:
            re.compile(self.answer_pattern or "")
        except re.error as error:
            raise UserError(
                "data.answer_pattern",
                f"is no regular expression ({error})",
                got=self.answer_pattern,
                remedy="mend it, or use null",
            ) from None

    def row(self, fields: Mapping[str, Any], row_id: str) -> Row:
        """The row's prompt. Raises RowError."""
        turns = self._turns(fields)
        answer = self._answer(fields, turns)
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        if not turns or turns[-1]["role"] != "user":
            raise RowError(f"field {self.messages_field!r} holds no user message for the model to answer")
        messages = chat(turns, self.system_prompt, self.prompt_template)
        return Row(identity=identity(turns), prompt=Prompt(id=row_id, messages=messages, answer=answer))

    def _turns(self, fields: Mapping[str, Any]) -> tuple[Message, ...]:
        if self.messages_field is not None:
            return _messages(_field(fields, self.messages_field), self.messages_field)
        return ({"role": "user", "content": _text(_field(fields, self.prompt_field), self.prompt_field)},)

    def _answer(self, fields: Mapping[str, Any], turns: Sequence[Message]) -> str:
        if self.answer_field is not None:
            text = _text(_field(fields, self.answer_field), self.answer_field, numbers=True)
        elif turns[-1]["role"] == "assistant":
            text = turns[-1]["content"]
        else:
            raise RowError(f"field {self.messages_field!r} does not end with an assistant message, the answer")
        if self.answer_pattern is not None:
            matches = list(re.finditer(self.answer_pattern, text))
            if not matches:
                raise RowError(f"the answer has no match of data.answer_pattern={self.answer_pattern}")
            text = matches[-1][1 if matches[-1].re.groups else 0] or ""
        answer = text.translate({ord(c): None for c in self.answer_remove}).strip()
        if not answer:
            raise RowError("the answer is empty")
        return answer


def chat(turns: Sequence[Message], system_prompt: str | None, prompt_template: str) -> tuple[Message, ...]:
    """The messages of a prompt: the template around the last turn, and the system prompt first where there is none.

    >>> chat([{"role": "user", "content": "2 + 2?"}], None, "Q: {question}")
    ({'role': 'user', 'content': 'Q: 2 + 2?'},)
    """
    last = {"role": "user", "content": prompt_template.replace(PLACEHOLDER, turns[-1]["content"])}
    has_own = turns[0]["role"] == "system"
    system = [] if system_prompt is None or has_own else [{"role": "system", "content": system_prompt}]
    return (*system, *turns[:-1], last)


def check_template(prompt_template: str) -> None:
    if PLACEHOLDER not in prompt_template:
        raise UserError(
            "data.prompt_template",
            f"has no {PLACEHOLDER}",
            got=repr(prompt_template),
            remedy=f"put {PLACEHOLDER} where the question goes",
        )


def identity(turns: Sequence[Message]) -> str:
    """A hash (sha256, hex) of what is asked; white space apart, equal for equal questions."""
    text = "\x1e".join(f"{turn['role']}\x1f{' '.join(turn['content'].split())}" for turn in turns)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def split_of(question_identity: str, held_out_fraction: float) -> Split:
    """The split a question belongs to, by its hash alone: no order, seed or size can make the two splits overlap."""
    return Split.held_out if int(question_identity[:16], 16) < held_out_fraction * 2**64 else Split.train


def without(rows: Iterable[Row], held_out: Iterable[Row], where: object) -> list[Row]:
    """The rows whose questions are not held out; a warning says how many were."""
    taken = {row.identity for row in held_out}
    rows = list(rows)
    kept = [row for row in rows if row.identity not in taken]
    if len(kept) < len(rows):
        logger.warning(
            "%s: %d training questions are also held out; they are left out of training", where, len(rows) - len(kept)
        )
    return kept


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise RowError(f"there is no field {name!r}, only {', '.join(map(repr, fields)) or 'none at all'}")
    return fields[name]


def _text(value: Any, name: str, *, numbers: bool = False) -> str:
    if numbers and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"field {name!r} must be a text{' or number' if numbers else ''}, it is {_kind(value)}")
    if not value.strip():
        raise RowError(f"field {name!r} is empty")
    return value


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise RowError(f"field {name!r} must be a list of messages, it is {_kind(value)}")
    for i, message in enumerate(value):
        if (
            not isinstance(message, Mapping)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise RowError(f'message {i} of field {name!r} must be {{"role": {" | ".join(ROLES)}, "content": text}}')
        if message["role"] == "system" and i > 0:
            raise RowError(f"message {i} of field {name!r} is a system message; only the first may be")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
