"""The first rows of local data, read before torch is imported: which fields they have, and whether they are right.

Where the first lacks a field that a key names by one of its usual names, and has just one of the others, the key is set
to that one, so that a file of questions and responses needs no keys. The guess is printed, and recorded in the run's
config.yaml. A name of the user's own is never replaced: one that the row lacks is refused if it cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlft.config.choices import closest
from rlft.config.instantiate import instantiate
from rlft.data.fields import RowError, has, value_of
from rlft.data.files import files_at, tables
from rlft.data.tables import Record, Table, nested_rows, rows_of
from rlft.data.templates import fields_in
from rlft.types import Mistakes, UserError

logger = logging.getLogger(__name__)

PROMPTS = ("prompt", "question", "problem", "instruction", "query")
ANSWERS = ("answer", "response", "output", "solution", "completion", "target", "reference", "ground_truth")
CHATS = ("messages", "conversations", "conversation")
NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "data": {"prompt_field": PROMPTS, "answer_field": ANSWERS},
    "demonstrations": {"prompt_field": PROMPTS, "completion_field": ANSWERS},
    "preferences": {
        "prompt_field": PROMPTS,
        "chosen_field": ("chosen", "accepted", "preferred", "winner", "better"),
        "rejected_field": ("rejected", "dispreferred", "loser", "worse"),
    },
}
"""{section: {key: names of the field that it names, of which files have one}}."""
SMALL_BYTES = 2**20


def check_first_rows(
    files: Iterable[Table], parse: Callable[[Mapping[str, Any], str], Iterable[Any]], key: str
) -> None:
    """Refuses files with a row that cannot be parsed, as reading them does: of the first MiB all, then the first ones.

    Raises UserError.
    """
    left = SMALL_BYTES
    for table in files:
        if is_whole := table.num_bytes < left:
            left -= table.num_bytes
        for record, _ in _first_records([table], None if is_whole else 1):
            rows_of(record, table, parse, key)


def _first_records(files: Iterable[Table], number: int | None = 1) -> Iterator[tuple[Record, Table]]:
    """The first records (None: all) of each file whose beginning can be read by itself. Raises UserError."""
    for table in files:
        if table.streams or table.num_bytes < SMALL_BYTES:
            yield from ((record, table) for record in islice(table.records(), number))


def with_guessed_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The composed config, in which keys of fields that the first row lacks name the fields that it has instead.

    Raises UserError: the row cannot be read, because it lacks fields of the user's own names.
    """
    guessed = {section: _guessed(plain.get(section) or {}, section) for section in NAMES}
    return {**plain, **{section: {**plain[section], **fields} for section, fields in guessed.items() if fields}}


def _guessed(values: Mapping[str, Any], section: str) -> dict[str, str | None]:
    """{key: the field that is meant}; empty where the first row can be read, or has no field like a missing one."""
    path, key = values.get("path"), f"{section}.path"
    is_ours = str(values.get("_target_")).startswith("rlft.data.") and NAMES[section].keys() <= values.keys()
    if not is_ours or not isinstance(path, str) or not Path(path).expanduser().exists():
        return {}
    try:
        component: Any = instantiate(values, section)
        first = next(_first_records(tables(files_at(path, key), key, values.get("rows"))), None)
        row_id, fields = next(first[1].rows(first[0]), ("", {})) if first is not None else ("", {})
        if first is None or not fields or _can_be_read(component, row_id, fields):
            return {}
        guessed = _names_in(fields, values, section)
        with_guess: Any = instantiate({**values, **guessed}, section)
    except (UserError, RowError):  # reading the data says what is wrong
        return {}
    if _can_be_read(with_guess, row_id, fields):
        words = " ".join(f"{section}.{key}={'null' if name is None else name}" for key, name in guessed.items())
        logger.warning("%s.path: its rows lack fields that the keys name, and are read with %s", section, words)
    elif not nested_rows(first[1], first[0], component.parse, others=False):
        _refuse_own_names(fields, values, section, first[1].place(first[0].number))
    return guessed


def _can_be_read(component: Any, row_id: str, fields: Mapping[str, Any]) -> bool:
    with suppress(RowError):
        return bool(component.parse(fields, row_id))
    return False


def _is_usual(values: Mapping[str, Any], section: str, key: str) -> bool:
    """Whether the key names a field by one of its usual names, or none, and not by a name of the user's own."""
    return values.get(key) in (None, *NAMES[section].get(key, CHATS))


def _refuse_own_names(fields: Mapping[str, Any], values: Mapping[str, Any], section: str, place: str) -> None:
    """Refuses the user's own names of fields that this row lacks."""
    mistakes = Mistakes()
    for key in ("messages_field", *NAMES[section]):
        for name in [] if _is_usual(values, section, key) else fields_in(values[key]) or [values[key]]:
            with mistakes:
                try:
                    value_of(fields, name)
                except RowError as error:
                    remedy = f"did you mean {close}?" if (close := closest(name, fields)) else "name one of these"
                    raise UserError(f"{section}.{key}", f"{place}: {error}", remedy=remedy) from None
    mistakes.refuse()


def _names_in(fields: Mapping[str, Any], values: Mapping[str, Any], section: str) -> dict[str, str | None]:
    chats = [name for name in CHATS if has(fields, name)]
    is_usual = {key: _is_usual(values, section, key) for key in ("messages_field", *NAMES[section])}
    lacks = {key: (name := values[key]) is not None and not has(fields, name) for key in NAMES[section]}  # null: none
    if len(chats) == 1 and lacks["prompt_field"] and is_usual["prompt_field"] and is_usual["messages_field"]:
        guessed: dict[str, str | None] = {"messages_field": chats[0]}
        if section == "data" and is_usual["answer_field"] and lacks["answer_field"]:
            guessed["answer_field"] = None  # the chat's last message
        return guessed
    guessed = {}
    for key, others in NAMES[section].items():
        found = [name for name in others if has(fields, name)]
        needs_input = found == ["instruction"] and has(fields, "input")  # Alpaca's second half of the question
        if len(found) == 1 and is_usual[key] and not needs_input and lacks[key]:
            guessed[key] = found[0]
    return guessed
