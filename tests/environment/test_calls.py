"""Calls of tools are read as each family's template writes them, and what cannot be read is told."""

import json
import pickle

import pytest
from hypothesis import example, given, settings, strategies as st
from in_one_test import each
from slow_cases import slow

from rlft.environment.calls import CallTemplate, DescribedCalls, JsonCalls, TemplateCalls, XmlCalls, reader_of
from rlft.types import UserError
from tests.helpers.family_tokenizers import family_tokenizer, with_attributes

PARAMETERS = {"a": {"type": "integer"}, "b": {"type": "array"}, "say": {"type": "string"}}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": PARAMETERS}},
}
OPENING = ({"role": "user", "content": "1 + 1?"},)
ARGUMENTS = {"a": 2, "b": [1, {"c": "}"}], "say": "<x> \"y\" {'z'}"}
FORMS = {
    "qwen2.5": TemplateCalls(marker="<tool_call>", name="name", arguments="arguments"),
    "qwen3": TemplateCalls(marker="<tool_call>", name="name", arguments="arguments"),
    "smollm3": TemplateCalls(marker="<tool_call>", name="name", arguments="arguments"),
    "mistral": TemplateCalls(marker="[TOOL_CALLS]", name="name", arguments="arguments"),
    "llama-3": TemplateCalls(marker="", name="name", arguments="parameters"),
}


def written(family, number):
    """A turn with so many calls, as the family's template writes it."""
    tokenizer = family_tokenizer(family)
    calls = [
        {"type": "function", "id": "123456789", "function": {"name": "add", "arguments": {**ARGUMENTS, "a": n}}}
        for n in range(number)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    tools = [ADD]
    before = tokenizer.apply_chat_template(list(OPENING), tools=tools, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template([*OPENING, turn], tools=tools, tokenize=False)
    return str(text)[len(str(before)) :].strip().removesuffix("<|im_end|>").removesuffix("<|eot_id|>")


@each(
    ("family", "number"),
    [(family, n) for family in FORMS for n in (1, 2) if (family, n) != ("llama-3", 2)],  # which writes one call a turn
)
def test_what_a_template_writes_is_read(family, number):
    reader = reader_of("template", CallTemplate(family_tokenizer(family), [ADD], OPENING))
    assert reader == FORMS[family]
    calls = reader.calls(written(family, number))
    expected = [("add", {**ARGUMENTS, "a": n}, "") for n in range(number)]
    assert [(c.name, c.arguments, c.problem) for c in calls] == expected


@each("family", FORMS)
def test_text_without_a_call_has_none(family):
    reader = reader_of("template", CallTemplate(family_tokenizer(family), [ADD], OPENING))
    for text in ("", "It is 5.", '{"answer": 5}', "a {b} c", "<think>{</think>"):
        assert reader.calls(text) == []


@each(("text", "problem"), [
    ("<tool_call>", "not valid JSON"),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}', "not valid JSON"),
    ("<tool_call>5</tool_call>", "names no tool"),
    ('<tool_call>{"name": 5}</tool_call>', "names no tool"),
    ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "no JSON object"),
    ("<tool_call>" + "[" * 100_000, "too deep"),
    ('<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}", "too deep"),
    ('<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}", "too many digits"),
])  # fmt: skip
def test_a_call_that_cannot_be_made_says_why(text, problem):
    [call] = FORMS["qwen2.5"].calls(text)
    assert problem in call.problem


TWO_CALLS = [{"name": "add", "arguments": {"a": n, "say": '{"name": 1}'}} for n in (1, 2)]


@each(("reader", "text", "called"), [
    (FORMS["qwen2.5"], '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [{"a": 1}]),
    (JsonCalls(), "First {} then {}.".format(*map(json.dumps, TWO_CALLS)), [c["arguments"] for c in TWO_CALLS]),
    # Policies break lines in strings, where they write programs.
    (JsonCalls(), '{"name": "add", "arguments": {"code": "a\nb"}} and {"name": "add", "arguments": {}}',
     [{"code": "a\nb"}, {}]),
])  # fmt: skip
def test_json_stands_anywhere_and_in_the_ways_of_policies(reader, text, called):
    assert [(c.name, c.arguments, c.problem) for c in reader.calls(text)] == [("add", given, "") for given in called]
    [broken] = JsonCalls().calls('so {"name": "add", "arguments": {')
    assert "not valid JSON" in broken.problem


ONE = '{"name": "add", "arguments": {"a": 1}}'
TWO = '{"arguments": {"a": 2}, "name": "add"}'
MARKED = '{"name": "add", "arguments": {"say": "<tool_call>{\\"name\\": \\"add\\"}</tool_call>[TOOL_CALLS]<think>"}}'


@each(("text", "called"), [
    (f"<think>maybe «{ONE}»</think>", []),
    (f"<think>maybe «{ONE}», rather</think>\n«{TWO}»", [2]),
    (f"maybe «{ONE}», rather</think>\n«{TWO}»", [2]),
    (f"<think>maybe «{ONE}»", []),
    (f"[THINK]«{ONE}»[/THINK]It is «{TWO}»", [2]),
    (f"«{ONE}»\n<think>and «{TWO}»?</think>", [1]),
    (f"«{ONE}»\n<think>and?</think>\n«{TWO}»", [1, 2]),
    (f"«{ONE}»«{TWO}»", [1, 2]),
    (f"«{ONE}\n{TWO}»", [1, 2]),
    (f"«{ONE}; {TWO}»", [1, 2]),
    (f"«{ONE}, {TWO}»", [1, 2]),
    (f"«[{ONE}, {TWO}]»", [1, 2]),
    (f"«{TWO}»", [2]),
    (f"«\n```json\n{ONE}\n```\n»", [1]),
    (f"«```\n{TWO}```»", [2]),
    (f"«{MARKED}»", [None]),
    (f"«{MARKED}»\n«{TWO}»", [None, 2]),
])  # fmt: skip
def test_calls_are_read_as_json_outside_of_reasoning(text, called):
    readers = {
        ("<tool_call>", "</tool_call>"): FORMS["qwen2.5"],
        ("[TOOL_CALLS]", ""): FORMS["mistral"],
        ("", ""): JsonCalls([ADD]),
        ("\n```json\n", "\n```\n"): JsonCalls([ADD]),
    }
    for (opening, closing), reader in readers.items():
        if isinstance(reader, TemplateCalls) or "[{" not in text:
            written = text.replace("«", opening).replace("»", closing)
            calls = reader.calls(written)
            assert [(c.name, c.arguments.get("a"), c.problem) for c in calls] == [("add", n, "") for n in called]
            first = written.find(opening or "{", written.rfind("</think>") if called[:1] == [2] else 0)
            if called[:1] == [1]:
                assert reader.before(written).rstrip("`json\n") == written[:first].rstrip("`json\n")
            elif not called:
                assert reader.before(written) == written


@each(("text", "called"), [
    ('{"name": "Bob", "age": 3}', []),
    ('{"name": "add"}', ["add"]),
    ('{"name": "sub", "arguments": {"a": 1}}', ["sub"]),
    ('{"name": "sub", "arguments": {"a": 1}, "year": 1990}', []),
    ('{"answer": {"name": "add", "arguments": {}}}', []),
    ('{"people": [{"name": "Bob"}]}', []),
    ('{"id": "1", "arguments": {}, "type": "function", "name": "add"}', ["add"]),
    ('```json\n{"name": "add", "arguments": {}}\n```', ["add"]),
    ('{"name": "Bob", "age": ', []),
    ('{"name": 5}', []),
])  # fmt: skip
def test_an_object_without_a_marker_is_a_call_only_if_it_names_a_tool_or_is_nothing_else(text, called):
    unmarked = TemplateCalls(marker="", name="name", arguments="arguments", tools=frozenset({"add"}))
    for reader in (JsonCalls([ADD]), unmarked):
        if reader is not unmarked or not text.endswith(": "):  # what begins as a call and is broken is told of there
            assert [call.name for call in reader.calls(text)] == called, reader


def test_calls_in_xml_are_read_outside_of_reasoning_and_keep_their_arguments():
    reader = XmlCalls([ADD])
    call = '<call tool="add"><say>{}</say></call>'
    text = f"<think>{call.format(1)}</think>{call.format('<think>2')} and {call.format('3')}"
    assert [c.arguments for c in reader.calls(text)] == [{"say": "<think>2"}, {"say": "3"}]
    assert reader.before(text) == f"<think>{call.format(1)}</think>"


FRAGMENTS = [
    '{"name": ', '{"name": "add", "arguments": ', '"add"', ', "arguments": ', '{"a": ', "{", "}", "[", "]", '"', "\n",
    ",", "\\ud800", "1e999", "NaN", "9" * 5000, "[" * 900, "]" * 900, '{"a":' * 300, "<tool_call>", "</tool_call>",
    "[TOOL_CALLS]", '<call tool="add">', "<call>", "<a>", "<b>", "</a>", "</b>", "</call>", " ", "x",
]  # fmt: skip
ANYTHING = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=12).map("".join)


@pytest.mark.parametrize(
    "form",
    [*(form if name in ("mistral", "llama-3") else slow(form) for name, form in FORMS.items()),
     JsonCalls(), XmlCalls([ADD])],
    ids=[*FORMS, "json", "xml"],
)  # fmt: skip
@given(text=ANYTHING)
@example(text='<tool_call>{"name": "\\ud800", "arguments": {"a": "\\ud800"}}')
@example(text='{"name": "\\ud800", "arguments": "\\ud800"}')
@example(text='<call tool="add"><a>' + "[" * 900 + "]" * 900 + "</a></call>")
@settings(max_examples=200, deadline=None)
def test_whatever_the_policy_writes_is_a_call_or_a_problem(form, text):
    """Which can be sent to a worker, written to a file, and put before the policy."""
    for call in form.calls(text.encode("utf-8", "replace").decode()):
        assert pickle.loads(pickle.dumps(call)).written == call.written
        assert f"{call.name}{call.written}{call.problem}".encode()


def test_xml_calls_have_values_of_their_parameters_types():
    reader = XmlCalls([ADD])
    [call] = reader.calls('<call tool="add"><a>2</a><b>[1]</b><say>3 < 4 </say></call> and more')
    assert call.arguments == {"a": 2, "b": [1], "say": "3 < 4 "}
    for text, problem in (
        ('<call tool="add"><a>2</a>', "has no </call>"),
        ("<call><a>2</a></call>", "names no tool"),
        ('<call tool="add">2</call>', "text outside"),
    ):
        [call] = reader.calls(text)
        assert problem in call.problem


def test_a_tokenizer_that_describes_its_answers_is_read_by_transformers():
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }  # fmt: skip
    tokenizer = with_attributes(family_tokenizer("qwen2.5"), response_template=template)
    reader = reader_of("template", CallTemplate(tokenizer, [ADD], OPENING))
    assert isinstance(reader, DescribedCalls)
    [call] = reader.calls('Yes.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    assert (call.name, call.arguments, call.problem) == ("add", {"a": 1}, "")
    [broken] = reader.calls("<tool_call>{</tool_call>")
    assert "cannot be read" in broken.problem


def test_a_template_with_a_form_of_its_own_is_refused():
    tokenizer = family_tokenizer("smollm2")  # its template shows no calls at all
    with pytest.raises(UserError, match=r"environment.syntax: .* not known here, got template; use .*json or xml"):
        reader_of("template", CallTemplate(tokenizer, [ADD], OPENING))
