import itertools
import json
import logging
import random
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from rlft.data import jsonl
from rlft.data.files import tables
from rlft.data.prompts import scan, untokenised
from rlft.data.records import RecordRow, Stored, first_by_identity
from rlft.types import Split, UserError
from tests.data.data_rows import says, user
from tests.helpers.family_tokenizers import with_attributes


def sums(count):
    return [{"prompt": f"{i} + {i} = ?", "answer": 2 * i} for i in range(count)]


def test_a_row_becomes_a_prompt(make_data, write, tmp_path):
    file = write(tmp_path / "a.jsonl", {"q": "7 + 7?", "a": 14, "more": [1]}, {"q": "8 + 8?", "a": " 16 "})
    held_out = write(tmp_path / "b.jsonl", {"q": "9 + 9?", "a": "18"})
    keys = {"prompt_field": "q", "answer_field": "a", "prompt_template": r"Q: {question} Use \boxed{}."}
    data = make_data("jsonl", path=str(file), held_out_path=str(held_out), system_prompt="Be brief.", **keys)
    first, second = data.load(Split.train)
    assert first.messages == ({"role": "system", "content": "Be brief."}, user(r"Q: 7 + 7? Use \boxed{}."))
    assert (first.id, first.answer, second.answer) == ("a.jsonl:1", "14", "16")
    assert [p.id for p in data.load(Split.held_out)] == ["b.jsonl:1"]


def test_the_answer_of_a_chat_is_its_last_assistant_message(make_data, write, tmp_path):
    turns = [{"role": "system", "content": "own"}, user("a"), says("b"), user("c")]
    file = write(tmp_path / "a.jsonl", {"chat": [*turns, says("d")], "gold": 5})
    other = write(tmp_path / "b.jsonl", {"chat": turns[1:2], "gold": 6})
    keys = {"path": str(file), "held_out_path": str(other), "messages_field": "chat", "system_prompt": "ours"}
    (prompt,) = make_data("jsonl", **keys, answer_field="gold").load(Split.train)
    assert prompt.messages == tuple(turns)  # its own system message stays
    assert prompt.answer == "5"
    (held_out,) = make_data("jsonl", **keys, answer_field="gold").load(Split.held_out)
    assert held_out.messages == ({"role": "system", "content": "ours"}, user("a"))
    keys |= {"held_out_path": None, "held_out_fraction": 1.0}
    (last,) = make_data("jsonl", **keys, answer_field=None).load(Split.held_out)
    assert (last.messages, last.answer) == (tuple(turns), "d")


def test_a_message_in_parts_is_their_text_and_other_parts_are_refused(load):
    def read(*parts):
        [prompt] = load({"m": [{"role": "user", "content": list(parts)}], "answer": 1}, messages_field="m")
        return prompt

    text, sound = {"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": "x.wav"}
    assert read(text, text).messages[0]["content"] == "aa"
    said = r"a\.jsonl:1: message 0 of field 'm' "
    with pytest.raises(UserError, match=said + "has a part 1 of its content of the type 'input_audio'"):
        read(text, sound)
    with pytest.raises(UserError, match=said + "must have a text"):
        read()


def test_the_pattern_takes_the_last_match_and_its_first_group(load):
    rows = [{"prompt": f"{i}", "answer": f"#### 1\nso\n#### {i},000"} for i in range(9)]
    grouped = load(*rows, answer_pattern=r"#### ([\d,]+)", answer_remove=",")
    whole = load(*rows, answer_pattern=r"[\d,]+")
    assert [prompt.answer for prompt in grouped] == [f"{i}000" for i in range(9)]
    assert [prompt.answer for prompt in whole] == [f"{i},000" for i in range(9)]


def test_hash_splits_are_disjoint_and_complete_and_about_the_fraction_asked(make_data, write, tmp_path):
    rows = sums(2000)
    # The same question twice, once with other white space, must not be on both sides.
    rows += [{"prompt": f"  {row['prompt'].replace(' ', '  ')}", "answer": 0} for row in rows]
    data = make_data("jsonl", path=str(write(tmp_path / "a.jsonl", *rows)), held_out_fraction=0.25)
    asked = {split: [" ".join(p.messages[0]["content"].split()) for p in data.load(split)] for split in Split}
    assert not set(asked[Split.train]) & set(asked[Split.held_out])
    assert len(asked[Split.train]) + len(asked[Split.held_out]) == 4000
    # Binomial(2000, 0.25): 500 +- 19.4; five standard deviations.
    assert abs(len(set(asked[Split.held_out])) - 500) < 97


def test_the_split_of_a_question_depends_on_nothing_else(make_data, write, tmp_path):
    rows = sums(200)
    one = make_data("jsonl", path=str(write(tmp_path / "a.jsonl", *rows)))
    two = make_data("jsonl", path=str(write(tmp_path / "b.jsonl", *rows[::-2])), prompt_template="?{question}")
    held_out = {p.messages[0]["content"] for p in one.load(Split.held_out)}
    for prompt in two.load(Split.train):
        assert prompt.messages[0]["content"].removeprefix("?") not in held_out


def test_training_questions_that_are_held_out_are_left_out(make_data, write, tmp_path, caplog):
    file, other = write(tmp_path / "a.jsonl", *sums(10)), write(tmp_path / "b.jsonl", *sums(3))
    data = make_data("jsonl", path=str(file), held_out_path=str(other))
    with caplog.at_level(logging.WARNING):
        assert [p.id for p in data.load(Split.train)] == [f"a.jsonl:{i}" for i in range(4, 11)]
    assert "3 training questions are also held out" in caplog.text


# -- worked examples ---------------------------------------------------------------------------------------------------
WORKED = {"answer_pattern": "#### (.*)", "prompt_template": "Q: {question}"}


def worked(count):
    return [{"prompt": f"{i} + {i} = ?", "answer": f"so {{final}}\n#### {2 * i}"} for i in range(count)]


def test_worked_examples_come_before_the_question_and_after_the_system_message(make_data, write, tmp_path):
    path = str(write(tmp_path / "a.jsonl", *worked(50)))
    keys = {"path": path, "system_prompt": "Be brief.", **WORKED}
    plain = make_data("jsonl", **keys).load(Split.held_out)
    for before, prompt in zip(plain, make_data("jsonl", **keys, few_shot=2).load(Split.held_out), strict=True):
        assert [m["role"] for m in prompt.messages] == ["system", *["user", "assistant"] * 2, "user"]
        assert (prompt.messages[0], prompt.messages[-1]) == before.messages
        assert (before.num_examples, prompt.num_examples) == (0, 4)
        assert (prompt.id, prompt.answer) == (before.id, before.answer)
        for asked, answered in (prompt.messages[1:3], prompt.messages[3:5]):
            number = int(asked["content"].removeprefix("Q: ").split()[0])
            assert answered["content"] == f"so {{final}}\n#### {2 * number}"  # the whole text, as it stands
    # Only the template's own words are filled in, not those of the answer.
    template = "<think>{answer}</think><answer>{final}</answer>"
    prompt = make_data("jsonl", **keys, few_shot=1, few_shot_template=template).load(Split.train)[0]
    number = int(prompt.messages[1]["content"].removeprefix("Q: ").split()[0])
    shown = f"<think>so {{final}}\n#### {2 * number}</think><answer>{2 * number}</answer>"
    assert prompt.messages[2]["content"] == shown


def test_examples_are_training_questions_and_never_the_question_itself(make_data, write, tmp_path):
    rows = worked(40)
    # Asked twice, with other white space: still one example.
    rows += [row | {"prompt": f" {row['prompt']} "} for row in rows]
    keys = {"held_out_fraction": 0.5, "few_shot": 3}
    data = make_data("jsonl", path=str(write(tmp_path / "a.jsonl", *rows)), **keys)
    other = make_data("jsonl", path=str(write(tmp_path / "b.jsonl", *rows[::-1])), **keys)
    one, two = ([[m["content"].strip() for m in p.messages] for p in d.load(Split.train)] for d in (data, other))
    assert one == two[::-1], "they do not depend on the order of the file"
    train = {p.messages[-1]["content"].strip() for p in data.load(Split.train)}
    shown = []
    for prompt in [*data.load(Split.train), *data.load(Split.held_out)]:
        *examples, own = (m["content"].strip() for m in prompt.messages if m["role"] == "user")
        assert len(set(examples)) == 3
        assert set(examples) <= train - {own}
        shown.append(tuple(examples))
    # The first three of the hashes; for each of these three, the other two and the fourth.
    assert len(set(shown)) == 4
    assert len({example for examples in shown for example in examples}) == 4


def test_a_chat_is_an_example_without_its_system_message(make_data, write, tmp_path):
    def talk(i):
        turns = [("system", f"own {i}"), ("user", f"a {i}"), ("assistant", f"b {i}"), ("user", f"c {i}")]
        return [{"role": role, "content": text} for role, text in [*turns, ("assistant", f"d {i}")]]

    file = write(tmp_path / "a.jsonl", *({"chat": talk(i)} for i in range(2)))
    other = write(tmp_path / "b.jsonl", {"chat": talk(2)})
    keys = {"path": str(file), "held_out_path": str(other), "messages_field": "chat", "answer_field": None}
    first, second = make_data("jsonl", **keys, few_shot=1, prompt_template="Q: {question}").load(Split.train)
    assert [m["content"] for m in first.messages] == ["own 0", "a 1", "b 1", "Q: c 1", "d 1", "a 0", "b 0", "Q: c 0"]
    assert [m["content"] for m in second.messages] == ["own 1", "a 0", "b 0", "Q: c 0", "d 0", "a 1", "b 1", "Q: c 1"]


def test_fields_that_rewards_read_go_with_the_prompt(load):
    row = {"prompt": "Add", "answer": "-", "tests": ["assert add(1, 2) == 3"]}
    (prompt,) = load(row, metadata_fields=["tests"])
    assert prompt.metadata == {"tests": ["assert add(1, 2) == 3"]}
    with pytest.raises(UserError, match=r"there is no field 'test', only 'prompt', .* \(data.metadata_fields\)"):
        load(row, metadata_fields=["test"])


def test_a_pattern_that_cuts_numbers_is_named_with_their_count_and_an_example(load, caplog):
    texts = ["#### 18", "#### 1,080", "#### 2.5", "#### 18.", "#### 18, as asked", "so 7 #### -3"]
    rows = [{"prompt": f"{i}", "answer": text} for i, text in enumerate(texts)]
    with caplog.at_level(logging.WARNING):
        load(*rows, answer_pattern=r"#### (-?\d+)")
    (record,) = caplog.records
    said = "data.answer_pattern: cuts a number in 2 of 6 answers: a.jsonl:2 has the answer '1' of '#### 1,080'; "
    assert record.getMessage().startswith(said)
    caplog.clear()
    prompts = load(*rows, answer_pattern=r"#### (-?[\d,.]*\d)")
    assert [prompt.answer for prompt in prompts] == ["18", "1,080", "2.5", "18", "18", "-3"]
    load(*rows, answer_pattern=r"(\d{1,2})\D*$")
    # From the other side: the pattern begins within a number.
    assert "cuts a number in 2 of 6 answers: a.jsonl:2 has the answer '80'" in caplog.text


def test_numbers_and_booleans_are_written_out_and_one_that_is_missing_is_refused(load):
    numbers = {1e-05: "0.00001", 1e16: "10000000000000000", 2.5: "2.5", 18.0: "18", -3: "-3", 1e-7: "0.0000001"}
    numbers |= {True: "true", False: "false", "yes": "yes"}
    prompts = load(*({"prompt": f"{i}", "answer": number} for i, number in enumerate(numbers)))
    assert [prompt.answer for prompt in prompts] == list(numbers.values())
    assert load({"prompt": "?", "answer": [True, "yes"]})[0].answer == "true"
    for number in (float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"a\.jsonl:1: .*(holds no number|NaN|Infinity)"):
            load({"prompt": "?", "answer": number})


# -- large files -------------------------------------------------------------------------------------------------------
@pytest.fixture
def mine(tmp_path):
    """60 rows; `other.jsonl` beside it has some of their questions."""
    write(tmp_path / "mine.jsonl", range(60))
    write(tmp_path / "other.jsonl", range(0, 60, 7))
    return tmp_path / "mine.jsonl"


@pytest.fixture
def streams(monkeypatch):
    """From its call on everything is large."""
    return lambda: monkeypatch.setattr(jsonl, "STREAMED_BYTES", 0)


def write(file, numbers):
    """Questions of unlike lengths, some twice, with blank lines between them and a byte order mark before them."""
    lines = []
    for i in numbers:
        row = {"prompt": f"What is {i % 50} + {'1' * (i % 9 + 1)}? ä", "answer": i, "tests": [str(i)], "chat": []}
        row["chat"] = [user(row["prompt"]), says(f"It is {i}")]
        lines += [json.dumps(row, ensure_ascii=i % 2 == 0), *[""] * (i % 3 == 0)]
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
WAYS = {
    "a share held out, and long prompts dropped": {},
    "another file held out": {"held_out_path": "other.jsonl"},
    "worked examples": {"few_shot": 2, "few_shot_template": "so {answer}"},
    "chats": {"messages_field": "chat", "answer_field": None, "answer_pattern": "[0-9]+"},
    "metadata": {"metadata_fields": ["tests"], "system_prompt": "Think."},
}


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("keys", WAYS.values(), ids=list(WAYS))
def test_streamed_data_are_what_held_data_are(keys, split, mine, make_data, backbone, streams, monkeypatch):
    monkeypatch.chdir(mine.parent)
    tokenizer = with_attributes(backbone.tokenizer, chat_template=THINKING)

    def scanned():
        prompts = make_data("jsonl", path="mine.jsonl", **keys).load(split)
        return prompts, scan(prompts, tokenizer, 400 if keys else 30, "drop", split)

    held, held_set = scanned()
    streams()
    lazy, lazy_set = scanned()
    assert isinstance(held, list)
    assert isinstance(lazy, Stored)
    assert list(lazy) == held
    assert [lazy[i] for i in range(-len(lazy), len(lazy))] == [*held, *held]
    assert isinstance(lazy_set.prompts, Stored)
    assert tuple(lazy_set.prompts) == held_set.prompts
    assert [lazy_set.prompts[i] for i in range(len(lazy_set.prompts))] == list(held_set.prompts)
    assert tuple(lazy_set.prompts[3:9]) == held_set.prompts[3:9]
    for name in ("num_tokens", "fingerprint", "notes"):
        assert getattr(lazy_set, name) == getattr(held_set, name)
    assert [lazy_set.longest(n) for n in (None, 1, 3)] == [held_set.longest(n) for n in (None, 1, 3)]
    texts = untokenised(lazy_set)
    assert [prompt.messages for prompt in texts] == [prompt.messages for prompt in held_set.prompts]
    assert not any(prompt.token_ids for prompt in texts)
    assert {prompt.tail for prompt in texts} == {"<think>\n"}
    if not keys and split is Split.train:
        assert 5 < int(held_set.notes[0].split()[0]) < 50  # train prompts longer than the limit were dropped


def test_the_files_of_a_hub_set_are_streamed_too(make_data, tmp_path, streams):
    for name, numbers in (("train", range(30)), ("test", range(5, 10))):
        rows = ({"question": f"{i}?", "answer": f"so\n#### {i}"} for i in numbers)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    component = make_data("gsm8k", path=str(tmp_path))
    held = [component.load(split) for split in Split]
    streams()
    lazy = [component.load(split) for split in Split]
    assert all(isinstance(prompts, Stored) for prompts in lazy)
    assert [list(prompts) for prompts in lazy] == held
    assert len(held[0]) == 25, "five questions are held out"


def test_a_file_that_changes_while_it_is_in_use_changes_nothing(mine, make_data, streams):
    streams()
    prompts = make_data("jsonl", path=str(mine)).load(Split.train)
    before = list(prompts)
    mine.write_bytes(mine.read_bytes().replace(b"What", b"Whet"))
    assert list(prompts) == before
    mine.unlink()
    assert list(prompts) == before


def test_a_folder_for_temporary_files_that_is_full_or_missing_is_refused(mine, make_data, streams, monkeypatch):
    streams()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", partial(Path("/dev/full").open, "w+b"))
        said = r"^data\.path: its rows do not fit .*No space left.*; set TMPDIR to a folder"
        with pytest.raises(UserError, match=said):
            make_data("jsonl", path=str(mine)).load(Split.train)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null/none"])
    with pytest.raises(UserError, match=r"^data\.path: its rows do not fit .*No usable temporary directory.*TMPDIR"):
        make_data("jsonl", path=str(mine)).load(Split.train)


@pytest.mark.parametrize("limit", [0, 2**30])
def test_what_a_rows_own_reading_lacks_is_not_blamed_on_temporary_files(limit, mine, monkeypatch):
    def parse(fields, row_id):
        raise FileNotFoundError("picture.png")

    monkeypatch.setattr(jsonl, "STREAMED_BYTES", limit)
    with pytest.raises(FileNotFoundError, match="picture"):
        jsonl.rows(tables([mine], "data.path"), parse, "data.path")


def test_rows_that_are_learned_are_in_memory_and_not_in_a_file_as_well(mine, make_demonstrations, monkeypatch, streams):
    made = make_demonstrations("jsonl", path=str(mine), completion_field="prompt")
    held = made.load(Split.train)
    streams()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: pytest.fail("a file is made"))
    assert made.load(Split.train) == held


@pytest.mark.slow
def test_what_is_held_of_large_data_is_16_bytes_a_row(make_data, tmp_path, streams):
    streams()
    file = tmp_path / "large.jsonl"
    with file.open("w") as lines:
        for i in range(20_000):
            lines.write(json.dumps({"prompt": f"{i} {'x' * 2000}", "answer": "1"}) + "\n")
    tracemalloc.start()
    prompts = make_data("jsonl", path=str(file)).load(Split.train)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The places of the 90 % that are trained on, with the room that growing arrays have ahead (1/8), and modules.
    assert len(prompts) > 17_000
    assert held < 16 * 20_000 * 9 / 8 + 600_000
    assert peak < held + 1_500_000 < file.stat().st_size / 10


# -- rows --------------------------------------------------------------------------------------------------------------
def test_the_first_rows_by_identity_are_those_of_all_rows_sorted():
    drawn = random.Random(0)
    for number, kinds in itertools.product((1, 2, 5), (1, 3, 40)):
        rows = [RecordRow(identity=f"{drawn.randrange(kinds):03}", made=i) for i in range(100)]
        by_hand = [row for _, row in sorted({row.identity: row for row in rows}.items())[:number]]
        assert first_by_identity(rows, number) == by_hand
