import importlib
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import rlft
from rlft.data.arithmetic import split_of
from rlft.data.examples import Text, load_texts
from rlft.data.files import files_at
from rlft.types import Split, UserError

ASSETS = Path(rlft.__file__).parent / "assets"
SCRIPTS = Path(__file__).parents[2] / "scripts"


def write(path: Path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- reading -----------------------------------------------------------------------------------------------------------
def test_texts_come_in_file_order_and_as_they_stand(tmp_path: Path) -> None:
    rows = [{"body": " a\n", "id": 7}, {"body": "é <|im_end|>"}, {"body": "a"}, {"body": "a"}]
    found = load_texts(write(tmp_path / "a.jsonl", *rows), "body", None)
    assert found == [Text(context="", text=text) for text in (" a\n", "é <|im_end|>", "a", "a")]


def test_what_stands_before_a_text_is_read_from_its_own_field_and_may_be_empty(tmp_path: Path) -> None:
    rows = [{"before": " q\n", "body": "a "}, {"body": "b", "before": ""}, {"before": " ", "body": "c"}]
    found = load_texts(write(tmp_path / "a.jsonl", *rows), "body", "before")
    assert [(text.context, text.text) for text in found] == [(" q\n", "a "), ("", "b"), (" ", "c")]


REFUSALS = {
    "no such file": (
        None,
        "pretrain.path: there is no such file, got {file}; give the path of a file or "
        "folder (a set of the hub: choose hub in place of jsonl)",
    ),
    "nothing in it": (b"\n", "pretrain.path: holds no texts, got {file}; give a file with one JSON object a line"),
    "another field": (
        b'{"text": "a"}\n\n{"body": "a", "id": 1}',
        "pretrain.field: {file}:3: there is no field 'text', only 'body', 'id'; name the field that holds the text",
    ),
    "no field at all": (
        b"{}",
        "pretrain.field: {file}:1: there is no field 'text', only none at all; name the field that holds the text",
    ),
    "not a text": (
        b'{"text": ["a"]}',
        "pretrain.field: {file}:1: it must hold a string, it holds list, got text; "
        "name the field that holds the text, or fix that row",
    ),
    "null": (
        b'{"text": null}',
        "pretrain.field: {file}:1: it must hold a string, it holds NoneType, got text; "
        "name the field that holds the text, or fix that row",
    ),
    "empty": (
        b'{"text": "a"}\n{"text": " \\n"}',
        "pretrain.path: {file}:2: the text is empty; fix or remove it",
    ),
    "not JSON": (b"plain text", "pretrain.path: {file}:1: is not JSON (Expecting value); fix or remove that line"),
    "nothing given": (
        b'{"given": "q", "text": "a"}\n{"text": "a"}',
        "pretrain.given_field: {file}:2: there is no field 'given', only 'text'; "
        "name the field that holds what stands before the text",
    ),
    "null given": (
        b'{"given": null, "text": "a"}',
        "pretrain.given_field: {file}:1: it must hold a string, it holds NoneType, got given; "
        "name the field that holds what stands before the text, or fix that row",
    ),
    "nothing after what is given": (
        b'{"given": "q", "text": ""}',
        "pretrain.path: {file}:1: the text is empty; fix or remove it",
    ),
}
"""Where a line has a field `given`, that is read, too."""


@pytest.mark.parametrize(("content", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_holds_no_texts_is_refused_by_its_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_bytes(content)
    given = "given" if b"given" in (content or b"") else None
    with pytest.raises(UserError) as refusal:
        load_texts(str(file), "text", given)
    assert str(refusal.value) == message.format(file=file)


def test_one_key_cannot_be_both_given_and_learned(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        load_texts(write(tmp_path / "a.jsonl", {"text": "a"}), "text", "text")
    assert str(refusal.value) == (
        "pretrain.given_field: is the key of the text itself (pretrain.field), got text; "
        "name the field of what stands before the text, or set it to null"
    )


# -- the text that ships -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def maker():
    """The module of scripts/make_arithmetic_examples.py."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("make_arithmetic_examples")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "tiny-arithmetic")


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return load_texts("embedded:arithmetic-text", "text", "given")


START, TURN = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def parts(text: Text) -> tuple[int, str, int, str]:
    """(47, "+", 85, answer) of a chat about 47 + 85."""
    asked = text.context.removeprefix(START).removesuffix(TURN)
    a, operation, b = asked.removeprefix("What is ").removesuffix("?").split()
    return int(a), operation, int(b), text.text.removesuffix("<|im_end|>")


def test_the_script_gives_the_text_that_ships(maker, tokenizer, texts) -> None:
    assert maker.make_texts(tokenizer, 1350, seed=0) == texts
    assert maker.make_texts(tokenizer, 20, seed=1) != texts[:20]
    [file] = files_at("embedded:arithmetic-text", "pretrain.path")
    assert file.stat().st_size <= 200_000


def test_it_is_about_problems_of_the_training_split_each_once(texts) -> None:
    problems = [parts(text)[:3] for text in texts]
    assert {split_of(*numbers) for numbers in problems} == {Split.train}
    assert len(set(problems)) == len(texts) == 1350
