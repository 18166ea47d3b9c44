"""Rows of data (mappings of fields) and how prompts are made of them: the part that all sources of rows share."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar

from rlft.config.bounds import NonNegativeInt
from rlft.data.lazy import mapped
from rlft.types import Message, Prompt, Split, UserError, require

logger = logging.getLogger(__name__)

PLACEHOLDER = "{question}"
ROLES = ("system", "user", "assistant")
_FEW_SHOT_PLACEHOLDER = re.compile(r"\{(answer|final)\}")
"""The placeholders of data.few_shot_template."""
_NUMBER_GOES_ON = re.compile(r"[,.]?[0-9]")
_NUMBER_BEFORE = re.compile(r"[0-9][,.]?$")
MAX_CHECKED_ANSWERS = 20_000
"""The most rows of which the answers are looked at for numbers that data.answer_pattern cuts."""

Made = TypeVar("Made")


class RowError(Exception):
    """An error in one row, which the reader of the rows turns into a UserError; remedy None: name another field."""

    def __init__(self, problem: str, *, remedy: str | None = None) -> None:
        self.remedy = remedy
        super().__init__(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow(Generic[Made]):
    """What is made of a row, with a hash of its question, which equal questions share whatever else the rows hold."""

    identity: str
    made: Made


Parse = Callable[[Mapping[str, Any], str], Sequence[RecordRow[Made]]]
"""A function that maps (fields, id) of a row to the objects made of it, all with one identity. It raises RowError."""


class RowSource(ABC):
    """A component with rows, from JSONL files or a hub set; `section` is the part of the config with its keys."""

    __slots__ = ()

    section: ClassVar[str]

    @abstractmethod
    def read(self, split: Split, parse: Parse[Made]) -> Sequence[RecordRow[Made]]:
        """The rows of a split in the order of the data. Raises UserError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of a row, a chat up to the last user message, with its answer and what goes with the prompt.

    Rewards compare with `answer`, a part of the whole text, `worked_answer`.
    """

    id: str
    turns: tuple[Message, ...]
    worked_answer: str
    answer: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKeys(RowSource):
    """The config keys that say how a row becomes a prompt.

    configs/data/jsonl.yaml explains them. The prompt of a chat ends before its last message if that is an assistant
    message. The worked examples (few_shot) are the training questions with the lowest hashes, but never the question
    itself.
    """

    section: ClassVar[str] = "data"

    prompt_field: str
    messages_field: str | None
    answer_field: str | None
    answer_pattern: str | None
    answer_remove: str
    system_prompt: str | None
    prompt_template: str
    few_shot: NonNegativeInt
    few_shot_template: str
    metadata_fields: Sequence[str]

    def __post_init__(self) -> None:
        check_template(self.prompt_template)
        require(
            _FEW_SHOT_PLACEHOLDER.search(self.few_shot_template),
            "data.few_shot_template",
            "has neither {answer} nor {final}",
            got=repr(self.few_shot_template),
            remedy="put {answer} where the worked answer goes",
        )
        problem = "is null, and without data.messages_field no other field can hold the answer"
        has_answer = self.answer_field is not None or self.messages_field is not None
        require(has_answer, "data.answer_field", problem, remedy="name the field of the answer")
        try:
            re.compile(self.answer_pattern or "")
        except re.error as error:
            problem = f"is not a regular expression ({error})"
            remedy = "fix it, or use null"
            raise UserError("data.answer_pattern", problem, got=self.answer_pattern, remedy=remedy) from None

    def load(self, split: Split) -> Sequence[Prompt]:
        """The split's prompts in the order of the data. Raises UserError, which names a bad row."""
        rows = self.read(split, self.parse)
        if self.answer_pattern is not None:
            self._warn_of_cut_numbers(rows)
        if not self.few_shot:
            return mapped(rows, lambda row: self._prompt(row.made, ()))
        training = rows if split is Split.train else self.read(Split.train, self.parse)
        # One more than is shown, because a question is never one of its own examples.
        examples = first_by_identity(training, self.few_shot + 1)
        return mapped(rows, lambda row: self._prompt(row.made, self._examples(row, examples)))

    def parse(self, fields: Mapping[str, Any], row_id: str) -> list[RecordRow[Question]]:
        """The row's question. Raises RowError."""
        turns = self._turns(fields)
        worked_answer = self._worked_answer(fields, turns)
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        if not turns or turns[-1]["role"] != "user":
            raise RowError(f"field {self.messages_field!r} holds no user message for the model to answer")
        answer = self._answer(worked_answer)
        for name in self.metadata_fields:
            if name not in fields:
                raise RowError(f"there is no field {name!r} (data.metadata_fields), {only(fields)}")
        metadata = {name: fields[name] for name in self.metadata_fields}
        question = Question(id=row_id, turns=turns, worked_answer=worked_answer, answer=answer, metadata=metadata)
        return [RecordRow(identity=identity(turns), made=question)]

    def _turns(self, fields: Mapping[str, Any]) -> tuple[Message, ...]:
        if self.messages_field is not None:
            return messages_of(fields, self.messages_field)
        return ({"role": "user", "content": text_of(fields, self.prompt_field)},)

    def _worked_answer(self, fields: Mapping[str, Any], turns: Sequence[Message]) -> str:
        if self.answer_field is not None:
            return text_of(fields, self.answer_field, numbers=True)
        if turns[-1]["role"] == "assistant":
            return turns[-1]["content"]
        raise RowError(f"field {self.messages_field!r} does not end with an assistant message, the answer")

    def _answer(self, text: str) -> str:
        if self.answer_pattern is not None:
            match = self._last_match(text)
            if match is None:
                raise RowError(f"the answer has no match of data.answer_pattern={self.answer_pattern}")
            text = match[1 if match.re.groups else 0] or ""
        answer = text.translate({ord(c): None for c in self.answer_remove}).strip()
        if not answer:
            raise RowError("the answer is empty")
        return answer

    def _last_match(self, text: str) -> re.Match[str] | None:
        last = None
        for match in re.finditer(self.answer_pattern or "", text):
            last = match
        return last

    def _warn_of_cut_numbers(self, rows: Sequence[RecordRow[Question]]) -> None:
        """Warns once if the pattern takes part of a number, such as 1 of 1,080: the answers would be wrong."""
        number, first = 0, None
        for row in islice(rows, MAX_CHECKED_ANSWERS):
            text = row.made.worked_answer
            match = self._last_match(text)
            if match is not None and _cuts_number(text, *match.span(1 if match.re.groups else 0)):
                number += 1
                first = first or row.made
        if first is not None:
            logger.warning(
                "data.answer_pattern: cuts a number in %d of %d answers: %s has the answer %r of %r; let the pattern "
                r"take digits, commas and points: (-?[\d,.]*\d)",
                *(number, min(len(rows), MAX_CHECKED_ANSWERS), first.id, first.answer, first.worked_answer[-40:]),
            )

    def _prompt(self, question: Question, examples: Sequence[Message]) -> Prompt:
        messages = chat(question.turns, self.system_prompt, self.prompt_template, examples)
        return Prompt(id=question.id, messages=messages, answer=question.answer, metadata=question.metadata)

    def _examples(self, row: RecordRow[Question], candidates: Sequence[RecordRow[Question]]) -> list[Message]:
        """The worked examples as turns, without system messages."""
        others = [example.made for example in candidates if example.identity != row.identity][: self.few_shot]
        problem = f"there are only {len(others)} training questions besides {row.made.id} to show"
        remedy = f"use data.few_shot={len(others)}, or more data"
        require(len(others) == self.few_shot, "data.few_shot", problem, got=self.few_shot, remedy=remedy)
        return [turn for example in others for turn in self._example(example)]

    def _example(self, example: Question) -> tuple[Message, ...]:
        values = {"answer": example.worked_answer, "final": example.answer}
        answer_turn = _FEW_SHOT_PLACEHOLDER.sub(lambda match: values[match[1]], self.few_shot_template)
        turns = [turn for turn in example.turns if turn["role"] != "system"]
        return (*chat(turns, None, self.prompt_template), {"role": "assistant", "content": answer_turn})


def chat(
    turns: Sequence[Message], system_prompt: str | None, prompt_template: str, examples: Sequence[Message] = ()
) -> tuple[Message, ...]:
    """The messages of a prompt: a system message, examples, then the turns.

    A system message at the start of `turns` takes the place of `system_prompt`. In `prompt_template`, the last message,
    {question} stands for the last turn's text.

    >>> chat([{"role": "user", "content": "2 + 2?"}], None, "Q: {question}")
    ({'role': 'user', 'content': 'Q: 2 + 2?'},)
    """
    system: Sequence[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    if turns[0]["role"] == "system":
        system, turns = turns[:1], turns[1:]
    last = {"role": "user", "content": prompt_template.replace(PLACEHOLDER, turns[-1]["content"])}
    return (*system, *examples, *turns[:-1], last)


def check_template(prompt_template: str, section: str = "data") -> None:
    """Raises UserError for a template without {question}; `section` is the section of the config with the template."""
    require(
        PLACEHOLDER in prompt_template,
        f"{section}.prompt_template",
        f"has no {PLACEHOLDER}",
        got=repr(prompt_template),
        remedy=f"put {PLACEHOLDER} where the question goes",
    )


def identity(turns: Sequence[Message]) -> str:
    """A hash (sha256, hex) of the question, which ignores differences in white space."""
    text = "\x1e".join(f"{turn['role']}\x1f{' '.join(turn['content'].split())}" for turn in turns)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def number_of(question_identity: str) -> int:
    """The first 64 bits of an identity."""
    return int(question_identity[:16], 16)


def split_of(question_identity: str, held_out_fraction: float) -> Split:
    """The split a question belongs to, by its hash alone: no order, seed or size can make the two splits overlap."""
    return Split.held_out if number_of(question_identity) < held_out_fraction * 2**64 else Split.train


def first_by_identity(rows: Iterable[RecordRow[Made]], number: int) -> list[RecordRow[Made]]:
    """The `number` rows with the lowest identities, in order; memory holds no more than these.

    Of several rows with the same question, the last is returned.
    """
    first: dict[str, RecordRow[Made]] = {}
    largest = ""  # the largest identity in `first`
    for row in rows:
        if len(first) < number or row.identity <= largest:
            first[row.identity] = row
            if len(first) > number:
                del first[largest]
            largest = max(first)
    return [first[identity] for identity in sorted(first)]


def _cuts_number(text: str, begin: int, end: int) -> bool:
    """Whether text[begin:end] begins or ends inside a number.

    >>> [_cuts_number("= 1,080.", 2, end) for end in (3, 5, 7)], _cuts_number("= 1,080", 4, 7)
    ([True, True, False], True)
    """
    found = text[begin:end]
    begins_inside = found[:1].isdigit() and _NUMBER_BEFORE.search(text, 0, begin) is not None
    return begins_inside or (found[-1:].isdigit() and _NUMBER_GOES_ON.match(text, end) is not None)


def text_of(fields: Mapping[str, Any], name: str, *, numbers: bool = False, blank: bool = False) -> str:
    """The text in a field.

    With `numbers` it may be a number, which is returned as text; with `blank` the text may be blank. RowError if the
    field is missing, has another type, or is blank.
    """
    value = _field(fields, name)
    if numbers and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):  # tables use NaN for a missing value
            raise RowError(f"field {name!r} holds no number, it is {value}")
        return format(Decimal(str(value)), "f")  # without an exponent: 0.00001 for 1e-05
    if not isinstance(value, str):
        raise RowError(f"field {name!r} must be a string{' or number' if numbers else ''}, it is {kind(value)}")
    if not blank and not value.strip():
        raise RowError(f"field {name!r} is empty")
    return value


def messages_of(fields: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """The chat in a field; only its first message may be a system message. Raises RowError."""
    value = _field(fields, name)
    if not isinstance(value, list | tuple) or not value:
        raise RowError(f"field {name!r} must be a list of messages, it is {kind(value)}")
    for i, message in enumerate(value):
        is_message = isinstance(message, Mapping) and message.get("role") in ROLES
        if not is_message or not isinstance(message.get("content"), str):
            raise RowError(f'message {i} of field {name!r} must be {{"role": {" | ".join(ROLES)}, "content": text}}')
        if message["role"] == "system" and i > 0:
            raise RowError(f"message {i} of field {name!r} is a system message; only the first may be")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def turns_of(fields: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """The turns of a prompt, which is a text or a chat that ends with a user message. Raises RowError."""
    if not isinstance(fields.get(name), list | tuple):
        return ({"role": "user", "content": text_of(fields, name)},)
    turns = messages_of(fields, name)
    if turns[-1]["role"] != "user":
        raise RowError(f"the last message of field {name!r} is not a user message")
    return turns


def completion_of(fields: Mapping[str, Any], name: str) -> str:
    """A completion, which is a text, possibly empty, or one assistant message. Raises RowError."""
    if not isinstance(fields.get(name), list | tuple):
        return text_of(fields, name, blank=True)
    turns = messages_of(fields, name)
    if [turn["role"] for turn in turns] != ["assistant"]:
        raise RowError(f"field {name!r} must be a string or one assistant message")
    return turns[0]["content"]


def has(fields: Mapping[str, Any], *names: str) -> bool:
    """Whether a row has values in all these fields (in a table, null means that a row has no value)."""
    return all(fields.get(name) is not None for name in names)


def kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    if value == []:
        return "an empty list"
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def only(fields: Mapping[str, Any]) -> str:
    """'only ' and the names of all fields, for messages about a missing field."""
    return f"only {', '.join(map(repr, fields)) or 'none at all'}"


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise RowError(f"there is no field {name!r}, {only(fields)}")
    return fields[name]
