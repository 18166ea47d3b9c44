"""Large data are read where they are asked for; what comes of them is what small data give."""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlft.data import jsonl
from rlft.data.files import JsonLines
from rlft.data.prompts import PromptSet, scan, untokenised
from rlft.data.records import Lazy, RecordRow, first_by_identity
from rlft.model.backbone import Backbone
from rlft.types import Prompt, Split, UserError
from tests.helpers.family_tokenizers import with_attributes


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """60 rows; `other.jsonl` beside it has some of their questions."""
    write(tmp_path / "mine.jsonl", range(60))
    write(tmp_path / "other.jsonl", range(0, 60, 7))
    return tmp_path / "mine.jsonl"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on everything is large."""
    return lambda: monkeypatch.setattr(jsonl, "STREAMED_BYTES", 0)


def write(file: Path, numbers: Sequence[int]) -> None:
    """Questions of unlike lengths, some twice, with blank lines between them and a byte order mark before them."""
    lines = []
    for i in numbers:
        row = {"prompt": f"What is {i % 50} + {'1' * (i % 9 + 1)}? ä", "answer": i, "tests": [str(i)], "chat": []}
        row["chat"] = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": f"It is {i}"}]
        lines += [json.dumps(row, ensure_ascii=i % 2 == 0), *[""] * (i % 3 == 0)]
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())


WAYS: dict[str, dict[str, Any]] = {
    "a share held out": {},
    "another file held out": {"held_out_path": "other.jsonl"},
    "worked examples": {"few_shot": 2, "few_shot_template": "so {answer}"},
    "chats": {"messages_field": "chat", "answer_field": None, "answer_pattern": "[0-9]+"},
    "metadata": {"metadata_fields": ["tests"], "system_prompt": "Think."},
}


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("keys", WAYS.values(), ids=list(WAYS))
def test_streamed_data_are_what_held_data_are(
    keys: dict[str, Any],
    split: Split,
    mine: Path,
    make_data: Callable[..., Any],
    backbone: Backbone,
    streams: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(mine.parent)

    def scanned() -> tuple[Sequence[Prompt], PromptSet]:
        prompts = make_data("jsonl", path="mine.jsonl", **keys).load(split)
        return prompts, scan(prompts, backbone.tokenizer, 200, "drop", split)

    held, held_set = scanned()
    streams()
    lazy, lazy_set = scanned()
    assert isinstance(held, list)
    assert isinstance(lazy, Lazy)
    assert list(lazy) == held
    assert [lazy[i] for i in range(-len(lazy), len(lazy))] == [*held, *held]
    assert isinstance(lazy_set.prompts, Lazy)
    assert tuple(lazy_set.prompts) == held_set.prompts
    assert [lazy_set.prompts[i] for i in range(len(lazy_set.prompts))] == list(held_set.prompts)
    for name in ("num_tokens", "fingerprint", "notes"):
        assert getattr(lazy_set, name) == getattr(held_set, name)
    assert [lazy_set.longest(n) for n in (None, 1, 3)] == [held_set.longest(n) for n in (None, 1, 3)]
    texts = untokenised(lazy_set)
    assert [prompt.messages for prompt in texts] == [prompt.messages for prompt in held_set.prompts]
    assert not any(prompt.token_ids for prompt in texts)


def test_texts_of_streamed_data_know_what_their_prompts_have_begun_to_say(
    mine: Path, make_data: Callable[..., Any], backbone: Backbone, streams: Callable[[], None]
) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = with_attributes(backbone.tokenizer, chat_template=template)
    streams()
    prompts = make_data("jsonl", path=str(mine), **next(iter(WAYS.values()))).load(Split.train)
    texts = untokenised(scan(prompts, tokenizer, 400, "drop", Split.train))
    assert {prompt.tail for prompt in texts} == {"<think>\n"}
    assert not any(prompt.token_ids for prompt in texts)


def test_prompts_over_the_limit_are_passed_over_where_data_are_streamed(
    mine: Path, make_data: Callable[..., Any], backbone: Backbone, streams: Callable[[], None]
) -> None:
    def scanned() -> PromptSet:
        return scan(make_data("jsonl", path=str(mine)).load(Split.train), backbone.tokenizer, 28, "drop", Split.train)

    held = scanned()
    streams()
    lazy = scanned()
    assert held.notes == lazy.notes
    assert 5 < int(held.notes[0].split()[0]) < 50  # train prompts longer than prompts.max_tokens=28 were dropped
    assert tuple(lazy.prompts) == held.prompts
    assert tuple(lazy.prompts[3:9]) == held.prompts[3:9]
    assert lazy.fingerprint == held.fingerprint


def test_the_files_of_a_hub_set_are_streamed_too(
    make_data: Callable[..., Any], tmp_path: Path, streams: Callable[[], None]
) -> None:
    for name, numbers in (("train", range(30)), ("test", range(5, 10))):
        rows = ({"question": f"{i}?", "answer": f"so\n#### {i}"} for i in numbers)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    component = make_data("gsm8k", path=str(tmp_path))
    held = [component.load(split) for split in Split]
    streams()
    lazy = [component.load(split) for split in Split]
    assert all(isinstance(prompts, Lazy) for prompts in lazy)
    assert [list(prompts) for prompts in lazy] == held
    assert len(held[0]) == 25, "five questions are held out"


@pytest.mark.parametrize("bad", ['{"prompt": "a"}', "[1, 2]", '{"prompt": "\\ud800", "answer": 1}', "{"])
def test_a_bad_line_of_streamed_data_is_refused_as_one_of_held_data(
    bad: str, mine: Path, make_data: Callable[..., Any], streams: Callable[[], None]
) -> None:
    mine.write_text(mine.read_text() + f"\n{bad}\n")

    def said() -> str:
        with pytest.raises(UserError) as refused:
            make_data("jsonl", path=str(mine)).load(Split.train)
        return str(refused.value)

    held = said()
    streams()
    assert said() == held
    assert f"{mine}:81" in held, "60 rows, 20 blank lines"


@pytest.mark.parametrize("change", ["other text", "shorter", "no JSON", "gone"])
def test_a_file_that_changes_while_it_is_in_use_is_told_instead_of_trained_on(
    change: str, mine: Path, make_data: Callable[..., Any], streams: Callable[[], None]
) -> None:
    streams()
    prompts = make_data("jsonl", path=str(mine)).load(Split.train)
    before = prompts[40]
    content = mine.read_bytes()
    damaged = {"other text": content.replace(b"What", b"Whet"), "shorter": content[:100], "no JSON": content[1:]}
    if change == "gone":
        mine.unlink()
    else:
        mine.write_bytes(damaged[change])
    with pytest.raises(UserError, match=r"^data\.path: (has changed while it was in use|cannot be read)"):
        prompts[40]
    mine.write_bytes(content)
    assert prompts[40] == before


def test_a_file_is_parsed_once_for_both_its_splits(
    mine: Path, make_data: Callable[..., Any], streams: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams()
    component, passes = make_data("jsonl", path=str(mine)), []
    whole = JsonLines.records

    def counted(table: JsonLines) -> Any:
        passes.append(table.file)
        return whole(table)

    monkeypatch.setattr(JsonLines, "records", counted)
    assert len(component.load(Split.train)) + len(component.load(Split.held_out)) == 60
    assert passes == [mine]
    write(mine, range(61))  # another version of the file is another file
    component.load(Split.train)
    assert passes == [mine, mine]


@pytest.mark.slow
def test_what_is_held_of_streamed_data_is_26_bytes_a_row(
    make_data: Callable[..., Any], tmp_path: Path, streams: Callable[[], None]
) -> None:
    streams()
    file = tmp_path / "large.jsonl"
    with file.open("w") as lines:
        for i in range(20_000):
            lines.write(json.dumps({"prompt": f"{i} {'x' * 2000}", "answer": "1"}) + "\n")
    tracemalloc.start()
    prompts = make_data("jsonl", path=str(file)).load(Split.train)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The index of all rows and of the 90 % that are trained on, with the room that growing arrays have ahead (1/8).
    assert len(prompts) > 17_000
    assert held < 26 * 20_000 * 2 * 9 / 8 + 50_000
    assert peak < held + 1_000_000 < file.stat().st_size / 10


# -- rows --------------------------------------------------------------------------------------------------------------
def test_the_first_rows_by_identity_are_those_of_all_rows_sorted() -> None:
    drawn = random.Random(0)
    for number, kinds in itertools.product((1, 2, 5), (1, 3, 40)):
        rows = [RecordRow(identity=f"{drawn.randrange(kinds):03}", made=i) for i in range(100)]
        by_hand = [row for _, row in sorted({row.identity: row for row in rows}.items())[:number]]
        assert first_by_identity(rows, number) == by_hand
