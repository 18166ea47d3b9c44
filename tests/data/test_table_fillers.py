"""Rows of tables with types are read as the same rows of JSONL: what fills a struct of Arrow is no value.

Tools with parameters of their own, calls of them, parts and messages are composed, written in each form, and read to
equal prompts, completions and tokens.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import family_tokenizer

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.config.schema import PromptsConfig
from rlft.data import hub
from rlft.data.examples import scan_demonstrations
from rlft.data.jsonl import rows
from rlft.types import Split

PROMPTS = PromptsConfig(max_tokens=100_000, over_limit="refuse", style="chat")
PARAMETERS: dict[str, tuple[dict[str, Any], Any]] = {
    "amount": ({"type": "number", "minimum": 0.5}, 2.5),
    "from": ({"type": "string", "enum": ["EUR", "USD"]}, "EUR"),
    "into": ({"type": "string", "description": "The other currency."}, "USD"),
    "town": ({"type": "string"}, "Łódź"),
    "days": ({"type": "array", "items": {"type": "string"}}, ["Monday", "Friday"]),
    "exact": ({"type": "boolean", "default": False}, False),
    "place": ({"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
              {"lat": 1.5, "name": "x"}),
    "options": ({"type": "object", "properties": {"unit": {"type": "string"}}, "required": ["unit"]}, {"unit": "km"}),
}  # fmt: skip
"""{name: (schema, value)}. A struct has one order of fields in all rows, so rows keep this one."""


def composed(rng: random.Random, names: list[str], wordy: bool) -> dict[str, Any]:
    """A row with a tool of these parameters and a call with a part of them; `wordy`: with all fields that may be left
    out.
    """

    def maybe(**fields: Any) -> dict[str, Any]:
        return {key: value for key, value in fields.items() if wordy or rng.random() < 0.5}

    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", **maybe(description="Does it."), "parameters": {
            "type": "object", "properties": {name: PARAMETERS[name][0] for name in some}, **maybe(required=some[:1])}}}
        for i, some in enumerate((names, names[: rng.randint(1, len(names))]))
    ]  # fmt: skip
    given = [name for name in names if wordy or rng.random() < 0.6]
    arguments = {name: PARAMETERS[name][1] for name in given}
    if "place" in arguments and not wordy and rng.random() < 0.5:
        arguments["place"] = {"name": "y"}
    call = {"type": "function", "function": {"name": "tool_0", "arguments": arguments}, **maybe(id="id0")}
    said = {"content": [{"type": "text", "text": "Well."}]} if wordy or rng.random() < 0.5 else {"content": []}
    answer = {"role": "tool", "content": [{"type": "text", "text": "7"}], **maybe(name="tool_0", tool_call_id="id0")}
    last = {"role": "assistant", "content": [{"type": "text", "text": "It is seven."}], **maybe(weight=1)}
    asked = {"role": "user", "content": [{"type": "text", "text": f"Question {rng.random()}?"}]}
    messages = [asked, {"role": "assistant", **said, "tool_calls": [call]}, answer, last]
    return {"messages": messages, "tools": tools}


@cache
def cases(seed: int) -> list[dict[str, Any]]:
    rng, names = random.Random(seed), list(PARAMETERS)
    some = [sorted(rng.sample(names, rng.randint(1, len(names))), key=names.index) for _ in range(30)]
    return [composed(rng, names, True), *(composed(rng, each, False) for each in some)]


def read(table: Any, turns: str) -> list[Any]:
    plain = compose(["demonstrations=jsonl", "demonstrations.path=a.jsonl"], None, "sft")["demonstrations"]
    demonstrations = instantiate({**plain, "turns": turns}, "demonstrations")
    return [row.made for row in rows([table], demonstrations.parse, "demonstrations.path")]


def written(folder: Path, given: list[dict[str, Any]], form: str) -> Any:
    """The rows as a table of this form."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    from rlft.data.files import files_at, tables

    file = folder / f"a.{form}"
    if form == "hub":
        return hub.HubTable(datasets.Dataset.from_list(given), "some/set", "train")
    if form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in given))
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), file)
    [table] = tables(files_at(str(file), "demonstrations.path"), "demonstrations.path")
    return table


@pytest.mark.parametrize("form", ["parquet", "hub"])
def test_chats_with_tools_are_the_same_from_a_table_with_types_and_from_jsonl(form: str, tmp_path: Path) -> None:
    """31 rows of each of 2 seeds, 2 turns of each: 124 demonstrations, and their tokens with two templates."""
    num_fillers = 0
    for seed in range(2):
        given = cases(seed)
        expected = read(written(tmp_path, given, "jsonl"), "all")
        table = written(tmp_path, given, form)
        num_fillers += sum(
            json.dumps(dict(table.fields(record)), default=str).count("null") for record in table.records()
        )
        found = read(table, "all")
        assert len(found) == len(expected) == 2 * len(given)
        for one, other in zip(found, expected, strict=True):
            assert (one.prompt.messages, one.prompt.tools) == (other.prompt.messages, other.prompt.tools)
            assert (one.completion, one.fields) == (other.completion, other.fields)
        for family in ("qwen2.5", "qwen3"):
            scanned = [
                scan_demonstrations(d, family_tokenizer(family), PROMPTS, 100_000, Split.train)
                for d in (found, expected)
            ]
            assert scanned[0].fingerprint == scanned[1].fingerprint
    assert num_fillers > 500


def test_a_null_that_somebody_wrote_into_a_line_is_said(tmp_path: Path) -> None:
    """At each depth of the arguments of a call, and in a schema."""
    for arguments in ({"a": None}, {"a": {"b": None}}, {"a": [None]}, {"a": [{"b": None, "c": 1}]}):
        call = {"function": {"name": "f", "arguments": arguments}}
        schema = {"name": "f", "parameters": {"properties": {"a": {"enum": ["x", None], "default": None}}}}
        row = {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}],
            "tools": [schema],
        }
        [made] = read(written(tmp_path, [row], "jsonl"), "last")
        assert made.fields["tool_calls"][0]["function"]["arguments"] == arguments
        assert made.prompt.tools[0]["function"] == schema
