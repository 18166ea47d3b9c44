"""Completions to learn from, in JSONL files or a hub set: chats, prompts with completions, and samples of rlft."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from rlft.config.keys import Key
from rlft.data import fields as row_fields
from rlft.data.hub import HubSet
from rlft.data.jsonl import JsonlFiles
from rlft.data.records import LearnedKeys, RecordRow, check_prompt_ids, identity, is_sampled, parse_sampled
from rlft.data.templates import (
    chat,
    check_answer_template,
    check_template,
    fields_in,
    filled,
    question_of,
    takes_question,
)
from rlft.types import Demonstration, FinishReason, Message, Prompt, Split, are, counted, require

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationKeys(LearnedKeys):
    """The config keys that say how a row becomes demonstrations. A row has one of three shapes:

    - a chat in messages_field
    - a prompt in prompt_field (a text, or a chat up to the user's last message) with its completion in
      completion_field, which may be a template of several fields
    - a line of `rlft sample`, recognised by its keys (rlft/data/records.py); its prompt is used unchanged, and the
      worked examples that it was sampled with come before it only if with_examples

    A row without anything to learn, such as a chat in which the assistant says nothing, is left out and counted. The
    chat template writes an assistant's calls of tools and thoughts, and the schemas in a row's `tools`; an assistant's
    message of weight 0 is only read. With token_ids=text completions that the length limit cut are left out, because
    the model would learn to end where they did not end.
    """

    section: ClassVar[str] = "demonstrations"

    prompt_field: str
    completion_field: str
    messages_field: str
    turns: Literal["last", "all"]
    token_ids: Literal["sampled", "text"]
    with_examples: Annotated[bool, Key(before=False)]

    def __post_init__(self) -> None:
        check_template(self.prompt_template, f"{self.section}.prompt_template", self.completion_field)
        check_answer_template(self.completion_field, f"{self.section}.completion_field")

    def load(self, split: Split) -> list[Demonstration]:
        """The split's demonstrations in the order of the data; no question is in both splits. Raises UserError."""
        rows = self.useful(split)
        demonstrations = [made for made in rows if made is not None]
        problem = f"all {len(rows)} sampled completions of the {split} split are cut by the length limit"
        remedy = "sample with a higher generation.max_tokens, or learn them with demonstrations.token_ids=sampled"
        require(demonstrations, "demonstrations.path", problem, remedy=remedy)
        if number := len(rows) - len(demonstrations):
            what = counted(number, "sampled completion")
            logger.warning("demonstrations: %s, cut by the length limit, %s left out", what, are(number))
        check_prompt_ids([demonstration.prompt for demonstration in demonstrations], "demonstrations.path")
        return demonstrations

    def learned(self, fields: Mapping[str, Any], row_id: str) -> list[RecordRow[Demonstration | None]]:
        """The row's demonstrations; None where the length limit cut the text to learn. Raises RowError."""
        if is_sampled(fields):
            return [self._sampled(fields)]
        is_chat = row_fields.has(fields, self.messages_field)
        self.note_unread(fields, row_fields.TOOLS, prompt=None if is_chat else self.prompt_field)
        if is_chat:
            return self._chat(fields, row_id)
        has_prompt = row_fields.has(fields, self.prompt_field) or not takes_question(self.prompt_template)
        if has_prompt and (fields_in(self.completion_field) or row_fields.has(fields, self.completion_field)):
            turns, question = self.filled(question_of(fields, self.prompt_field, self.template), fields)
            demonstration = self._demonstration(turns, self._completion(fields), row_id, fields)
            return [RecordRow(identity=identity(question), made=demonstration)]
        raise row_fields.MissingField(
            f"is not a chat (field {self.messages_field!r}), not a prompt with its completion (fields "
            f"{self.prompt_field!r}, {self.completion_field!r}) and not a line of rlft sample; "
            f"it has {row_fields.only(fields)}"
        )

    def _completion(self, fields: Mapping[str, Any]) -> Message:
        names = fields_in(self.completion_field)
        if not names:
            return row_fields.completion_of(fields, self.completion_field)
        if any(row_fields.is_empty(fields, name) for name in names):
            raise row_fields.UselessRow(f"has no value for all of {self.completion_field!r}")
        return {"role": "assistant", "content": filled(self.completion_field, None, fields, "completion_field")[0]}

    def _chat(self, fields: Mapping[str, Any], row_id: str) -> list[RecordRow[Demonstration | None]]:
        """With `turns: all`, chats with the same opening share their identity: each opening is itself a question."""
        where = f"field {self.messages_field!r}"
        if row_fields.value_of(fields, self.messages_field) == []:
            raise row_fields.UselessRow(f"has no messages in {where}")
        turns = row_fields.messages_of(fields, self.messages_field)
        # A first message of the assistant greets, and answers nothing.
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and turn.get("weight", 1) and i]
        if not answers:
            raise row_fields.UselessRow(f"has no assistant message to learn in {where}")
        learned = answers if self.turns == "all" else answers[-1:]
        first_question = self.filled(turns[: learned[0]], fields)[1]
        rows: list[RecordRow[Demonstration | None]] = []
        for i in learned:
            if turns[i - 1]["role"] not in ("user", "tool"):
                raise row_fields.UselessRow(f"has a message {i} in {where} that answers no user message")
            prompt_id = row_id if i == answers[-1] else f"{row_id}:{i}"
            prompt_turns, _ = self.filled(turns[:i], fields)
            demonstration = self._demonstration(prompt_turns, turns[i], prompt_id, fields)
            rows.append(RecordRow(identity=identity(first_question), made=demonstration))
        return rows

    def _demonstration(
        self, turns: tuple[Message, ...], turn: Message, prompt_id: str, fields: Mapping[str, Any]
    ) -> Demonstration:
        row_fields.check_none_unread(fields, turns, "leave such rows out: demonstrations are learned from texts alone")
        more = {key: value for key, value in turn.items() if key not in ("role", "content", "weight")}
        if not turn["content"].strip() and not more:
            raise row_fields.UselessRow("has an empty completion")
        prompt = Prompt(
            id=prompt_id, messages=chat(turns, self.system_prompt), answer="", tools=row_fields.tools_of(fields)
        )
        return Demonstration(prompt=prompt, completion=turn["content"], fields=more)

    def _sampled(self, fields: Mapping[str, Any]) -> RecordRow[Demonstration | None]:
        with_tokens = self.token_ids == "sampled"
        line, demonstration = parse_sampled(fields, with_tokens=with_tokens, with_examples=self.with_examples), None
        if with_tokens or line.finish_reason is FinishReason.stop:
            ids = line.token_ids if with_tokens else ()
            demonstration = Demonstration(prompt=line.prompt, completion=line.completion, completion_ids=ids)
        return RecordRow(identity=identity(line.prompt.messages), made=demonstration)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlDemonstrations(JsonlFiles, DemonstrationKeys):
    """Demonstrations in files.

    A prompt's id is `<file>:<line>`. For an earlier turn of a chat it is `<file>:<line>:<number of the message>`,
    counted from 0. For a sampled line it is the line's prompt_id, so that completions of one prompt share it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDemonstrations(HubSet, DemonstrationKeys):
    """Demonstrations in a hub set or local files in its format."""
