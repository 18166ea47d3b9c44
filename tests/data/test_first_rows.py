"""The first row of a file decides which fields are meant, and is refused before torch is imported."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands.launch import settled
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.data.first_rows import ANSWERS, CHATS, PROMPTS
from rlft.types import UserError

CHAT = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
SECTIONS = {"data": "train", "demonstrations": "sft", "preferences": "rm"}


def read(section: str, row: dict[str, Any], folder: Path, *words: str) -> dict[str, Any]:
    """The keys of the section, after a file with such rows was looked at."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    chosen = (f"{section}=jsonl", f"{section}.path={file}", *words)
    return settled(compose(chosen, None, SECTIONS[section]))[section]


@each(("prompt", "answer"), itertools.product(PROMPTS, ANSWERS))
def test_any_pair_of_usual_names_is_read_without_keys(prompt: str, answer: str, tmp_path: Path) -> None:
    row = {"id": 3, prompt: "What is 1 + 1?", answer: "2", "source": "x"}
    values = read("data", row, tmp_path)
    assert (values["prompt_field"], values["answer_field"]) == (prompt, answer)
    values = read("demonstrations", row, tmp_path)
    assert (values["prompt_field"], values["completion_field"]) == (prompt, answer)


@each(("prompt", "chosen", "rejected"), itertools.product(PROMPTS, ("chosen", "winner"), ("rejected", "loser")))
def test_pairs(prompt: str, chosen: str, rejected: str, tmp_path: Path) -> None:
    values = read("preferences", {prompt: "1 + 1?", chosen: "2", rejected: "3"}, tmp_path)
    assert [values[f"{key}_field"] for key in ("prompt", "chosen", "rejected")] == [prompt, chosen, rejected]


@each(("name", "section"), itertools.product(CHATS, ("data", "demonstrations")))
def test_chats(name: str, section: str, tmp_path: Path) -> None:
    values = read(section, {name: CHAT}, tmp_path)
    assert values["messages_field"] == name
    assert values.get("answer_field") is None


@each(("prompt", "answer"), itertools.product(PROMPTS, ANSWERS))
def test_a_name_of_ones_own_stays_and_the_others_are_guessed(prompt: str, answer: str, tmp_path: Path) -> None:
    values = read("data", {prompt: "1 + 1?", "gold": "2"}, tmp_path, "data.answer_field=gold")
    assert (values["prompt_field"], values["answer_field"]) == (prompt, "gold")
    values = read("data", {"asked": "1 + 1?", answer: "2"}, tmp_path, "data.prompt_field=asked")
    assert (values["prompt_field"], values["answer_field"]) == ("asked", answer)
    row = {prompt: "1 + 1?", "accepted": "2", "worst": "3"}
    values = read("preferences", row, tmp_path, "preferences.rejected_field=worst")
    assert [values[f"{key}_field"] for key in ("prompt", "chosen", "rejected")] == [prompt, "accepted", "worst"]


@each(
    ("row", "words", "read_with"),
    [
        ({"question": "1 + 1?", "problem": "1 + 1?", "answer": "2"}, (), ("prompt", "answer")),
        ({"question": "?", "answer": "2", "response": "3"}, ("data.answer_field=output",), ("question", "output")),
        ({"instruction": "Add.", "input": "1 and 1", "output": "2"}, (), ("prompt", "output")),
        ({"text": "1 + 1?", "answer": "2"}, (), ("prompt", "answer")),
        ({"prompt": "1 + 1?", "answer": "2"}, ("data.answer_field=null",), ("prompt", None)),
        ({"question": "1 + 1?", "answer": "2"}, ("data.answer_field=null",), ("question", None)),
        ({"messages": CHAT}, ("data.answer_field=null",), ("prompt", None)),
        ({"messages": CHAT}, ("data.messages_field=messages", "data.answer_field=null"), ("prompt", None)),
    ],
)
def test_what_a_row_leaves_open_is_not_guessed(
    row: dict[str, Any], words: tuple[str, ...], read_with: tuple[str, str | None], tmp_path: Path
) -> None:
    values = read("data", row, tmp_path, *words)
    assert (values["prompt_field"], values["answer_field"]) == read_with


NEEDED = {  # {section: {kind of row: (a row, keys of fields without one of which it cannot be read)}}
    "data": {
        "usual": ({"prompt": "1 + 1?", "answer": "2"}, ("prompt_field", "answer_field", "messages_field")),
        "guessed": ({"question": "1 + 1?", "response": "2"}, ("prompt_field", "answer_field", "messages_field")),
        "chat": ({"messages": CHAT}, ("prompt_field", "answer_field", "messages_field")),
        "chat with an answer": ({"conversation": CHAT[:1], "output": "2"}, ("answer_field", "messages_field")),
    },
    "demonstrations": {
        "usual": ({"prompt": "1 + 1?", "completion": "2"}, ("prompt_field", "completion_field")),
        "guessed": ({"problem": "1 + 1?", "solution": "2"}, ("prompt_field", "completion_field")),
        "chat": ({"conversations": CHAT}, ("messages_field",)),
    },
    "preferences": {
        "usual": (
            {"prompt": "?", "chosen": "2", "rejected": "3"}, ("prompt_field", "chosen_field", "rejected_field"),
        ),
        "guessed": (
            {"query": "?", "winner": "2", "loser": "3"}, ("prompt_field", "chosen_field", "rejected_field"),
        ),
    },
}  # fmt: skip
WRONG = [
    (command, section, kind, key)
    for section, commands in {
        "data": ("train", "sample", "eval", "plan", "reward try"),
        "demonstrations": ("sft",),
        "preferences": ("rm", "dpo"),
    }.items()
    for kind, (_, keys) in NEEDED[section].items()
    for key in keys
    for command in (commands if kind == "guessed" else commands[:1])
]  # fmt: skip


@each(("command", "section", "kind", "key"), WRONG)
def test_a_wrong_name_of_ones_own_is_refused_by_its_key_with_the_fields_of_the_row(
    command: str, section: str, kind: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, _ = NEEDED[section][kind]
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for wrong, remedy in (("nope", "name one of these"), (f"{[*row][-1]}x", f"did you mean {[*row][-1]}?")):
        words = [*command.split(), f"{section}=jsonl", f"{section}.path={file}", f"{section}.{key}={wrong}"]
        assert cli.run([*words, *["model.path=embedded:tiny-arithmetic"] * (command != "reward try")]) == 2
        fields = ", ".join(map(repr, row))
        said = f"rlft: {section}.{key}: {file}:1: there is no field {wrong!r}, only {fields}; {remedy}"
        assert capsys.readouterr().err.splitlines() == [said]


def test_rows_that_are_read_as_they_are_keep_their_keys(tmp_path: Path) -> None:
    row = {"prompt": "1 + 1?", "answer": "2", "question": "2 + 2?", "response": "4"}
    assert read("data", row, tmp_path)["prompt_field"] == "prompt"
    assert read("data", row | {"q": "?"}, tmp_path, "data.prompt_field=q")["prompt_field"] == "q"


def test_a_table_is_read_and_the_guess_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (tmp_path / "mine.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("problem", "solution"), ("1 + 1?", "2")])
    plain = settled(compose(("data=jsonl", f"data.path={tmp_path / 'mine.csv'}"), None, "train"))
    assert (plain["data"]["prompt_field"], plain["data"]["answer_field"]) == ("problem", "solution")
    said = "data.path: its rows lack fields that the keys name, and are read with "
    assert caplog.messages == [f"{said}data.prompt_field=problem data.answer_field=solution"]


@pytest.mark.parametrize("keys", [{}, {"prompt_field": "prompt", "answer_field": "answer"}])
def test_data_of_ones_own_class_are_not_looked_into(
    keys: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "class Rows:\n    def __init__(self, path, **keys):\n        self.path = path\n"
    (tmp_path / "rows_of_mine.py").write_text(source)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    plain = compose(("data=arithmetic",), None, "train")
    own = {**plain, "data": {"_target_": "rows_of_mine.Rows", "path": str(tmp_path / "rows.jsonl"), **keys}}
    assert settled(own)["data"] == own["data"]


def test_a_first_record_without_rows_leaves_the_keys(tmp_path: Path) -> None:
    nested = ("data.rows=items", "data.prompt_field=problem")
    assert read("data", {"items": []}, tmp_path, *nested)["prompt_field"] == "problem"
    assert (
        read("data", {"items": [{"question": "1 + 1?", "answer": "2"}]}, tmp_path, *nested)["prompt_field"]
        == "question"
    )


def test_a_held_out_file_is_looked_at_too(tmp_path: Path) -> None:
    for name, row in (("train", {"prompt": "1 + 1?", "answer": "2"}), ("test", {"q": "1 + 2?", "answer": "3"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    files = (f"data.path={tmp_path / 'train.jsonl'}", f"data.held_out_path={tmp_path / 'test.jsonl'}")
    with pytest.raises(UserError, match=r"data.held_out_path: .*test.jsonl:1: there is no field 'prompt'"):
        resolve(settled(compose(("+recipe=grpo_arithmetic", "data=jsonl", *files), None, "train")))


SCRIPT = """
import sys
from rlft import cli
from rlft.commands.launch import settled
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.types import UserError
try:
    resolve(settled(compose(sys.argv[1:], None, "train")))
except UserError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_a_wrong_field_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "1 + 1?", "answer": "2"}\n')
    words = ("+recipe=grpo_arithmetic", "data=jsonl", f"data.path={file}")
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True)
    problem = f"data.path: {file}:1: there is no field 'prompt', only 'q', 'answer'"
    remedy = "fix or remove that line, or set data.prompt_field to another"
    assert done.stdout.splitlines() == [f"{problem}; {remedy}", "False"]


def test_a_field_that_several_keys_name_is_not_blamed_on_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "1 + 1?"}\n')
    words = ("+recipe=grpo_arithmetic", "data=jsonl", f"data.path={file}", "data.image_field=prompt")
    with pytest.raises(UserError, match=r"name other fields \(data\.\*_field\)"):
        resolve(settled(compose(words, None, "train")))
