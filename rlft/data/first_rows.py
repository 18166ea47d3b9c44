"""The first rows of local data, read before torch is imported: which fields they have, and whether they are right.

Where the first lacks a field that a key names by one of its usual names, and has just one of the others, the key is set
to that one, so that a file of questions and responses needs no keys. The guess is printed, and recorded in the run's
config.yaml. A name of the user's own is never replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlft.config.instantiate import instantiate
from rlft.data.fields import RowError, has
from rlft.data.files import files_at, tables
from rlft.data.tables import Record, Table, rows_of
from rlft.types import UserError

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
    """The composed config, in which keys of fields that the first row lacks name the fields that it has instead."""
    changed = dict(plain)
    for section in NAMES:
        values = plain.get(section) or {}
        if guessed := _guessed(values, section):
            changed[section] = {**values, **guessed}
            words = " ".join(f"{section}.{key}={'null' if name is None else name}" for key, name in guessed.items())
            logger.warning("%s.path: its rows lack fields that the keys name, and are read with %s", section, words)
    return changed


def _guessed(values: Mapping[str, Any], section: str) -> dict[str, str | None]:
    """{key: the field that is meant}; empty where the first row can be read, or cannot be read with a guess either."""
    path, key = values.get("path"), f"{section}.path"
    is_ours = str(values.get("_target_")).startswith("rlft.data.") and NAMES[section].keys() <= values.keys()
    if not is_ours or not isinstance(path, str) or not Path(path).expanduser().exists():
        return {}
    with suppress(UserError, RowError):  # reading the data says what is wrong
        for record, table in _first_records(tables(files_at(path, key), key, values.get("rows"))):
            row_id, fields = next(table.rows(record), ("", {}))
            if not fields or _can_be_read(values, section, row_id, fields):
                return {}
            guessed = _names_in(fields, values, section)
            return guessed if _can_be_read({**values, **guessed}, section, row_id, fields) else {}
    return {}


def _can_be_read(values: Mapping[str, Any], section: str, row_id: str, fields: Mapping[str, Any]) -> bool:
    component: Any = instantiate(values, section)
    with suppress(RowError):
        return bool(component.parse(fields, row_id))
    return False


def _names_in(fields: Mapping[str, Any], values: Mapping[str, Any], section: str) -> dict[str, str | None]:
    chats = [name for name in CHATS if has(fields, name)]
    is_usual = {key: values[key] in (None, *others) for key, others in NAMES[section].items()}  # and not the user's own
    if len(chats) == 1 and not has(fields, values["prompt_field"]) and is_usual["prompt_field"]:
        guessed: dict[str, str | None] = {"messages_field": chats[0]}
        if section == "data" and is_usual["answer_field"] and not has(fields, values["answer_field"]):
            guessed["answer_field"] = None  # the chat's last message
        return guessed
    guessed = {}
    for key, others in NAMES[section].items():
        found = [name for name in others if has(fields, name)]
        needs_input = found == ["instruction"] and has(fields, "input")  # Alpaca's second half of the question
        if len(found) == 1 and is_usual[key] and not needs_input and not has(fields, values[key]):
            guessed[key] = found[0]
    return guessed
