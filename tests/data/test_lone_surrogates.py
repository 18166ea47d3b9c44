"""Half a character (a lone surrogate) in data or config is refused by file and line, or by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.config.resolved import build
from rlft.data.examples import load_texts
from rlft.types import Split, UserError

HALF = "\ud800"
WHOLE = "\U0001f600"
ROWS: dict[str, list[dict[str, Any]]] = {
    "data": [
        {"prompt": f"x{HALF}", "answer": "1"},
        {"prompt": "x", "answer": f"1{HALF}"},
        {"prompt": "x", "answer": "1", f"other{HALF}": 1},
    ],
    "demonstrations": [
        {"prompt": f"x{HALF}", "completion": "1"},
        {"prompt": "x", "completion": f"1{HALF}"},
        {"messages": [{"role": "system", "content": HALF}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": HALF}]},
    ],
    "preferences": [
        {"prompt": f"x{HALF}", "chosen": "a", "rejected": "b"},
        {"prompt": "x", "chosen": HALF, "rejected": "b"},
        {"prompt": "x", "chosen": "a", "rejected": HALF},
    ],
}
COMMANDS = {"data": "train", "demonstrations": "sft", "preferences": "rm"}
GOOD: dict[str, dict[str, Any]] = {
    "data": {"prompt": f"a {WHOLE}", "answer": "1"},
    "demonstrations": {"prompt": f"a {WHOLE}", "completion": "1"},
    "preferences": {"prompt": f"a {WHOLE}", "chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("kind", ["jsonl", "hub"])
@pytest.mark.parametrize("section", ROWS)
def test_a_row_with_half_a_character_is_refused_by_file_and_line(section: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    choice = "gsm8k" if (section, kind) == ("data", "hub") else kind
    words = [f"{section}={choice}", f"{section}.path={file}"]
    if choice == "gsm8k":
        words += ["data.prompt_field=prompt", "data.answer_field=answer", "data.answer_pattern=null"]
    loader = instantiate(compose(words, command=COMMANDS[section])[section], section)
    for row in ROWS[section]:
        file.write_text(f"{json.dumps(GOOD[section])}\n{json.dumps(row)}\n")  # json.dumps escapes both
        with pytest.raises(UserError) as refused:
            loader.load(Split.train)
        assert refused.value.key == f"{section}.path"
        assert f"{file}:2: holds the lone surrogate \\ud800, which is not text" in str(refused.value)


@pytest.mark.parametrize("row", [{"text": HALF}, {"text": "x", "given": HALF}])
def test_so_is_a_pretraining_text(row: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"pretrain.path: .*texts.jsonl:1: holds the lone surrogate"):
        load_texts(str(file), "text", "given" if "given" in row else None)


def test_whole_characters_that_json_writes_as_two_halves_are_read(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({**GOOD["data"], "prompt": f"{i} {WHOLE}"}) for i in range(40)))
    assert "\\ud83d\\ude00" in file.read_text()
    prompts = instantiate(compose(["data=jsonl", f"data.path={file}"])["data"], "data").load(Split.train)
    assert all(prompt.messages[-1]["content"].endswith(WHOLE) for prompt in prompts)


@pytest.mark.parametrize(
    ("yaml", "key"),
    [
        ('data:\n  system_prompt: "a \\ud800"\n', "data.system_prompt"),
        ('data:\n  answer_remove: ["\\udfff"]\n', "data.answer_remove"),
        ('name: "\\ud800"\n', "name"),
    ],
)
def test_half_a_character_in_a_recipe_is_refused_by_its_key(yaml: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n# Mine.\n{yaml}")
    composed = compose(["data=jsonl", "data.path=x", "+recipe=mine"], tmp_path)
    with pytest.raises(UserError) as refused:
        build(composed)
    assert refused.value.key == key
    assert "holds the lone surrogate" in refused.value.problem
