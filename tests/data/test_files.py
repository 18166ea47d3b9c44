"""The same rows are the same prompts in every kind of file, and a bad row is named by its file and place."""

import bz2
import csv
import gzip
import io
import itertools
import json
import logging
import lzma
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from in_one_test import each

from rlft import cli
from rlft.commands.launch import settled
from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.data import files, jsonl
from rlft.data.examples import load_texts
from rlft.data.files import ANSWERS, CHATS, PROMPTS, files_at, tables
from rlft.data.records import Stored
from rlft.data.tables import JsonDocument, JsonLines, Parquet
from rlft.types import Split, UserError

ROWS = [{"prompt": f'Line one,\n"{i}" ä?', "answer": str(i)} for i in range(40)]


def as_csv(rows, delimiter=","):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer, row_group_size=7)
    return buffer.getvalue()


def as_lines(rows):
    return "\n".join(map(json.dumps, rows)).encode()


KINDS = {
    "a.jsonl": as_lines,
    "a.ndjson": as_lines,
    "lines.json": as_lines,
    "array.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "one_line.json": lambda rows: json.dumps(rows).encode(),
    "array.jsonl": lambda rows: json.dumps(rows).encode(),
    "data.json": lambda rows: json.dumps({"version": 1, "data": rows}, indent=1).encode(),
    "data_line.json": lambda rows: json.dumps({"data": rows}).encode(),
    "bom.json": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows).encode(),
    "a.csv": as_csv,
    "bom.csv": lambda rows: b"\xef\xbb\xbf" + as_csv(rows),
    "a.tsv": lambda rows: as_csv(rows, "\t"),
    "a.parquet": as_parquet,
    "a.jsonl.gz": lambda rows: gzip.compress(as_lines(rows)),
    "a.csv.xz": lambda rows: lzma.compress(as_csv(rows)),
    "a.json.bz2": lambda rows: bz2.compress(json.dumps(rows).encode()),
}


def read(make_data, path, **keys):
    data = make_data("jsonl", path=str(path), **keys)
    return [data.load(split) for split in Split]


def content(found):
    return [[(prompt.messages[0]["content"], prompt.answer) for prompt in prompts] for prompts in found]


@each("name", list(KINDS))
def test_rows_are_the_same_whatever_file_holds_them(make_data, tmp_path, monkeypatch, name):
    (tmp_path / "same.jsonl").write_bytes(as_lines(ROWS))
    expected = content(read(make_data, tmp_path / "same.jsonl"))
    assert sum(map(len, expected)) == 40
    (tmp_path / name).write_bytes(KINDS[name](ROWS))
    held = read(make_data, tmp_path / name)
    assert content(held) == expected
    with monkeypatch.context() as patch:  # everything is large
        patch.setattr(jsonl, "STREAMED_BYTES", 0)
        large = read(make_data, tmp_path / name)
        assert all(isinstance(prompts, Stored) for prompts in large)
        assert [list(prompts) for prompts in large] == held
        assert [[prompts[i] for i in range(len(prompts) - 1, -1, -1)][::-1] for prompts in large] == held


def test_the_files_of_a_folder_are_read_as_one(make_data, tmp_path, monkeypatch):
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for i, name in enumerate(("train-00000-of-00002.parquet", "train-00001-of-00002.parquet")):
        (folder / "data" / name).write_bytes(as_parquet(ROWS[20 * i : 20 * i + 20]))
    (folder / "README.md").write_text("x")
    (folder / "dataset_infos.json").write_text("{}")
    held = read(make_data, folder)
    found = [row for split in content(held) for row in split]
    assert sorted(found) == sorted((row["prompt"], row["answer"]) for row in ROWS)
    assert {prompt.id for prompts in held for prompt in prompts} >= {"train-00001-of-00002.parquet:0"}
    monkeypatch.setattr(jsonl, "STREAMED_BYTES", 0)
    assert [list(prompts) for prompts in read(make_data, folder)] == held


ABSENT = "has no files of the split 'train', only "
LAYOUTS = [  # (files, those that are read, or why none is)
    ("b.jsonl a.jsonl .hidden.jsonl", ["a.jsonl", "b.jsonl"]),
    ("train.csv test.csv", ["train.csv"]),
    ("train.jsonl train-extra.jsonl training.jsonl", ["train-extra.jsonl", "train.jsonl"]),
    ("train/0000.parquet train/0001.parquet", ["0000.parquet", "0001.parquet"]),
    ("train.jsonl train.jsonl.gz train.parquet", ["train.jsonl"]),
    ("train_prefs-0.parquet test_prefs-0.parquet", f"{ABSENT}test_prefs-0.parquet,"),
    ("test.jsonl", f"{ABSENT}test.jsonl"),
    ("a.jsonl b.csv", "has files of several kinds (.csv, .jsonl)"),
    ("README.md", "the folder has no data"),
]


@each(("names", "expected"), LAYOUTS)
def test_a_folder_is_read_by_the_names_in_it(tmp_path_factory, names, expected):
    folder = tmp_path_factory.mktemp("layout")
    for name in names.split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    if isinstance(expected, list):
        assert [file.name for file in files_at(str(folder), "data.path")] == expected
        return
    with pytest.raises(UserError) as refusal:
        files_at(str(folder), "data.path")
    assert expected in str(refusal.value)
    assert str(refusal.value).startswith("data.path: ")


def test_a_folder_holds_out_its_own_test_files_where_that_is_said(make_data, tmp_path, caplog):
    (tmp_path / "train.csv").write_bytes(as_csv(ROWS[:30]))
    (tmp_path / "test.csv").write_bytes(as_csv(ROWS[30:]))
    with caplog.at_level(logging.WARNING):
        assert sum(map(len, read(make_data, tmp_path))) == 30
    assert "data.path: the folder's files of the split test are not used; data.held_out_path=" in caplog.text
    train, held_out = read(make_data, tmp_path, held_out_path=str(tmp_path))
    assert [len(train), len(held_out)] == [30, 10]
    assert held_out[0].id == "test.csv:2"  # below the header


def test_a_file_is_known_by_its_first_bytes_where_its_name_says_nothing(tmp_path):
    kinds = {"rows.txt": as_lines(ROWS), "rows": as_parquet(ROWS), "rows.data": json.dumps(ROWS).encode()}
    for name, bytes_ in kinds.items():
        (tmp_path / name).write_bytes(bytes_)
    found = [tables([tmp_path / name], "data.path")[0] for name in kinds]
    assert [type(table) for table in found] == [JsonLines, Parquet, JsonDocument]


def test_preferences_demonstrations_and_texts_are_read_from_the_same_files(makers, tmp_path):
    rows = [{"prompt": f"{i}?", "completion": "x", "chosen": "a", "rejected": "b"} for i in range(40)]
    for name in ("a.csv", "array.json", "a.parquet", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(KINDS[name](rows))
        keys = {"path": str(tmp_path / name), "held_out_fraction": 0.5}
        demonstrations = [makers["demonstrations"]("jsonl", **keys).load(split) for split in Split]
        rankings = [makers["preferences"]("jsonl", **keys).load(split).rankings for split in Split]
        texts = load_texts(str(tmp_path / name), "prompt", None)
        assert sum(map(len, demonstrations)) == sum(map(len, rankings)) == len(texts) == 40
    nested = [{"meta": {"text": "one"}}, {"meta": {"text": "two"}}]
    for name in ("array.json", "a.parquet"):
        (tmp_path / name).write_bytes(KINDS[name](nested))
        assert [text.text for text in load_texts(str(tmp_path / name), "meta.text", None)] == ["one", "two"]


# -- the first rows ----------------------------------------------------------------------------------------------------
CHOICES = list(itertools.product(("chosen", "winner"), ("rejected", "loser")))
CHAT = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
SECTIONS = {"data": "train", "demonstrations": "sft", "preferences": "rm"}


def keys_read(section, row, folder, *words):
    """The keys of the section, after a file with such rows was looked at."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    chosen = (f"{section}=jsonl", f"{section}.path={file}", *words)
    return settled(compose(chosen, None, SECTIONS[section]))[section]


PAIRS = [*((prompt, ANSWERS[0]) for prompt in PROMPTS), *((PROMPTS[0], answer) for answer in ANSWERS[1:])]
"""Each name of either kind: which field is the prompt does not depend on which one is the answer."""


@each(("prompt", "answer"), PAIRS)
def test_any_pair_of_usual_names_is_read_without_keys(prompt, answer, tmp_path):
    row = {"id": 3, prompt: "What is 1 + 1?", answer: "2", "source": "x"}
    values = keys_read("data", row, tmp_path)
    assert (values["prompt_field"], values["answer_field"]) == (prompt, answer)
    values = keys_read("demonstrations", row, tmp_path)
    assert (values["prompt_field"], values["completion_field"]) == (prompt, answer)


@each(("prompt", "chosen", "rejected"), [(p, *CHOICES[i % len(CHOICES)]) for i, p in enumerate(PROMPTS)])
def test_pairs(prompt, chosen, rejected, tmp_path):
    values = keys_read("preferences", {prompt: "1 + 1?", chosen: "2", rejected: "3"}, tmp_path)
    assert [values[f"{key}_field"] for key in ("prompt", "chosen", "rejected")] == [prompt, chosen, rejected]


@each(("name", "section"), itertools.product(CHATS, ("data", "demonstrations")))
def test_chats(name, section, tmp_path):
    values = keys_read(section, {name: CHAT}, tmp_path)
    assert values["messages_field"] == name
    assert values.get("answer_field") is None


@each(("prompt", "answer"), PAIRS)
def test_a_name_of_ones_own_stays_and_the_others_are_guessed(prompt, answer, tmp_path):
    values = keys_read("data", {prompt: "1 + 1?", "gold": "2"}, tmp_path, "data.answer_field=gold")
    assert (values["prompt_field"], values["answer_field"]) == (prompt, "gold")
    values = keys_read("data", {"asked": "1 + 1?", answer: "2"}, tmp_path, "data.prompt_field=asked")
    assert (values["prompt_field"], values["answer_field"]) == ("asked", answer)
    row = {prompt: "1 + 1?", "accepted": "2", "worst": "3"}
    values = keys_read("preferences", row, tmp_path, "preferences.rejected_field=worst")
    assert [values[f"{key}_field"] for key in ("prompt", "chosen", "rejected")] == [prompt, "accepted", "worst"]


@each(("row", "words", "read_with"), [
    ({"question": "1 + 1?", "problem": "1 + 1?", "answer": "2"}, (), ("prompt", "answer")),
    ({"question": "?", "answer": "2", "response": "3"}, ("data.answer_field=output",), ("question", "output")),
    ({"instruction": "Add.", "input": "1 and 1", "output": "2"}, (), ("prompt", "output")),
    ({"text": "1 + 1?", "answer": "2"}, (), ("prompt", "answer")),
    ({"prompt": "1 + 1?", "answer": "2"}, ("data.answer_field=null",), ("prompt", None)),
    ({"question": "1 + 1?", "answer": "2"}, ("data.answer_field=null",), ("question", None)),
    ({"messages": CHAT}, ("data.answer_field=null",), ("prompt", None)),
    ({"messages": CHAT}, ("data.messages_field=messages", "data.answer_field=null"), ("prompt", None)),
])  # fmt: skip
def test_what_a_row_leaves_open_is_not_guessed(row, words, read_with, tmp_path):
    values = keys_read("data", row, tmp_path, *words)
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
        "usual": ({"prompt": "?", "chosen": "2", "rejected": "3"}, ("prompt_field", "chosen_field", "rejected_field")),
        "guessed": ({"query": "?", "winner": "2", "loser": "3"}, ("prompt_field", "chosen_field", "rejected_field")),
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
    command, section, kind, key, tmp_path, capsys
):
    row, _ = NEEDED[section][kind]
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for wrong, remedy in (("nope", "name one of these"), (f"{[*row][-1]}x", f"did you mean {[*row][-1]}?")):
        words = [*command.split(), f"{section}=jsonl", f"{section}.path={file}", f"{section}.{key}={wrong}"]
        assert cli.run([*words, *["model.path=embedded:tiny-arithmetic"] * (command != "reward try")]) == 2
        fields = ", ".join(map(repr, row))
        said = f"rlft: {section}.{key}: {file}:1: there is no field {wrong!r}, only {fields}; {remedy}"
        assert capsys.readouterr().err.splitlines() == [said]


def test_rows_that_are_read_as_they_are_keep_their_keys(tmp_path):
    row = {"prompt": "1 + 1?", "answer": "2", "question": "2 + 2?", "response": "4"}
    assert keys_read("data", row, tmp_path)["prompt_field"] == "prompt"
    assert keys_read("data", row | {"q": "?"}, tmp_path, "data.prompt_field=q")["prompt_field"] == "q"


def test_a_table_is_read_and_the_guess_is_said(tmp_path, caplog):
    with (tmp_path / "mine.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("problem", "solution"), ("1 + 1?", "2")])
    plain = settled(compose(("data=jsonl", f"data.path={tmp_path / 'mine.csv'}"), None, "train"))
    assert (plain["data"]["prompt_field"], plain["data"]["answer_field"]) == ("problem", "solution")
    said = "data.path: its rows lack fields that the keys name, and are read with "
    assert caplog.messages == [f"{said}data.prompt_field=problem data.answer_field=solution"]


def test_data_of_ones_own_class_are_not_looked_into(tmp_path, monkeypatch):
    source = "class Rows:\n    def __init__(self, path, **keys):\n        self.path = path\n"
    (tmp_path / "rows_of_mine.py").write_text(source)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    plain = compose(("data=arithmetic",), None, "train")
    for keys in ({}, {"prompt_field": "prompt", "answer_field": "answer"}):
        own = {**plain, "data": {"_target_": "rows_of_mine.Rows", "path": str(tmp_path / "rows.jsonl"), **keys}}
        assert settled(own)["data"] == own["data"]


def test_a_first_record_without_rows_leaves_the_keys(tmp_path):
    nested = ("data.rows=items", "data.prompt_field=problem")
    for items, field in (([], "problem"), ([{"question": "1 + 1?", "answer": "2"}], "question")):
        assert keys_read("data", {"items": items}, tmp_path, *nested)["prompt_field"] == field


def test_a_held_out_file_is_looked_at_too(tmp_path):
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


def test_a_wrong_field_is_refused_before_torch_is_imported(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "1 + 1?", "answer": "2"}\n')
    words = ("+recipe=grpo_arithmetic", "data=jsonl", f"data.path={file}")
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True)
    problem = f"data.path: {file}:1: there is no field 'prompt', only 'q', 'answer'"
    remedy = "fix or remove that line, or set data.prompt_field to another"
    assert done.stdout.splitlines() == [f"{problem}; {remedy}", "False"]


def test_large_files_that_are_parsed_as_a_whole_are_not_parsed_before_the_run_reads_them(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(50)], indent=1))
    words = ("+recipe=grpo_arithmetic", "data=jsonl", f"data.path={file}")
    assert settled(compose(words, None, "train"))["data"]["prompt_field"] == "question"
    monkeypatch.setattr(files, "SMALL_BYTES", 100)
    monkeypatch.setattr(JsonDocument, "records", lambda _: pytest.fail("it is parsed"))
    resolve(settled(compose(words, None, "train")))


def test_of_tables_that_know_their_extent_the_records_make_it_up(tmp_path):
    rows = [{"question": f"{i} + ä?", "answer": str(i)} for i in range(300)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    cells = "".join(",".join(row) + "\n" for row in (rows[0], *(row.values() for row in rows))).encode()
    contents = {"a.jsonl": lines, "a.csv": cells, "a.jsonl.gz": gzip.compress(lines), "a.csv.gz": gzip.compress(cells)}
    contents |= {"a.json": json.dumps(rows).encode(), "utf16.jsonl": lines.decode().encode("utf-16")}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    import openpyxl

    book = openpyxl.Workbook()
    for row in rows:
        book.active.append([*row.values()])
    book.save(tmp_path / "a.xlsx")
    found = tables(sorted(tmp_path.iterdir()), "data.path")
    shares = {each.name: each.extent and sum(record.size for record in each.records()) / each.extent for each in found}
    known = {name: share for name, share in shares.items() if share is not None}
    assert sorted(known) == ["a.csv", "a.jsonl", "a.parquet"]
    assert len(shares) == 8
    assert all(0.95 < share <= 1 for share in known.values())


def test_a_field_that_several_keys_name_is_not_blamed_on_one(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "1 + 1?"}\n')
    words = ("+recipe=grpo_arithmetic", "data=jsonl", f"data.path={file}", "data.image_field=prompt")
    with pytest.raises(UserError, match=r"name other fields \(data\.\*field\)"):
        resolve(settled(compose(words, None, "train")))
