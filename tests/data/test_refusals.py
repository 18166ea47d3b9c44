"""What is refused of data, demonstrations, preferences and texts: keys, files and rows, each by its key and place."""

import gzip
import json
import logging

import pytest
from in_one_test import each

from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.data import jsonl
from rlft.data.examples import load_texts
from rlft.types import Split, UserError
from tests.data.data_rows import says, user

LINE = {"prompt": "{}?", "answer": "1", "completion": "x", "chosen": "good", "rejected": "bad", "by": 1, "text": "x"}
HALF = "\ud800"


@pytest.fixture
def load(makers):
    """Loads the training split of a section: `load(section, file, ..keys)`."""

    def loaded(section, path, kind="jsonl", **keys):
        if section == "pretrain":
            return load_texts(str(path), "text", keys.get("given_field"))
        return makers[section](kind, path=str(path), **keys).load(Split.train)

    return loaded


# -- keys --------------------------------------------------------------------------------------------------------------
KEYS = {  # {what is read: {the key that is named: keys}}
    "data": {
        "path": [
            {"path": "missing.jsonl"}, {"path": "folder"}, {"path": "empty.jsonl"}, {"path": "blank.jsonl"},
            {"held_out_path": "same_questions.jsonl"},
        ],
        "held_out_path": [{"held_out_path": "missing.jsonl"}, {"held_out_path": "./good.jsonl"}],
        # the whole: nothing is left to train on
        "held_out_fraction": [{"held_out_fraction": 1.0}, {"held_out_fraction": 0.0}, {"held_out_fraction": 1.5}],
        "answer_pattern": [{"answer_pattern": "("}],
        # a question of 5 has 4 others
        "few_shot": [{"few_shot": -1}, {"few_shot": 5, "held_out_fraction": 1e-9}],
        "few_shot_template": [{"few_shot_template": "{anwser}"}],
        "answer_field": [{"answer_field": None, "few_shot": 1}],
        "prompt_template": [
            {"prompt_template": "{question} {answer}"}, {"prompt_template": r"\\boxed{question}"},
            {"prompt_template": "{qestion}"},
        ],
        "promt_field": [{"promt_field": "x"}],
        "prompt_field": [{"prompt_field": 3}],
    },
    "demonstrations": {
        "path": [{"path": "missing.jsonl"}],
        "held_out_path": [{"held_out_path": "missing.jsonl"}],
        "held_out_fraction": [{"held_out_fraction": 1.0}],
        "prompt_template": [{"prompt_template": "x"}],
        "turns": [{"turns": "first"}],
        "token_ids": [{"token_ids": "both"}],
    },
    "preferences": {
        "path": [{"path": "missing.jsonl"}],
        "held_out_path": [{"held_out_path": "missing.jsonl"}],
        "held_out_fraction": [{"held_out_fraction": 1.0}],
        "prompt_template": [{"prompt_template": "x"}, {"prompt_template": "{chosen}"}],
        "token_ids": [{"token_ids": "both"}],
        "format": [{"format": "HH"}],
    },
}  # fmt: skip
DRAWN = {
    "arithmetic": {
        "difficulty": [{"difficulty": 0}, {"difficulty": 10}],
        "operations": [{"operations": []}, {"operations": ["/"]}],
        # 100 sums + 55 differences of one digit
        "size": [{"difficulty": 1, "size": 200}],
        "held_out_size": [{"difficulty": 1, "held_out_size": 100}],
    },
    "chains": {
        "steps": [{"steps": 0}, {"steps": 21}],
        "largest": [{"largest": 8}, {"largest": 10_000}],
        "size": [{"steps": 1, "largest": 9, "size": 200}],
        "held_out_size": [{"steps": 1, "largest": 9, "held_out_size": 100}],
    },
    "shapes": {"most": [{"most": 10}]},
}


def cases(table):
    return [(what, keys, key) for what, by_key in table.items() for key, found in by_key.items() for keys in found]


@each("section, keys, key", cases(KEYS))
def test_of_what_is_read_from_files_the_key_is_named(section, keys, key, load, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("good", 5), ("same_questions", 9)):
        write(tmp_path / f"{name}.jsonl", *(LINE | {"prompt": f"{i}?"} for i in range(count)))
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(UserError) as refusal:
        load(section, **{"path": "good.jsonl"} | keys)
    assert refusal.value.key == f"{section}.{key}"


@each("kind, keys, key", cases(DRAWN))
def test_of_what_is_drawn_the_key_is_named(kind, keys, key, make_data):
    with pytest.raises(UserError) as refusal:
        make_data(kind, **keys).load(Split.held_out if key == "held_out_size" else Split.train)
    assert refusal.value.key == f"data.{key}"


def test_of_texts_the_key_is_named_with_what_it_wants(load, write, tmp_path):
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(UserError) as refusal:
        load("pretrain", missing)
    assert str(refusal.value) == (
        f"pretrain.path: there is no such file, got {missing}; give the path of a file or "
        "folder (a set of the hub: choose hub in place of jsonl)"
    )
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UserError) as refusal:
        load("pretrain", empty)
    said = f"pretrain.path: holds no texts, got {empty}; give a file with one JSON object a line"
    assert str(refusal.value) == said
    with pytest.raises(UserError) as refusal:
        load("pretrain", write(tmp_path / "a.jsonl", {"text": "a"}), given_field="text")
    assert str(refusal.value) == (
        "pretrain.given_field: is the key of the text itself (pretrain.field), got text; "
        "name the field of what stands before the text, or set it to null"
    )


# -- rows --------------------------------------------------------------------------------------------------------------
UNREADABLE = "; fix or remove that line"
NAMES = UNREADABLE + ", or name other fields ({section}.*field)"
CHATS = {"messages_field": "m", "answer_field": None}
TALK = [user("a"), says("b"), user("c")]
CALL = {"name": "add", "arguments": "a b"}


def rows(found, remedy=NAMES, **keys):
    """Each (line, what is wrong with it) with the keys it is read by and what the refusal proposes."""
    return [(line, problem, keys, remedy) for line, problem in found]


# {section: rows that are refused by their place}
REFUSED = {
    "data": [
        *rows([(b"{", "is not JSON"), (b"[1, 2]", "must be a JSON object, it is a list")], UNREADABLE),
        *rows([(b'{"prompt": "\xff", "answer": "1"}', "is not UTF-8 text")], "jsonl"),
        *rows([({"question": "1?", "answer": "1"}, "there is no field 'prompt', only 'question', 'answer'")],
              UNREADABLE + ", or set data.prompt_field to another"),
        *rows([({"prompt": "1?"}, "there is no field 'answer', only 'prompt'")],
              UNREADABLE + ", or set data.answer_field to another"),
        *rows([
            ({"prompt": 1, "answer": "1"}, "field 'prompt' must be a string, it is a number"),
            ({"prompt": None, "answer": "1"}, "field 'prompt' must be a string, it is null"),
            ({"prompt": " ", "answer": "1"}, "field 'prompt' is empty"),
            ({"prompt": "1?", "answer": [["1"]]}, "must be a string or number, it is a list"),
            ({"prompt": "1?", "answer": []}, "field 'answer' is an empty list"),
            ({"prompt": "1?", "answer": ""}, "field 'answer' is empty"),
        ]),
        *rows([({"prompt": "1?", "answer": "one"}, "the answer has no match of data.answer_pattern")],
              answer_pattern="[0-9]+"),
        *rows([({"prompt": "1?", "answer": ",,"}, "the answer is empty")], answer_remove=","),
        *rows([
            ({"m": "hello"}, "field 'm' must be a list of messages, it is a string"),
            ({"m": []}, "it is an empty list"),
            ({"m": [{"role": "bot", "content": "a"}]}, "message 0 of field 'm'"),
            ({"m": [{"role": "user"}]}, "message 0 of field 'm'"),
            ({"m": [user("a")]}, "does not end with an assistant"),
            ({"m": [says("a")]}, "holds no user message"),
        ], **CHATS),
    ],
    "demonstrations": [
        *rows([
            ({"text": "x", "id": 3}, "is not a chat (field 'messages'), not a prompt with its completion (fields "
             "'prompt', 'completion') and not a line of rlft sample; it has only 'text', 'id'"),
            ({"prompt": "1?"}, "is not a chat"),
            ({"prompt": "1?", "completion": None}, "is not a chat"),
            ({"prompt": "1?", "completion": [says("a"), says("b")]}, "must be a string or one assistant message"),
            ({"prompt": [user("a"), says("b")], "completion": "c"}, "is not a user message"),
            *(({"messages": [*TALK, message]}, problem) for message, problem in [
                ({**says("d"), "weight": 0.5}, "has the weight 0.5; it must be 0 (read) or 1 (learned)"),
                ({**says("d"), "reasoning_content": 5}, "must have a text as its reasoning_content, it is a number"),
                (says(None), "must have a text as its content, it is null"),
                ({"role": "assistant", "tool_calls": "add"},
                 "message 3 of field 'messages' has tool_calls that must be a list"),
                ({"role": "developer", "content": "d"}, "is a system message; only the first may be"),
                ({"role": "narrator", "content": "d"}, 'must be {"role": system | user | assistant | tool'),
            ]),
        ]),
        *rows([
            ({"messages": [*TALK, {**says("d"), "train": True}]},
             "has the field 'train'; a message of the role assistant has"),
            ({"messages": [*TALK, {**says("d"), "function_call": {"name": "add"}}]}, "has the field 'function_call'"),
            ({"messages": [*TALK, {**user("d"), "name": "Ann"}]},
             "has the field 'name'; a message of the role user has role, content"),
        ], "use it under a name that is known, or leave it out"),
        *rows([
            ({"messages": [*TALK, {"role": "assistant", "tool_calls": [CALL]}]},
             "message 3 of field 'messages' has a call of a tool"),
            ({"messages": [*TALK, says("d")], "tools": [{"function": {}}]},
             "field 'tools' must be a list of schemas of functions with a name"),
        ], "fix it"),
        *rows([({"prompt": [], "completion": "a", "tokenizer": "0"}, "field 'token_ids' of a sampled")],
              "sample again"),
    ],
    "preferences": [
        *rows([
            ({"text": "x"}, "is not a pair (fields 'chosen', 'rejected'), not a list of completions (field "
             "'completions') and not a line of rlft sample; it has only 'text'"),
            ({"prompt": "1?", "chosen": "a"}, "is not a pair"),
            ({"chosen": "a", "rejected": "b"}, "has no prompt, neither field 'messages' nor 'prompt'; it has only"),
            ({"chosen": [user("a"), says("b")], "rejected": "c"}, "must be a string or one assistant message"),
            (LINE | {"messages": [user("a"), says("b")]}, "is not a user message"),
            ({"prompt": "1?", "chosen": "a", "rejected": "b"}, "field 'by', by how much"),
            (LINE | {"by": -1}, "field 'by', by how much"),
            ({"prompt": "1?", "completions": "a"}, "there is no score (field 'scores')"),
            ({"prompt": "1?", "completions": ["a", "b"], "scores": [1]}, "must be a list of 2 numbers"),
            ({"prompt": "1?", "completions": ["a"], "scores": [float("nan")]}, "list of 1 number,"),
        ], margin_field="by"),
    ],
    "pretrain": [
        *rows([(b"plain text", "is not JSON (Expecting value)")], UNREADABLE),
        *rows([({"body": "a", "id": 1}, "there is no field 'text', only 'body', 'id'"),
               ({}, "there is no field 'text', only none at all")],
              UNREADABLE + ", or set pretrain.field to another"),
        *rows([
            ({"text": ["a"]}, "field 'text' must be a string, it is a list"),
            ({"text": None}, "field 'text' must be a string, it is null"),
            ({"text": " \n"}, "field 'text' is empty"),
        ]),
        *rows([({"text": "a"}, "there is no field 'given', only 'text'")],
              UNREADABLE + ", or set pretrain.given_field to another", given_field="given"),
        *rows([
            ({"given": None, "text": "a"}, "field 'given' must be a string, it is null"),
            ({"given": "q", "text": ""}, "field 'text' is empty"),
        ], given_field="given"),
    ],
}  # fmt: skip
SURROGATES = {  # JSON can hold half a character, which is not text
    "data": [{"prompt": f"x{HALF}"}, {"answer": f"1{HALF}"}, {f"other{HALF}": 1}],
    "demonstrations": [
        {"prompt": f"x{HALF}"}, {"completion": f"1{HALF}"}, {"messages": [user("x"), says(HALF)]},
        {"messages": [{"role": "system", "content": HALF}, user("x"), says("y")]},
    ],
    "preferences": [{"prompt": f"x{HALF}"}, {"chosen": HALF}, {"rejected": HALF}],
    "pretrain": [{"text": HALF}, {"given": HALF}],
}  # fmt: skip
for section, found in SURROGATES.items():
    given = {"given_field": "given"} if section == "pretrain" else {}
    lines = [(LINE | {"given": "q"} | row, "holds the lone surrogate \\ud800, which is not text") for row in found]
    REFUSED[section] += rows(lines, UNREADABLE, **given)


@each("section, line, problem, keys, remedy", [(section, *row) for section, found in REFUSED.items() for row in found])
def test_a_row_is_refused_by_its_place(section, line, problem, keys, remedy, load, tmp_path):
    good = LINE | {"m": [user("q"), says("1")], "given": "q"}
    good, line = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in (good, line))
    file = tmp_path / "mine.jsonl"
    file.write_bytes(good + b"\n\n" + line + b"\n" + good)
    with pytest.raises(UserError) as refusal:
        load(section, file, **keys)
    told = str(refusal.value)
    assert told.startswith(f"{section}.path: {file}:3: ")
    assert problem in told
    assert told.endswith(remedy.format(section=section)), told
    if section == "pretrain":
        assert told == f"pretrain.path: {file}:3: {problem}" + remedy.format(section=section)


@pytest.mark.parametrize("section", ["data", "demonstrations", "preferences"])
def test_a_row_of_a_set_of_the_hub_with_half_a_character_is_refused(section, load, tmp_path):
    fields = {"prompt_field": "prompt", "answer_field": "answer", "answer_pattern": None} if section == "data" else {}
    for row in SURROGATES[section]:
        file = tmp_path / "train.jsonl"
        file.write_text(f"{json.dumps(LINE)}\n{json.dumps(LINE | row)}\n")
        with pytest.raises(UserError) as refusal:
            load(section, file, "gsm8k" if section == "data" else "hub", **fields)
        said = f"{section}.path: {file}:2: holds the lone surrogate \\ud800, which is not text"
        assert str(refusal.value).startswith(said)


def test_whole_characters_that_json_writes_as_two_halves_are_read(load, write, tmp_path):
    whole = "\U0001f600"
    file = write(tmp_path / "train.jsonl", *(LINE | {"prompt": f"{i} {whole}"} for i in range(40)))
    assert "\\ud83d\\ude00" in file.read_text()
    assert all(prompt.messages[-1]["content"].endswith(whole) for prompt in load("data", file))


@pytest.mark.parametrize(("yaml", "key"), [
    ('data:\n  system_prompt: "a \\ud800"\n', "data.system_prompt"),
    ('data:\n  answer_remove: ["\\udfff"]\n', "data.answer_remove"),
    ('name: "\\ud800"\n', "name"),
])  # fmt: skip
def test_half_a_character_in_a_recipe_is_refused_by_its_key(yaml, key, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n# Mine.\n{yaml}")
    composed = compose(["data=jsonl", "data.path=x", "+recipe=mine"], tmp_path)
    with pytest.raises(UserError) as refused:
        build(composed)
    assert refused.value.key == key
    assert "holds the lone surrogate" in refused.value.problem


UNLIKE, NOT_ENDED = "has chats that differ before their last messages", "has chats that do not end with"
USELESS = {  # {section: [(row, why it teaches nothing, keys)]}
    "demonstrations": [
        ({"prompt": "1?", "completion": " "}, "has an empty completion", {}),
        ({"messages": [user("a"), says("")]}, "has an empty completion", {}),
        ({"messages": [*TALK, says(" ")]}, "has an empty completion", {}),
        ({"messages": [user("a")]}, "has no assistant message to learn in field 'messages'", {}),
        ({"messages": [says("a")]}, "has no assistant message to learn in field 'messages'", {}),
        ({"messages": []}, "has no messages in field 'messages'", {}),
        ({"messages": [*TALK[:2], says("c")]}, "has a message 2 in field 'messages' that answers no user", {}),
    ],
    "preferences": [
        ({"chosen": [user("a"), says("b")], "rejected": [user("c"), says("d")]}, UNLIKE, {}),
        ({"chosen": TALK[:2], "rejected": [*TALK, says("d")]}, UNLIKE, {}),
        ({"chosen": [user("a"), user("b")], "rejected": [user("a"), user("b")]}, NOT_ENDED, {}),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"}, UNLIKE,
         {"format": "hh"}),
        ({"chosen": "\n\nHuman: a\n\nHuman: b", "rejected": "\n\nHuman: a\n\nHuman: c"}, NOT_ENDED,
         {"format": "hh"}),
        ({"prompt": "1?", "completions": []}, "has no completions in field 'completions'", {}),
        ({"chosen": "One day", "rejected": "A day"}, "has two texts that do not begin alike", {"format": "implicit"}),
    ],
}  # fmt: skip


@each("section, row, problem, keys", [(section, *case) for section, cases in USELESS.items() for case in cases])
def test_a_row_with_nothing_to_learn_is_left_out_and_named(section, row, problem, keys, makers, trained_rows, caplog):
    caplog.clear()
    make = makers[section]
    good = {"prompt": "0?", "completion": "0", "completions": ["a", "b"], "scores": [1, 0]}
    with caplog.at_level(logging.WARNING):
        found = trained_rows(make, row, good, **keys)
    assert [one.prompt.id for one in getattr(found, "rankings", found)] == ["mine.jsonl:2"]
    said = f"{section}.path: nothing can be learned from 1 of 2 train rows: mine.jsonl:1 {problem}"
    assert said in caplog.text
    # More than half: the rows are not what the keys say that they are.
    with pytest.raises(UserError, match=r"nothing can be learned from 2 of 3 train rows: mine\.jsonl:1 has "):
        trained_rows(make, row, row, good, **keys)


# -- files -------------------------------------------------------------------------------------------------------------
MANY = b'{"prompt": "1?", "answer": 1}\n\n' * 40
BAD = {
    "array.json": (b'[{"prompt": "1?", "answer": 1}, 5]', "array.json, row 1: must be a JSON object, it is a number;"),
    "half.json": (b'[{"prompt": "\\ud800", "answer": 1}]', "half.json, row 0: holds the lone surrogate"),
    "torn.json": (b'[{"prompt": "1?"', "is not JSON (Expecting ',' delimiter: line 1 column 17 (char 16)), got "),
    "object.json": (b'{"a": 1,\n "b": 2}', "object.json, row 0: there is no field 'prompt', only 'a', 'b'; fix"),
    "data.json": (b'{"data": {"a":\n 1}}', "data.json, row 0: there is no field 'prompt', only 'data'; fix"),
    "empty.json": (b"[]", "holds no data, got "),
    "field.json": (b'[{"question": "1?"}]', "field.json, row 0: there is no field 'prompt', only 'question'; fix or"),
    "field.csv": (b"question,answer\n1?,2\n", "field.csv:2: there is no field 'prompt', only 'question', 'answer'"),
    "cells.csv": (b"prompt,answer\n1?,2\n1?,2,3\n", "cells.csv:3: has 3 cells, the header 2; fix or remove that line"),
    "open.csv": (b'prompt,answer\n1?,2\n"a\n\nb,2\n', "open.csv:3: is not CSV (unexpected end of data)"),
    "twice.csv": (b"prompt,prompt\n1?,2\n", "two columns have the same name, only 'prompt', 'prompt', got "),
    "latin.csv": (b"prompt,answer\n\xff?,2\n", "latin.csv:2: is not UTF-8 text, as Windows-1252 it is 'ÿ?,2'; write"),
    "blank.csv": (b"prompt,answer\n", "holds no data"),
    "torn.parquet": (b"PAR1 and no more", "cannot be read ("),
    "empty.parquet": (b"", "cannot be read ("),
    "zeros.parquet": (b"\x00" * 100, "cannot be read ("),
    "torn.jsonl.gz": (gzip.compress(b'{"prompt": "1?"}' * 40)[:30], "cannot be read (Compressed file ended"),
    "fake.jsonl.gz": (b"{}", "fake.jsonl.gz:1: there is no field 'prompt', only none at all"),
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd x", "cannot be read (Truncated"),
    "line.jsonl": (MANY + b"{", "line.jsonl:81: is not JSON"),
    "list.jsonl": (MANY + b"[1, 2]", "list.jsonl:81: must be a JSON object"),
    "half.jsonl": (MANY + b'{"prompt": "\\ud800", "answer": 1}', "half.jsonl:81: holds the lone surrogate"),
    "field.jsonl": (MANY + b'{"prompt": "a"}', "field.jsonl:81: there is no field 'answer'"),
}  # fmt: skip


@each("name", list(BAD))
def test_bad_files_are_refused_by_file_and_place_however_large(load, tmp_path, monkeypatch, name):
    file, (content, problem) = tmp_path / name, BAD[name]
    file.write_bytes(content)
    told = []
    for streamed in (jsonl.STREAMED_BYTES, 0):
        with monkeypatch.context() as patch:
            patch.setattr(jsonl, "STREAMED_BYTES", streamed)
            with pytest.raises(UserError) as refusal:
                load("data", file)
        assert refusal.value.key == "data.path"
        told.append(str(refusal.value))
        assert problem in told[-1]
        assert str(file) in told[-1]
    assert told[0] == told[1]
