"""Python functions as tools: what their arguments may be, and what is told of those that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from in_one_test import each

from rlft.environment.protocol import Checker, Malformed
from rlft.environment.tools import schema_of
from tests.environment.test_conversations import SAMPLING, TOKENIZER, call, one, prompt, tools


def add(a: int, b: int, how: str | None = None, *rest: int) -> str:
    """Adds.

    Args:
        a: one
        b: other
        how: how
        rest: more
    """
    return f"{a + b} {rest} {how}"


def free(a: int, **others: str) -> str:
    """Takes any.

    Args:
        a: one
        others: others
    """
    return f"{a} {others}"


@each(("function", "arguments", "told"), [
    (add, {"a": 1, "b": 2}, None),
    (add, {"a": 1, "b": 2, "how": None}, None),
    (add, {"a": "1", "b": "2"}, "add: a: '1' is not of type 'integer'; b: '2' is not of type 'integer'"),
    (add, {"a": 1}, "add: 'b' is a required property"),
    (add, {"a": 1, "b": 2, "c": 3}, "add: Additional properties are not allowed ('c' was unexpected)"),
    (free, {"a": 1, "color": "red"}, None),
    (free, {"color": "red"}, "free: 'a' is a required property"),
])  # fmt: skip
def test_arguments_of_python_functions(function, arguments, told):
    checker = Checker([schema_of(function, "environment.tools", "mine")])
    if told is None:
        assert checker.checked(function.__name__, arguments) == arguments
        return
    with pytest.raises(Malformed) as refused:
        checker.checked(function.__name__, arguments)
    assert str(refused.value) == told


MISBEHAVIOUR = {
    "hang": ("time", "Error: no answer within 0.5 s"),
    "hang for good": ("time", "Error: no answer within 0.5 s"),  # it ignores the alarm, and is killed
    "raise": ("raised", "Error: ValueError: a \x00 ? problem <|im_end|>"),
    "exit": ("raised", "Error: SystemExit: 3"),
    "interrupt": ("raised", "Error: KeyboardInterrupt: "),
    "die": ("died", "Error: the tool's process ended with exit code 7"),
    "fork": ("", "fork"),
    "shout": ("", "x" * 400 + f" [cut: {2**20 - 400} more characters]"),
}
"""{how: (cause, what is told)}."""


def test_a_tool_that_misbehaves_is_told_and_the_conversation_goes_on(converse):
    texts = {how: [[call("misbehave", how=how), call("add", a=1, b=1), "done"]] for how in MISBEHAVIOUR}
    conversations = converse(texts, tools(call_timeout=0.5, workers=2))
    groups = conversations.sample(list(map(prompt, texts)), 1, [0] * len(texts), SAMPLING)
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    for group, (how, (cause, said)) in zip(groups, MISBEHAVIOUR.items(), strict=True):
        completion = one([group])
        first, second, last = completion.turns
        [misbehaved] = first.calls
        assert (misbehaved.answer, misbehaved.cause, misbehaved.failed) == (said, cause, bool(cause)), how
        assert (second.calls[0].answer, last.text) == ("2", "done"), how
        # Text that looks like a special token stays text: the only end tokens between turns are the template's own.
        foreign = [t for t, own in zip(completion.token_ids, completion.mask, strict=True) if not own]
        assert foreign.count(end) == 2, "that of each answer's message"


def test_a_malformed_call_is_answered_with_the_error(converse):
    wrong = {
        "<tool_call>\n{'name': 'add'}\n</tool_call>": "not valid JSON",
        call("subtract", a=1, b=2): "Error: there is no tool 'subtract'; the tools are add",
        call("add", a=1): "Error: add: 'b' is a required property",
        call("add", a=1, b=2, c=3): "Error: add: Additional properties are not allowed ('c' was unexpected)",
        '<tool_call>\n{"name": "add", "arguments": [1, 2]}\n</tool_call>': "no JSON object",
        '<tool_call>\n{"arguments": {}}\n</tool_call>': "names no tool",
    }
    conversations = converse({"*": [[*wrong, "done"]]}, tools("conversation_tools.add"))
    completion = one(conversations.sample([prompt()], 1, [0], replace(SAMPLING, max_tokens=3000)))
    assert len(completion.turns) == len(wrong) + 1
    for turn, problem in zip(completion.turns, wrong.values(), strict=False):
        assert ([c.cause for c in turn.calls], problem in turn.answer) == (["malformed"], True), turn
        assert not problem.startswith("Error") or [c.answer for c in turn.calls] == [problem]
    assert completion.turns[-1].text == "done"
