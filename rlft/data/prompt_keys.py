"""How the prompt of a row is written, whatever is learned of the row, and what of a row nobody reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar

from rlft.config.keys import Key
from rlft.data.fields import HISTORY, TOOLS, RowError, is_empty, text_of, values_of
from rlft.data.templates import fields_in, filled_turns, reads_history
from rlft.tokens.options import FORMS, placed_options
from rlft.types import Message

logger = logging.getLogger(__name__)

OPTIONS = "options"
"""The placeholder of the options in a template, and their name in a prompt's metadata."""
TELLING: Mapping[str, str] = {
    **dict.fromkeys(("system", "system_prompt"), "{section}.system_field={name} makes it the system message"),
    **dict.fromkeys(("input", "context", "passage"), "{section}.prompt_template='{{{name}}} {{question}}' shows it"),
    **dict.fromkeys(("choices", "options"), "{section}.options_field={name} shows them"),
    **dict.fromkeys(("image", "images"), "data.image_field={name} reads it in prompts"),
    **dict.fromkeys(("audio", "audios", "video", "videos"), "no model is given it"),
    HISTORY: "pairs of texts, [[question, answer], ..], are earlier turns of a prompt that is a text",
    TOOLS: "demonstrations and preferences show them, prompts those of an environment",
    "label": "preferences read it: preferences.completions_field=<the completion> preferences.scores_field={name}",
}
"""{field of a row that has a meaning for its prompt: how it is read}: it is noted where no key reads it."""

_NUMBERED_IMAGE = re.compile(r"image_?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKeys:
    """The config keys that say how a row's prompt is written, of prompts, demonstrations and preferences alike."""

    section: ClassVar[str]

    system_prompt: str | None
    system_field: Annotated[str | None, Key(before=None)]
    options_field: Annotated[str | Sequence[str] | None, Key(before=None)]
    prompt_template: str

    @property
    def template(self) -> str:
        """The template, with the options at its end where it has no other place for them."""
        place = f"{{{OPTIONS}}}"
        without = self.options_field is None or OPTIONS in fields_in(self.prompt_template)
        return self.prompt_template if without else f"{self.prompt_template}\n{place}"

    def options(self, row: Mapping[str, Any]) -> list[tuple[str, str] | None]:
        """What `placed_options` returns for the row's options; none where no key names them. Raises RowError."""
        if self.options_field is None:
            return []
        value = values_of(row, self.options_field)
        if not isinstance(self.options_field, str):  # blank cells of a table are none, also where all are blank
            value = [None if isinstance(text, str) and not text.strip() else text for text in value]
        items = value if isinstance(value, list | tuple) else []
        nested = [item for item in items if isinstance(item, Mapping | list | tuple)]
        try:
            if not all(isinstance(item, Mapping) and item.keys() in FORMS for item in nested):
                raise ValueError(f"choices must be texts, or objects with a label and a text each, got {value!r:.80}")
            return placed_options(value)
        except ValueError as error:
            raise RowError(f"in {self.options_field!r} {error}", key="options_field") from None

    def filled(
        self, turns: Sequence[Message], row: Mapping[str, Any]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """What `filled_turns` returns for the row's template, whose system message is first. Raises RowError."""
        if options := self.options(row):
            row = {**row, OPTIONS: "\n".join(f"{label}) {text}" for label, text in filter(None, options))}
        turns, question = filled_turns(turns, self.template, row)
        if self.system_field is None or turns[0]["role"] == "system" or is_empty(row, self.system_field):
            return turns, question
        system: Message = {"role": "system", "content": text_of(row, self.system_field)}
        return (system, *turns), (system, *question)

    def note_unread(self, row: Mapping[str, Any], *read: str, prompt: str | None) -> None:
        """Says, once a section, which fields of the row mean something and are in no key, nor among those `read`.

        `prompt` is the field of the row's prompt; None where another has its chat.
        """
        if prompt is not None and HISTORY in row and reads_history(row, prompt, self.template):
            read = (*read, HISTORY)
        for name in row:
            if _kind(name) not in TELLING:
                continue
            tells = row[name] not in (None, "", [], {}) and (name != "label" or isinstance(row[name], bool))
            if tells and name not in read and not self._names(name):
                _note(self.section, name)

    def _names(self, name: str) -> bool:
        ends = "_field", "_fields", "_template"
        keys = [getattr(self, key.name) for key in fields(self) if key.name.endswith(ends)]
        values = [value for key in keys if key for value in ([key] if isinstance(key, str) else key)]
        names = {part for value in values for part in (value, *fields_in(value))}
        return any(part == name or part.startswith(f"{name}.") for part in names)


@cache
def _kind(name: str) -> str:
    """The name of a field without the number of its image."""
    return "image" if _NUMBERED_IMAGE.fullmatch(name) else name


@cache
def _note(section: str, name: str) -> None:
    how = TELLING[_kind(name)].format(section=section, name=name)
    logger.warning("%s.path: rows have %r, which is not read: %s", section, name, how)
