"""Demonstrations: prompts with completions, chats of one or several turns, and what rlft sample wrote."""

import logging
from functools import partial

import pytest

from rlft.data.records import sampled_with
from rlft.types import Split, UserError
from tests.data.data_rows import says, user

SYSTEM = {"role": "system", "content": "own"}


TALK = [user("a"), says("b"), user("c"), says("d")]


@pytest.fixture
def learned(make_demonstrations, trained_rows):
    return partial(trained_rows, make_demonstrations)


def told(found):
    """(prompt id, contents of the prompt, completion) of each."""
    return [(d.prompt.id, [m["content"] for m in d.prompt.messages], d.completion) for d in found]


@pytest.mark.parametrize("with_examples", [False, True])
def test_examples_that_a_completion_was_sampled_with_are_learned_only_on_request(learned, sample, with_examples):
    line = sample("1 + 1", "2") | {"examples": [user("0?"), says("0")]}
    ((_, prompt, completion),) = told(learned(line, with_examples=with_examples))
    assert (prompt, completion) == ([*["0?", "0"] * with_examples, "What is 1 + 1?"], "2")


def test_a_prompt_and_its_completion_may_be_texts_or_messages(learned):
    lines = [{"prompt": "1?", "completion": " 1"}, {"prompt": [SYSTEM, user("2?")], "completion": [says("2")]}]
    found = learned(*lines, system_prompt="ours", prompt_template="Q: {question}")
    assert told(found) == [("mine.jsonl:1", ["ours", "Q: 1?"], " 1"), ("mine.jsonl:2", ["own", "Q: 2?"], "2")]
    assert all((d.completion_ids, d.prompt.answer) == ((), "") for d in found)


def test_a_completion_may_be_made_of_several_fields(learned, caplog):
    row = {"Body": "3 apples, 1 eaten.", "Question": "Left?", "Equation": "( 3.0 - 1.0 )", "Answer": 2.0}
    keys = {"prompt_field": "Question", "prompt_template": "{Body} {Question}", "other": row | {"Body": "None."}}
    with caplog.at_level(logging.WARNING):
        empty = [row | {"Answer": value} for value in (None, " ", float("nan"))]
        shown = learned(row, row, row, row, *empty, completion_field="{Equation} = {Answer}", **keys)
    assert told(shown)[0] == ("mine.jsonl:1", ["3 apples, 1 eaten. Left?"], "( 3.0 - 1.0 ) = 2")
    assert len(shown) == 4
    assert "3 of 7 train rows: mine.jsonl:5 has no value for all of '{Equation} = {Answer}'" in caplog.text
    [boxed] = learned(row, completion_field=r"So \boxed{ {Answer} }, {{sure}}.", **keys)
    assert boxed.completion == r"So \boxed{ 2 }, {sure}."
    other = {"hint": "Add.", "question": "1 + 1", "answer": 2}
    hinted = {"prompt_template": "{hint}", "completion_field": "{question} = {answer}", "other": other | {"hint": "x"}}
    assert told(learned(other, **hinted)) == [("mine.jsonl:1", ["Add."], "1 + 1 = 2")]
    said = r"^demonstrations\.completion_field: has \\boxed\{Answer\}, .* \\boxed\{ \{Answer\} \}"
    with pytest.raises(UserError, match=said):
        learned(row, completion_field=r"{Equation} \boxed{Answer}", **keys)
    with pytest.raises(UserError, match=r"^demonstrations\.completion_field: .*jsonl:1: there is no field 'Equatoin'"):
        learned(row, completion_field="{Equatoin}", **keys)
    with pytest.raises(UserError, match=r"^demonstrations\.prompt_template: would show the reference answer"):
        learned(row, completion_field="{Equation} = {Answer}", **keys | {"prompt_template": "{Body} {Answer}"})


def test_the_last_assistant_message_of_a_chat_is_learned(learned):
    found = learned({"messages": [SYSTEM, *TALK]}, {"messages": [*TALK, user("thanks")]})
    assert told(found) == [("mine.jsonl:1", ["own", "a", "b", "c"], "d"), ("mine.jsonl:2", ["a", "b", "c"], "d")]
    assert [m["role"] for m in found[0].prompt.messages] == ["system", "user", "assistant", "user"]


def test_all_assistant_messages_are_learned_where_asked_each_after_what_precedes_it(learned):
    found = learned({"messages": [SYSTEM, *TALK]}, turns="all", prompt_template="Q: {question}")
    assert told(found) == [("mine.jsonl:1:2", ["own", "Q: a"], "b"), ("mine.jsonl:1", ["own", "a", "b", "Q: c"], "d")]


def test_chats_that_open_alike_are_on_one_side_where_all_turns_are_learned(make_demonstrations, write, tmp_path):
    # The opening of a chat is a question of its own: it must not be held out in one chat and learned in another.
    lines = [{"messages": [user(f"{i}"), says("b"), user(f"more {j}"), says("d")]} for i in range(40) for j in range(3)]
    keys = {"path": str(write(tmp_path / "a.jsonl", *lines)), "held_out_fraction": 0.5}

    def openings(split, turns):
        found = make_demonstrations("jsonl", **keys, turns=turns).load(split)
        return {d.prompt.messages[0]["content"] for d in found}

    assert not openings(Split.train, "all") & openings(Split.held_out, "all")
    assert openings(Split.train, "all") | openings(Split.held_out, "all") == {str(i) for i in range(40)}
    # Whole chats are questions of their own where only the last message is learned: some openings are on both sides.
    assert openings(Split.train, "last") & openings(Split.held_out, "last")


def test_a_question_is_held_out_here_as_it_is_among_prompts(make_data, make_demonstrations, write, tmp_path):
    rows = [{"prompt": f"{i} + {i}?", "answer": 2 * i, "completion": f"It is {2 * i}."} for i in range(300)]
    path = str(write(tmp_path / "a.jsonl", *rows))
    for split in Split:
        prompts = make_data("jsonl", path=path).load(split)
        found = make_demonstrations("jsonl", path=path).load(split)
        assert [d.prompt.id for d in found] == [p.id for p in prompts]
        assert found


def test_questions_of_the_held_out_file_are_not_learned(learned, caplog):
    with caplog.at_level(logging.WARNING):
        found = learned({"prompt": " held  out", "completion": "x"}, {"prompt": "1?", "completion": "1"})
    assert [d.prompt.id for d in found] == ["mine.jsonl:2"]
    assert "1 training question is also held out" in caplog.text


# -- what rlft sample wrote --------------------------------------------------------------------------------------------
def test_sampled_tokens_are_learned_as_they_were_sampled(learned, sample):
    found = learned(sample("p", "ab"), sample("p", "c", cut=True), sample("q", "d"), prompt_template="not: {question}")
    assert told(found) == [(name, [f"What is {name}?"], text) for name, text in [("p", "ab"), ("p", "c"), ("q", "d")]]
    assert [d.completion_ids for d in found] == [(97, 98, 0), (99,), (100, 0)]
    assert found[0].prompt == found[1].prompt
    assert found[0].prompt.answer == "2"
    assert sampled_with(d.prompt for d in found) == {"0123456789ab"}


def test_sampled_texts_are_tokenised_anew_where_asked_and_cut_ones_left_out(learned, sample, caplog):
    lines = [sample("p", "ab"), sample("p", "c", cut=True), sample("q", "d", token_ids=[])]
    with caplog.at_level(logging.WARNING):
        found = learned(*lines, token_ids="text")
    assert [(d.prompt.id, d.completion, d.completion_ids) for d in found] == [("p", "ab", ()), ("q", "d", ())]
    assert sampled_with(d.prompt for d in found) == set()
    assert "1 sampled completion, cut by the length limit, is left out" in caplog.text
    with pytest.raises(UserError, match=r"^demonstrations\.path: all 1 sampled completions of the train split are cut"):
        learned(lines[1], token_ids="text")


def test_two_samplings_whose_ids_clash_are_refused(learned, sample):
    other = sample("p", "b") | {"prompt": [user("something else")]}
    with pytest.raises(UserError, match=r"^demonstrations\.path: two different prompts have the same id, got p"):
        learned(sample("p", "a"), other)


# -- the hub -----------------------------------------------------------------------------------------------------------
def test_a_hub_set_without_a_held_out_split_is_split_by_hash(make_demonstrations, hub_sets):
    hub_sets["train"] = [{"messages": [user(f"{i}?"), says(f"{i}!")], "source": None} for i in range(200)]
    data = make_demonstrations("hub", path="some/set")
    train, held_out = data.load(Split.train), data.load(Split.held_out)
    # Binomial(200, 0.1): 20 +- 4.2; four standard deviations.
    assert abs(len(held_out) - 20) < 17
    assert sorted(d.prompt.id for d in [*train, *held_out]) == sorted(f"train:{i}" for i in range(200))


def test_a_hub_set_with_a_held_out_split_uses_it(make_demonstrations, write, tmp_path):
    for name, count in (("sft", 3), ("test", 1)):
        write(tmp_path / f"{name}.jsonl", *({"messages": [user(f"{i}?"), says("x")]} for i in range(count)))
    data = make_demonstrations("hub", path=str(tmp_path), train_split="sft", held_out_split="test")
    assert [d.prompt.id for d in data.load(Split.held_out)] == ["test.jsonl:1"]
    assert [d.prompt.id for d in data.load(Split.train)] == ["sft.jsonl:2", "sft.jsonl:3"]  # 0? is held out


# -- tools, thoughts and other fields ----------------------------------------------------------------------------------
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
AS_OBJECT = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = [user("a"), {"role": "assistant", "content": None, "tool_calls": [CALL]},
           {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"},
           {**says("2"), "reasoning_content": "so"}]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_calls_thoughts_and_tools_of_a_chat_are_kept(learned):
    first, last = learned({"messages": CALLING, "tools": [TOOL]}, turns="all")
    assert (first.completion, first.fields, first.prompt.tools) == ("", {"tool_calls": [AS_OBJECT]}, (TOOL,))
    assert (last.completion, last.fields) == ("2", {"reasoning_content": "so"})
    assert [m["role"] for m in last.prompt.messages] == ["user", "assistant", "tool"]
    assert last.prompt.messages[1]["tool_calls"] == [AS_OBJECT]
    # Schemas may be JSON in a text and bare functions; null and empty fields of a table say nothing.
    empty = dict.fromkeys(("tool_calls", "name", "weight", "reasoning"))
    for tools in ('[{"name": "add"}]', [{"name": "add"}]):
        [found] = learned({"messages": [{**m, **empty} for m in TALK], "tools": tools})
        assert (found.fields, [t["function"]["name"] for t in found.prompt.tools]) == ({}, ["add"])
    [bare] = learned({"prompt": CALLING[:3], "completion": [CALLING[3]], "tools": None})
    assert (bare.completion, bare.fields, bare.prompt.tools) == ("2", {"reasoning_content": "so"}, ())


def test_an_assistants_message_of_weight_0_is_only_read(learned):
    talk = [TALK[0], {**TALK[1], "weight": 1}, TALK[2], {**TALK[3], "weight": 0}]
    assert told(learned({"messages": talk})) == [("mine.jsonl:1", ["a"], "b")]
    talk = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    assert told(learned({"messages": talk}, turns="all")) == [("mine.jsonl:1", ["a", "b", "c"], "d")]
