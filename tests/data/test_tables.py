"""Rows that libraries write in every form are read back equal, by what a file is: its name says nothing here."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
import zipfile
from functools import cache, partial
from itertools import product

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from family_tokenizers import family_tokenizer

from rlft.config.schema import PromptsConfig
from rlft.data import hub
from rlft.data.examples import scan_demonstrations
from rlft.data.fields import text_of
from rlft.data.files import DELIMITERS, files_at, parsed, tables
from rlft.data.jsonl import rows
from rlft.data.opened import UNPACK, is_plain
from rlft.data.tables import paths_to_rows, rows_of
from rlft.types import Split, UserError

PIECES = (
    *("a", "Ä", "日本", "1,5", ";", "\t", "|", '"', "'", "\n", "\r\n", " "),
    *("=1+1", "null", "{", "[", "\\", "£", "\u2028"),
)


def random_rows(seed, number=8):
    """Rows of texts of all pieces, none of them blank."""
    draw = random.Random(seed)
    return [
        {name: f"{i:02d}" + "".join(draw.choices(PIECES, k=5)) + "." for name in ("prompt", "answer", "más")}
        for i in range(number)
    ]


def read(path, nested=None):
    found = tables(files_at(str(path), "data.path"), "data.path", nested)
    return [dict(row) for table in found for record in table.records() for row in
            rows_of(record, table, lambda fields, _: [fields], "data.path")]  # fmt: skip


def archived(content):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("inside", content)
    return archive.getvalue()


def by_arrow(name):
    def pack(content):
        buffer = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(buffer, name) as stream:
            stream.write(content)
        return buffer.getvalue().to_pybytes()

    return pack


PACKED = (
    *(bytes, gzip.compress, bz2.compress, partial(lzma.compress, preset=0)),
    *(archived, by_arrow("zstd"), by_arrow("lz4")),
)


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")
NESTED = {
    None: list,
    "data": lambda rows: {"data": rows, "version": 1},
    "examples": lambda rows: {"examples": rows, "canary": "x"},
    "a.b": lambda rows: {"a": {"b": rows}},
    "v1.0.rows": lambda rows: {"v1.0": {"rows": rows}},
    "sets.1": lambda rows: {"sets": [[{"no": 1}], rows]},
    "*": lambda rows: {f"id{i}": row for i, row in enumerate(rows)},
    "*.items": lambda rows: [{"items": rows[:3]}, {"items": rows[3:]}],
    "items": lambda rows: [{"items": rows[:3]}, {"items": []}, {"items": None}, {"items": rows[3:]}],
    "train.*": lambda rows: {"train": {str(i): row for i, row in enumerate(rows)}, "test": {"0": {"x": 1}}},
    "data.*.paragraphs.*.qas": lambda rows: {"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": rows}]}]},
}  # fmt: skip


def json_files(rows):
    """Each way to lay out JSON x ASCII or not."""
    for (path, nest), indent, ascii_ in product(NESTED.items(), (None, 1), (True, False)):
        yield "json", json.dumps(nest(rows), indent=indent, ensure_ascii=ascii_).encode(), path
    for ascii_ in (True, False):
        lines = [json.dumps(row, ensure_ascii=ascii_) for row in rows]
        yield "json", "\n".join(lines).encode(), None
        yield "json", "\r\n\r\n".join(lines).encode(), None
        yield "json", "\n".join(json.dumps(row, indent=2, ensure_ascii=ascii_) for row in rows).encode(), None
        halves = [json.dumps({"meta": {"qas": half}}, ensure_ascii=ascii_) for half in (rows[:3], rows[3:])]
        yield "json", "\n".join(halves).encode(), "meta.qas"


def csv_files(rows):
    for delimiter, quoting, end in product(DELIMITERS, (csv.QUOTE_MINIMAL, csv.QUOTE_ALL), ("\n", "\r\n", "\r")):
        for prefix, suffix in (("", ""), ("sep=" + delimiter + end, f'"","",""{end}'), ("", (2 * delimiter + end) * 9)):
            text = io.StringIO()
            quoting = quoting or 2 * (end == "\r")  # QUOTE_NONNUMERIC: Python 3.11 leaves line ends bare otherwise
            writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, quoting=quoting, lineterminator=end)
            writer.writeheader()
            writer.writerows(rows)
            yield "csv", (prefix + text.getvalue() + suffix.replace(",", delimiter)).encode(), None


def write_feather(table, buffer):
    """As pyarrow.feather does, which imports pandas."""
    with pyarrow.ipc.new_file(buffer, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)


def column_files(rows):
    table = pyarrow.Table.from_pylist([dict(row) for row in rows])
    nested = pyarrow.Table.from_pylist([{"set": {"qas": [dict(row) for row in rows[i::2]]}} for i in range(2)])
    for part, path in ((table, None), (nested, "set.qas")):
        for make in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
            buffer = pyarrow.BufferOutputStream()
            with make(buffer, part.schema) as writer:
                writer.write_table(part, 5)
            yield "columns", buffer.getvalue().to_pybytes(), path
        for write in (pyarrow.parquet.write_table, write_feather):
            buffer = pyarrow.BufferOutputStream()
            write(part, buffer)
            yield "columns", buffer.getvalue().to_pybytes(), path


def write(file, content):
    file.write_bytes(content)
    return file


def own(rows, read_rows, path):
    """What was read, in the order of the ids, without the fields around it."""
    found = [{name: row[name] for name in rows[0]} for row in read_rows]
    return sorted(found, key=lambda row: row["prompt"][:2])


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_library_wrote_is_read_back_equal(tmp_path, every):
    """(44 layouts of JSON + 8) x 6 encodings, 72 of CSV x 6 encodings, 8 of columns x 7; each packed in one of 7 ways.

    By default one of 7, which are in all layouts, encodings and packings.
    """
    file, number = tmp_path / "rows", 0
    for make, encodings in ((json_files, ENCODINGS), (csv_files, ENCODINGS), (column_files, (None,) * 7)):
        for seed, encoding in enumerate(encodings):
            rows = random_rows(seed)
            for _, content, path in make(rows):
                number += 1
                if number % every:
                    continue
                text = content if encoding is None else content.decode().encode(encoding)
                file.write_bytes(PACKED[number // every % len(PACKED)](text))
                assert own(rows, read(file, path), path) == own(rows, rows, path), (content[:60], encoding, path)
    assert number == 52 * 6 + 72 * 6 + 8 * 7
    assert sum(not is_plain(write(file, pack(b"[]"))) for pack in PACKED) == len(PACKED) - 1 == len(UNPACK) - 1


def test_a_saved_set_is_read_from_its_folder_by_split(make_data, tmp_path):
    """Folders that `datasets` saved, of one split and of several, with the cache files that it leaves in them."""
    import datasets

    rows = [{"prompt": f"{i}?", "answer": str(i), "calls": [{"a": i} if i % 2 else {"b": [i]}]} for i in range(40)]
    features = {"prompt": datasets.Value("string"), "answer": datasets.Value("string")}
    features["calls"] = datasets.List(datasets.Json())
    whole = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    (tmp_path / "one" / "cache-0123.arrow").write_bytes(b"not a part of the set")
    two = {"train": whole.select(range(30)), "test": whole.select(range(30, 40))}
    datasets.DatasetDict(two).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == rows
    assert read(tmp_path / "two") == rows[:30]
    assert read(tmp_path / "two" / "test") == rows[30:]
    for name, keys in (
        ("jsonl", {"held_out_path": str(tmp_path / "two")}),
        ("hub", {"held_out_split": "test", "train_split": "train"}),
    ):
        data = make_data(name, path=str(tmp_path / "two"), **keys)
        assert [len(data.load(split)) for split in Split] == [30, 10]
    assert sum(len(make_data("hub", path=str(tmp_path / "one")).load(split)) for split in Split) == 40
    datasets.DatasetDict({"sft": whole}).save_to_disk(tmp_path / "odd")
    with pytest.raises(UserError, match=r"has no split 'train', only sft, .*name one, data\.path=<folder>/<split>"):
        read(tmp_path / "odd")
    assert read(tmp_path / "odd" / "sft") == rows


def test_every_nesting_is_refused_with_the_path_that_reads_it(make_data, tmp_path):
    """Each layout x document, one line and lines x pieces of the form that a config asks for: the remedy is run."""
    rows = [{"question": f"{i}?", "solution": str(i)} for i in range(40)]
    keys = {"prompt_field": "question", "answer_field": "solution", "held_out_fraction": 0.5}
    number = 0
    for path, nest in NESTED.items():
        if path in (None, "data", "sets.1"):  # of lists of lists the first one is looked at
            continue
        for indent, name in product((None, 1), ("a.json", "a.jsonl", "a")):
            (tmp_path / name).write_text(json.dumps(nest(rows), indent=indent))
            with pytest.raises(UserError) as refusal:
                make_data("jsonl", path=str(tmp_path / name), **keys).load(Split.train)
            assert refusal.value.key == "data.path", path
            proposed = str(refusal.value).rpartition("set data.rows to the path to the rows: ")[2]
            data = make_data("jsonl", path=str(tmp_path / name), rows=proposed, **keys)
            found = [prompt.answer for split in Split for prompt in data.load(split)]
            assert sorted(map(int, found)) == list(range(40)), (path, proposed)
            number += 1
    assert number == 8 * 6


def test_only_what_lacks_a_field_is_refused_with_a_path_to_rows(make_data, tmp_path):
    """Rows that have their fields, of a form that is not read x what they hold besides x lines and a document."""
    bad = (
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"speaker": "human", "text": "q"}],
        [{"role": "bot", "content": "q"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    )
    rows = [{"prompt": prompt, "answer": "1"} for prompt in bad]
    rows += [{"prompt": "q", "answer": [{"a": 1}]}, {"prompt": "q", "answer": "1", "history": [{"a": "b"}]}]
    number = 0
    for row, extra, indent in product(rows, ({}, {"meta": [{"prompt": "1?", "answer": "2"}]}), (None, 1)):
        (tmp_path / "a.json").write_text(json.dumps([row | extra] if indent else row | extra, indent=indent))
        with pytest.raises(UserError) as refusal:
            make_data("jsonl", path=str(tmp_path / "a.json")).load(Split.train)
        assert "data.rows" not in str(refusal.value), (row, extra)
        number += 1
    assert number == 7 * 2 * 2


def test_tables_of_markdown_are_refused_with_what_writes_them_as_csv(tmp_path):
    """Rules x bars at the ends x names of files; the command is run, and its output read."""
    file, rows = tmp_path / "a.csv", [{"prompt": "1 - 1?", "answer": "0"}, {"prompt": "2?", "answer": "-"}]
    for rule, bar in product(("---|---", " :--- | ---: ", "--|--"), ("|", "")):
        lines = ["prompt | answer", rule, *(f"{row['prompt']} | {row['answer']}" for row in rows)]
        file.write_text("".join(f"{bar}{line}{bar}\n" for line in lines))
        with pytest.raises(UserError, match="is a table of Markdown") as refusal:
            read(file)
        command = str(refusal.value).partition("write it as CSV: ")[2]
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
        (tmp_path / "b.csv").write_text(done.stdout)
        assert read(tmp_path / "b.csv") == rows, (rule, bar)


def test_numbers_of_32_bits_are_the_shortest_that_are_the_same(make_data, tmp_path):
    """Random decimals, whole numbers of each size, and null."""
    rng = random.Random(0)
    texts = [str(rng.randrange(10**6) / 1000) for _ in range(300)] + [str(rng.randrange(2**24)) for _ in range(100)]
    texts += [str(2 ** rng.randrange(24, 40) * rng.choice((1, 3, 5))) for _ in range(100)]
    file = tmp_path / "a.parquet"
    answers = pyarrow.array([float(text) for text in texts], pyarrow.float32())
    prompts = [f"{i}?" for i in range(len(texts))]
    none = pyarrow.nulls(len(texts), pyarrow.float32())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "answer": answers, "none": none}), file)
    data = make_data("jsonl", path=str(file), held_out_fraction=0.5, metadata_fields=["none"])
    found = {p.messages[0]["content"]: (p.answer, p.metadata["none"]) for split in Split for p in data.load(split)}
    assert found == {f"{i}?": (text.removesuffix(".0"), None) for i, text in enumerate(texts)}


def test_a_path_that_leads_nowhere_is_refused_with_those_that_lead_to_rows(make_data, tmp_path):
    for path, nest in ((path, nest) for path, nest in NESTED.items() if path != "sets.1"):
        document = nest([{"prompt": "1?", "answer": "1"}] * 9)
        known = list(paths_to_rows(document))
        for content in (json.dumps(document, indent=1), json.dumps(document)):
            (tmp_path / "a.json").write_text(content)
            with pytest.raises(UserError, match=r"^data\.rows: .*a\.json") as refusal:
                make_data("jsonl", path=str(tmp_path / "a.json"), rows="nowhere.*").load(Split.train)
            assert path is None or any(name in str(refusal.value) for name in known)


def test_what_encloses_a_row_is_in_its_template(make_data, tmp_path):
    """SQuAD's form, with the context of each question; and names of rows as the field `key`."""
    data = [
        {"title": t, "paragraphs": [{"context": f"{t}{c}", "qas": [{"question": f"{t}{c}{q}?", "answers": [{"text": q}]}
         for q in "xy"]} for c in "ab"]} for t in "ST"
    ]  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"version": "1", "data": data}))
    template, keys = "{title}/{context}: {question}", {"prompt_field": "question", "answer_field": "answers.*.text"}
    prompts = [
        prompt
        for split in Split
        for prompt in make_data(
            "jsonl", path=str(tmp_path / "a.json"), rows="data.*.paragraphs.*.qas", prompt_template=template,
            held_out_fraction=0.5, **keys
        ).load(split)
    ]  # fmt: skip
    expected = {(f"{t}/{t}{c}: {t}{c}{q}?", q) for t, c, q in product("ST", "ab", "xy")}
    assert {(prompt.messages[0]["content"], prompt.answer) for prompt in prompts} == expected
    (tmp_path / "b.json").write_text(json.dumps({"v": 2, "one": {"q": "1?"}, "two": {"q": "2?"}}))
    assert read(tmp_path / "b.json", "*") == [{"v": 2, "key": "one", "q": "1?"}, {"v": 2, "key": "two", "q": "2?"}]


SHEETS = {
    "trailing unnamed columns": ("p,a,,\n1,2,,\n3,4,,\n", [{"p": "1", "a": "2"}, {"p": "3", "a": "4"}]),
    "a value below no name": ("p,a,\n1,2,x\n", ":2: has 3 cells, the header 2"),
    "more cells than names": ("p,a\n1,2\n3,4,5\n", ":3: has 3 cells, the header 2"),
    "blank rows": ('\n\np,a\n1,2\n\n," "\n"",""\n3,4\n"",""', [{"p": "1", "a": "2"}, {"p": "3", "a": "4"}]),
    "short rows": ("p,a,b\n1\n2,3\n4,5,6\n", [{"p": "1", "a": "", "b": ""}, {"p": "2", "a": "3", "b": ""},
                                              {"p": "4", "a": "5", "b": "6"}]),
    "spaces around names": (" p , a\t\n1,2\n", [{"p": "1", "a": "2"}]),
    "a space behind each comma": ('p, a\n1, "2, 3"\n', [{"p": "1", "a": "2, 3"}]),
    "the index of pandas": (",p,a\n0,1,2\n1,3,4\n", [{"p": "1", "a": "2"}, {"p": "3", "a": "4"}]),
    "a decimal comma": ("p,a\n1,\"2,5\"\n", [{"p": "1", "a": "2,5"}]),
    "doubled line ends": ("p,a\r\r\n1,2\r\r\n", [{"p": "1", "a": "2"}]),
    "one column": ("p\n1; 2\n3\n", [{"p": "1; 2"}, {"p": "3"}]),
    "the same name twice": ("p,a,p\n1,2,3\n", "two columns have the same name, only 'p', 'a', 'p'"),
    "no names": ("1?,2\n3?,4\n", ":2: there is no field 'p', only '1?', '2'"),
    "no names, the same values": ("1,1\n2,2\n", "two columns have the same name, only '1', '1'"),
}  # fmt: skip


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_tables_are_read_as_spreadsheets_write_them(tmp_path, every):
    """Each irregularity x delimiter x line end x byte order mark x name of the file; by default one of 5 of them."""
    number = checked = 0
    for irregular, delimiter, end, encoding, name in product(
        SHEETS, ",;\t|", ("\n", "\r\n", "\r"), ("utf-8", "utf-8-sig", "utf-16"), ("a.csv", "a.tsv", "a.txt")
    ):
        number += 1
        if number % every:
            continue
        text, expected = SHEETS[irregular]
        if irregular == "doubled line ends" and end != "\n":
            continue
        if irregular == "spaces around names" and delimiter == "\t":
            text = text.replace("\t", "")
        if irregular == "one column" and name == "a.txt":
            continue  # nothing says that it is a table
        quoted = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
        if irregular in ("a decimal comma", "a space behind each comma"):
            rows = list(quoted)
            between = delimiter + " " * ("space" in irregular)
            text = "\n".join(between.join(f'"{cell}"' if "," in cell else cell for cell in row) for row in rows)
        else:
            text = text.replace(",", delimiter) if irregular != "one column" else text
        (tmp_path / name).write_bytes(text.replace("\n", end).encode(encoding))
        if isinstance(expected, list):
            assert read(tmp_path / name) == expected, (irregular, delimiter, end, name)
        else:
            with pytest.raises(UserError) as refusal:
                list(parsed(str(tmp_path / name), "data.path", None, lambda fields, _: [text_of(fields, "p")]))
            assert expected in str(refusal.value), (irregular, delimiter, end, name)
            assert "no names" not in irregular or "write a first row with the names" in str(refusal.value)
        checked += 1
    assert checked > (1300 if every == 1 else 1300 // every - 50)


def test_workbooks_are_read_by_sheet(tmp_path):
    import openpyxl

    book, rows = openpyxl.Workbook(), random_rows(2)
    rows = [{name: value.replace("\r", "") for name, value in row.items()} for row in rows]
    for sheet in (book.active, book.create_sheet("more")):
        sheet.append([*rows[0], None, None])
        for row in rows:
            sheet.append(list(row.values()))
        sheet.append([None, "", " "])
    book.create_sheet("blank")
    book.active.title = "first"
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(UserError, match=r"^data\.rows: the workbook has the sheets first, more; name one"):
        read(tmp_path / "a.xlsx")
    plain = [{name: None if value.startswith("=") else value for name, value in row.items()} for row in rows]
    assert read(tmp_path / "a.xlsx", "more") == plain
    del book["more"]
    book.active["A2"] = "=1+1"
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(UserError, match=r"row 2: has a formula that was never computed; open the workbook"):
        read(tmp_path / "a.xlsx")


def test_a_workbook_without_openpyxl_is_refused_with_the_command(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as opened:
        opened.writestr("xl/workbook.xml", "")
        opened.writestr("xl/other.xml", "")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(UserError, match=r"openpyxl, .* install .*'rlft\[xlsx\]', or save it as CSV"):
        read(tmp_path / "a.xlsx")


# -- what tables fill in -----------------------------------------------------------------------------------------------
PROMPTS = PromptsConfig(max_tokens=100_000, over_limit="refuse", style="chat")
PARAMETERS = {
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


def composed(rng, names, wordy):
    """A row with a tool of these parameters and a call with a part of them; `wordy`: with all that may be left out."""

    def maybe(**fields):
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
def cases(seed):
    rng, names = random.Random(seed), list(PARAMETERS)
    some = [sorted(rng.sample(names, rng.randint(1, len(names))), key=names.index) for _ in range(30)]
    return [composed(rng, names, True), *(composed(rng, each, False) for each in some)]


def read_turns(make, table, turns):
    demonstrations = make("jsonl", path="a.jsonl", turns=turns)
    return [row.made for row in rows([table], demonstrations.parse, "demonstrations.path")[0]]


def written(folder, given, form):
    """The rows as a table of this form."""
    import datasets

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
def test_chats_with_tools_are_the_same_from_typed_tables_and_from_jsonl(make_demonstrations, form, tmp_path):
    """31 rows of each of 2 seeds, 2 turns of each: 124 demonstrations, and their tokens with two templates."""
    num_fillers = 0
    for seed in range(2):
        given = cases(seed)
        expected = read_turns(make_demonstrations, written(tmp_path, given, "jsonl"), "all")
        table = written(tmp_path, given, form)
        num_fillers += sum(json.dumps(record.fields, default=str).count("null") for record in table.records())
        found = read_turns(make_demonstrations, table, "all")
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


def test_a_null_that_somebody_wrote_into_a_line_is_said(make_demonstrations, tmp_path):
    """At each depth of the arguments of a call, and in a schema."""
    for arguments in ({"a": None}, {"a": {"b": None}}, {"a": [None]}, {"a": [{"b": None, "c": 1}]}):
        call = {"function": {"name": "f", "arguments": arguments}}
        schema = {"name": "f", "parameters": {"properties": {"a": {"enum": ["x", None], "default": None}}}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
        row = {"messages": messages, "tools": [schema]}
        [made] = read_turns(make_demonstrations, written(tmp_path, [row], "jsonl"), "last")
        assert made.fields["tool_calls"][0]["function"]["arguments"] == arguments
        assert made.prompt.tools[0]["function"] == schema
