"""How the prompt of a row is written, whatever is learned of the row, and what of a row nobody reads.

In the template of a prompt's last message `{name}` stands for a field of the row.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from rlft.config.keys import Key
from rlft.data import fields as row_fields
from rlft.tokens.options import FORMS, placed_options
from rlft.types import Message, UserError, require

logger = logging.getLogger(__name__)

PLACEHOLDER = "{question}"
OPTIONS = "options"  # the placeholder of the options in a template, and their name in a prompt's metadata
TELLING: Mapping[str, str] = {
    **dict.fromkeys(("system", "system_prompt"), "{section}.system_field={name} makes it the system message"),
    **dict.fromkeys(("input", "context", "passage"), "{section}.prompt_template='{{{name}}} {{question}}' shows it"),
    **dict.fromkeys(("choices", "options"), "{section}.options_field={name} shows them"),
    **dict.fromkeys(("image", "images"), "data.image_field={name} reads it in prompts"),
    **dict.fromkeys(("audio", "audios", "video", "videos"), "no model is given it"),
    row_fields.HISTORY: "pairs of texts, [[question, answer], ..], are earlier turns of a prompt that is a text",
    row_fields.TOOLS: "demonstrations and preferences show them, prompts those of an environment",
    "label": "preferences read it: preferences.completions_field=<the completion> preferences.scores_field={name}",
}
"""{field of a row that has a meaning for its prompt: how it is read}: it is noted where no key reads it."""

_NUMBERED_IMAGE = re.compile(r"image_?\d+")
_PARTS = re.compile(r"\\[A-Za-z]{2,}(?:\{[^{}]*\})+|\{\{(?P<braced>[^{}\n]+)\}\}|(?P<space>\s*)\{(?P<name>[^{}\n]+)\}")
"""A LaTeX command with its arguments, which is no placeholder; a name in double braces, which stands in single ones; a
placeholder with the white space before it."""
_ARGUMENT = re.compile(r"(?<=\w)\{([A-Za-z_]\w*)\}")
"""The argument of a LaTeX command that could be the name of a field."""
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.(?:\w+|\*))*")


def placeholders(template: str) -> list[str]:
    r"""The names in the placeholders of a template.

    >>> placeholders(r"{Body} {question} in \boxed{answer}, as {{answer}}")
    ['Body', 'question']
    """
    return [match["name"] for match in _PARTS.finditer(template) if match["name"]]


def fields_in(template: str) -> list[str]:
    """The names in the placeholders of a template that can be those of fields."""
    return [name for name in placeholders(template) if _IDENTIFIER.fullmatch(name)]


def takes_question(template: str) -> bool:
    """Whether {question} is in the template, which may take other fields of the row instead."""
    return PLACEHOLDER[1:-1] in placeholders(template)


def check_template(template: str, key: str, answer_field: str | None = None, *, rows: bool = True) -> None:
    """Raises UserError, naming `key`, for a template without a placeholder, or with one for the reference answer.

    `answer_field` is the answer's field, or a template of several. Without `rows`, only {question} is a placeholder.
    """
    names = fields_in(template) if rows else []
    remedy = f"put {PLACEHOLDER}{', or the name of a field in braces,' * rows} where the question goes"
    require(names or takes_question(template), key, f"has no {PLACEHOLDER}", got=repr(template), remedy=remedy)
    answers = [answer_field, *placeholders(answer_field)] if answer_field else []
    shown = next((name for name in names if name in answers and name != PLACEHOLDER[1:-1]), None)
    remedy = f"leave {{{shown}}} out, or write {{{{{shown}}}}} for the word in braces"
    require(shown is None, key, "would show the reference answer to the model", got=repr(template), remedy=remedy)


def for_typed(template: str) -> str:
    """The template for a question that somebody types; the plain question where a row's other fields are needed."""
    others = {*fields_in(template)} - {PLACEHOLDER[1:-1]}
    return PLACEHOLDER if others else template


def check_answer_template(template: str, key: str) -> None:
    r"""Refuses LaTeX with a field's name as its argument, \boxed{answer}: it would be the same text in every row."""
    latex = next((match[0] for match in _PARTS.finditer(template) if _ARGUMENT.search(match[0])), None)
    if latex is None or not placeholders(template):
        return
    field, word = _ARGUMENT.sub(r"{ {\1} }", latex), _ARGUMENT.sub(r"{{\1}}", latex)
    remedy = f"write {field} for the field, or {word} for the word"
    raise UserError(key, f"has {latex}, the same text for every row", got=repr(template), remedy=remedy)


def filled(
    template: str, question: str | None, fields: Mapping[str, Any] | None = None, key: str = "prompt_template"
) -> tuple[str, str]:
    r"""(the template with the row's values in place of its placeholders, those values in the order of their names).

    {question} is the question, any other name a field of the row (see `value_of`), a text or number; without a question
    {question} is a field, too. A blank one takes the white space before it with it, the first one that behind it.
    Without a row other names stay as they are.

    >>> filled("{Body} {question}\n\n{input}", "How many?", {"Body": "2 apples.", "input": ""})
    ('2 apples. How many?', '2 apples.\x1f\x1fHow many?')

    Raises RowError: naming `key`, if the row has no such field, or it is of another type.
    """
    values, begins_blank = {} if question is None else {PLACEHOLDER[1:-1]: question}, False

    def put(match: re.Match[str]) -> str:
        name = match["name"]
        if match["braced"]:
            return f"{{{match['braced']}}}"
        if name is None or (name not in values and fields is None):
            return match[0]
        if name not in values:
            try:
                value = row_fields.value_of(fields or {}, name)
            except row_fields.RowError as error:
                if not _IDENTIFIER.fullmatch(name):
                    return match[0]
                remedy = f"name a field, or write {{{{{name}}}}} for the word in braces"
                raise row_fields.MissingField(str(error), remedy=remedy, key=key) from None
            values[name] = "" if value is None else row_fields.as_text(value, name, numbers=True, blank=True)
        if values[name].strip():
            return match["space"] + values[name]
        nonlocal begins_blank
        begins_blank = begins_blank or match.start() == 0
        return ""

    text = _PARTS.sub(put, template)
    text = text.lstrip() if begins_blank else text
    return text, "\x1f".join(values[name] for name in sorted(set(placeholders(template)) & set(values)))


def filled_turns(
    turns: Sequence[Message], template: str, fields: Mapping[str, Any] | None = None
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """(the turns with the template, filled with the last one, in place of the last; the same with its values alone).

    The values alone are the question, by which equal questions are known whatever the template says around them.
    """
    *earlier, last = turns
    if last["role"] != "user":  # the result of a tool
        return tuple(turns), tuple(turns)
    text, values = filled(template, last["content"], fields)
    return (*earlier, {**last, "content": text}), (*earlier, {**last, "content": values})


def prompt_of(question: str, system_prompt: str | None, template: str) -> tuple[Message, ...]:
    """The messages of a prompt whose question is no field of a row."""
    return chat(filled_turns([{"role": "user", "content": question}], template)[0], system_prompt)


def question_of(fields: Mapping[str, Any], name: str, template: str) -> tuple[Message, ...]:
    """The turns of the prompt in the field, which is not read if the template takes other fields in its place.

    A prompt that is a text follows the turns in the row's history. Raises RowError.
    """
    if not takes_question(template):
        return (*row_fields.earlier_turns(fields), {"role": "user", "content": ""})
    turns = row_fields.turns_of(fields, name)
    return (*row_fields.earlier_turns(fields), *turns) if reads_history(fields, name, template) else turns


def reads_history(fields: Mapping[str, Any], name: str, template: str) -> bool:
    """Whether the turns of the row's history stand before the prompt in the field, which then is no chat."""
    is_history = isinstance(fields.get(row_fields.HISTORY), list | tuple)
    if not is_history or not takes_question(template):
        return is_history
    return row_fields.has(fields, name) and not isinstance(row_fields.value_of(fields, name), list | tuple)


def chat(turns: Sequence[Message], system_prompt: str | None, examples: Sequence[Message] = ()) -> tuple[Message, ...]:
    """The messages of a prompt: a system message, examples, then the turns.

    A system message at the start of `turns` takes the place of `system_prompt`.

    >>> chat([{"role": "user", "content": "2 + 2?"}], "Add.")
    ({'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '2 + 2?'})
    """
    system: Sequence[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    if turns[0]["role"] == "system":
        system, turns = turns[:1], turns[1:]
    return (*system, *examples, *turns)


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
        without = self.options_field is None or OPTIONS in fields_in(self.prompt_template)
        return self.prompt_template if without else f"{self.prompt_template}\n{{{OPTIONS}}}"

    def options(self, row: Mapping[str, Any]) -> list[tuple[str, str] | None]:
        """What `placed_options` returns for the row's options; none where no key names them. Raises RowError."""
        if self.options_field is None:
            return []
        value = row_fields.values_of(row, self.options_field)
        if not isinstance(self.options_field, str):  # blank cells of a table are none, also where all are blank
            value = [None if isinstance(text, str) and not text.strip() else text for text in value]
        items = value if isinstance(value, list | tuple) else []
        nested = [item for item in items if isinstance(item, Mapping | list | tuple)]
        try:
            if not all(isinstance(item, Mapping) and item.keys() in FORMS for item in nested):
                raise ValueError(f"choices must be texts, or objects with a label and a text each, got {value!r:.80}")
            return placed_options(value)
        except ValueError as error:
            raise row_fields.RowError(f"in {self.options_field!r} {error}", key="options_field") from None

    def filled(
        self, turns: Sequence[Message], row: Mapping[str, Any]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """What `filled_turns` returns for the row's template, whose system message is first. Raises RowError."""
        if options := self.options(row):
            row = {**row, OPTIONS: "\n".join(f"{label}) {text}" for label, text in filter(None, options))}
        turns, question = filled_turns(turns, self.template, row)
        if self.system_field is None or turns[0]["role"] == "system" or row_fields.is_empty(row, self.system_field):
            return turns, question
        system: Message = {"role": "system", "content": row_fields.text_of(row, self.system_field)}
        return (system, *turns), (system, *question)

    def note_unread(self, row: Mapping[str, Any], *read: str, prompt: str | None) -> None:
        """Says, once a section, which fields of the row mean something and are in no key, nor among those `read`.

        `prompt` is the field of the row's prompt; None where another has its chat.
        """
        if prompt is not None and row_fields.HISTORY in row and reads_history(row, prompt, self.template):
            read = (*read, row_fields.HISTORY)
        for name in row:
            if _kind(name) not in TELLING:
                continue
            tells = row[name] not in (None, "", [], {}) and (name != "label" or isinstance(row[name], bool))
            if tells and name not in read and not self._names(name):
                _note(self.section, name)

    def _names(self, name: str) -> bool:
        ends = "_field", "_fields", "_template"
        keys = [getattr(self, key.name) for key in dataclasses.fields(self) if key.name.endswith(ends)]
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
