"""Completions to learn from, in JSONL files or a hub set: chats, prompts with completions, and samples of rlft."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlft.data.hub import HubSet
from rlft.data.jsonl import JsonlFiles
from rlft.data.records import (
    RecordRow,
    RowError,
    RowSource,
    chat,
    check_template,
    completion_of,
    has,
    identity,
    messages_of,
    only,
    turns_of,
)
from rlft.data.sampled import check_prompt_ids, is_sampled, parse_sampled
from rlft.types import Demonstration, FinishReason, Message, Prompt, Split, UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationKeys(RowSource):
    """The config keys that say how a row becomes demonstrations. A row has one of three shapes:

    - a chat, a list of {"role", "content"} in messages_field
    - a prompt in prompt_field (a text, or a chat up to the user's last message) with its completion in completion_field
    - a line of `rlft sample`, recognised by its keys (rlft/data/sampled.py); its prompt is used unchanged

    configs/demonstrations/jsonl.yaml explains the keys. With turns=all each assistant message of a chat is learned,
    given the turns before it; messages after the last assistant message are not used. With token_ids=sampled exactly
    the sampled tokens are learned, which requires the tokenizer they were sampled with (`sampled_with` returns its
    fingerprint). With token_ids=text completions that the length limit cut are left out, because the model would learn
    to end where they did not end.
    """

    section: ClassVar[str] = "demonstrations"

    prompt_field: str
    completion_field: str
    messages_field: str
    turns: Literal["last", "all"]
    system_prompt: str | None
    prompt_template: str
    token_ids: Literal["sampled", "text"]

    def __post_init__(self) -> None:
        check_template(self.prompt_template, self.section)

    def load(self, split: Split) -> list[Demonstration]:
        """The split's demonstrations in the order of the data; no question is in both splits. Raises UserError."""
        rows = self.read(split, self.parse)
        demonstrations = [row.made for row in rows if row.made is not None]
        if not demonstrations:
            problem = f"all {len(rows)} sampled completions of the {split} split are cut by the length limit"
            remedy = "sample with a higher generation.max_tokens, or learn them with demonstrations.token_ids=sampled"
            raise UserError("demonstrations.path", problem, remedy=remedy)
        if len(demonstrations) < len(rows):
            logger.warning(
                "demonstrations: %d sampled completions, cut by the length limit, are left out",
                len(rows) - len(demonstrations),
            )
        check_prompt_ids([demonstration.prompt for demonstration in demonstrations], "demonstrations.path")
        return demonstrations

    def parse(self, fields: Mapping[str, Any], row_id: str) -> list[RecordRow[Demonstration | None]]:
        """The row's demonstrations; None where the length limit cut the text to learn. Raises RowError."""
        if is_sampled(fields):
            return [self._sampled(fields)]
        if has(fields, self.messages_field):
            return self._chat(messages_of(fields, self.messages_field), row_id)
        if has(fields, self.prompt_field, self.completion_field):
            turns = turns_of(fields, self.prompt_field)
            demonstration = self._demonstration(turns, completion_of(fields, self.completion_field), row_id)
            return [RecordRow(identity=identity(turns), made=demonstration)]
        raise RowError(
            f"is not a chat (field {self.messages_field!r}), not a prompt with its completion (fields "
            f"{self.prompt_field!r}, {self.completion_field!r}) and not a line of rlft sample; it has {only(fields)}"
        )

    def _chat(self, turns: tuple[Message, ...], row_id: str) -> list[RecordRow[Demonstration | None]]:
        """With `turns: all`, chats with the same opening share their identity: each opening is itself a question."""
        learned = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if not learned:
            raise RowError(f"field {self.messages_field!r} holds no assistant message to learn")
        first_turn_learned = learned[0] if self.turns == "all" else learned[-1]
        rows: list[RecordRow[Demonstration | None]] = []
        for i in learned if self.turns == "all" else learned[-1:]:
            if i == 0 or turns[i - 1]["role"] != "user":
                raise RowError(f"message {i} of field {self.messages_field!r} answers no user message")
            prompt_id = row_id if i == learned[-1] else f"{row_id}:{i}"
            demonstration = self._demonstration(turns[:i], turns[i]["content"], prompt_id)
            rows.append(RecordRow(identity=identity(turns[:first_turn_learned]), made=demonstration))
        return rows

    def _demonstration(self, turns: tuple[Message, ...], completion: str, prompt_id: str) -> Demonstration:
        if not completion.strip():
            raise RowError("the completion is empty")
        messages = chat(turns, self.system_prompt, self.prompt_template)
        return Demonstration(prompt=Prompt(id=prompt_id, messages=messages, answer=""), completion=completion)

    def _sampled(self, fields: Mapping[str, Any]) -> RecordRow[Demonstration | None]:
        line = parse_sampled(fields, with_tokens=self.token_ids == "sampled")
        demonstration = None
        if self.token_ids == "sampled":
            demonstration = Demonstration(prompt=line.prompt, completion=line.completion, completion_ids=line.token_ids)
        elif line.finish_reason is FinishReason.stop:
            demonstration = Demonstration(prompt=line.prompt, completion=line.completion)
        return RecordRow(identity=identity(line.prompt.messages), made=demonstration)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlDemonstrations(JsonlFiles, DemonstrationKeys):
    """Demonstrations in JSONL files. The keys of DemonstrationKeys say which field holds what.

    A prompt's id is `<file>:<line>`. For an earlier turn of a chat it is `<file>:<line>:<number of the message>`,
    counted from 0. For a sampled line it is the line's prompt_id, so that completions of one prompt share it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDemonstrations(HubSet, DemonstrationKeys):
    """Demonstrations in a hub set or local files in its format, with the keys of DemonstrationKeys."""
