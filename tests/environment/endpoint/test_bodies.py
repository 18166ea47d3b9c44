"""Requests by the list of their fields: each with right, neutral and wrong values, and unknown ones anywhere.

The fields that OpenAI's and vLLM's own requests have are read from their installed packages.
"""

import ast
import copy
import importlib.util
import json
import random
import re
from pathlib import Path
from typing import get_args

import openai.types.chat as openai_chat
import openai.types.chat.completion_create_params as openai_chats
import openai.types.completion_create_params as openai_texts
import pytest
from in_one_test import each
from openai.types.shared_params import FunctionDefinition
from pydantic import BaseModel

from rlft.environment.endpoint import bodies
from rlft.environment.endpoint.bodies import Chat, Complete, Generate, Message, Refusal, Tokenize, read

CALLED = {"id": "000000001", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CHAT = {
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}, {"text": "!"}]},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "000000001", "content": "5"},
    ],
    "tools": [TOOL],
    "stream": True,
    "stream_options": {"include_usage": True},
}
GENERATE = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
LEVELS = {
    Chat: (Chat, CHAT, []),
    Complete: (Complete, {"prompt": "a"}, []),
    Generate: (Generate, GENERATE, []),
    bodies.DrawnTokens: (Generate, GENERATE, ["sampling_params"]),
    Tokenize: (Tokenize, {"messages": CHAT["messages"], "tools": [TOOL]}, []),
    bodies.StreamOptions: (Chat, CHAT, ["stream_options"]),
    Message: (Chat, CHAT, ["messages", 2]),
    bodies.Part: (Chat, CHAT, ["messages", 0, "content", 0]),
    bodies.Called: (Chat, CHAT, ["messages", 2, "tool_calls", 0]),
    bodies.CalledFunction: (Chat, CHAT, ["messages", 2, "tool_calls", 0, "function"]),
    bodies.Tool: (Chat, CHAT, ["tools", 0]),
    bodies.Function: (Chat, CHAT, ["tools", 0, "function"]),
}
"""{level: (body, a request that has this level, the way to it)}."""
REQUIRED = {"messages", "prompt", "token_ids", "role", "text", "function", "name"}
"""Fields without which a level is nothing, where it has them."""
WRONG = (True, "1", "x", 1, -2, 1.5, 0, 10**9, [], [None], ["x", 1], {}, {"x": 1}, "")
"""Values of any type; a field takes some of them."""


def given(level, field, value):
    """(the body, a request in which the field of this level has this value)."""
    kind, request, way = LEVELS[level]
    made = copy.deepcopy(request)
    here = made
    for step in way:
        here = here[step]
    here[field] = value
    return kind, made


def said(kind, request):
    """What a request says, as it is used."""
    body = read(kind, json.dumps(request).encode())
    return body, body.model_dump(), getattr(body, "shown_tools", None)


def refusal(kind, request):
    with pytest.raises(Refusal) as caught:
        read(kind, json.dumps(request).encode())
    assert caught.value.status == 400
    return caught.value


def outcome(kind, request):
    """What a request says, or why it is refused."""
    try:
        return said(kind, request)[1]
    except Refusal as refused:
        return refused.message


def where(level, field):
    return ".".join(map(str, [*LEVELS[level][2], field]))


def known(level):
    return {*level.model_fields, *level.neutral, *level.without_effect}


# -- the lists of others -----------------------------------------------------------------------------------------------
def fields_of_vllm(path, name):
    """{field of a class of vLLM: (whether its default is written there, its default)}; vLLM is not imported."""
    spec = importlib.util.find_spec("vllm")
    tree = ast.parse((Path(str(spec.origin)).parent / path).read_text())
    [made] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    found = {}
    for line in made.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_":
            found[line.target.id] = default_of(line.value)
    return found


def default_of(value):
    if isinstance(value, ast.Call):
        value = next((each.value for each in value.keywords if each.arg == "default"), next(iter(value.args), None))
    try:
        return value is not None, ast.literal_eval(value) if value is not None else None
    except ValueError:
        return False, None


PROTOCOL = "entrypoints/{}/protocol.py"
OF_VLLM = {
    Chat: [(PROTOCOL.format("openai/chat_completion"), "ChatCompletionRequest")],
    Complete: [(PROTOCOL.format("openai/completion"), "CompletionRequest")],
    Generate: [(PROTOCOL.format("scale_out/token_in_token_out"), "GenerateRequest")],
    bodies.DrawnTokens: [("sampling_params.py", "SamplingParams")],
    Tokenize: [(PROTOCOL.format("serve/tokenize"), f"Tokenize{kind}Request") for kind in ("Chat", "Completion")],
    bodies.StreamOptions: [(PROTOCOL.format("generate/base"), "StreamOptions")],
    bodies.Function: [(PROTOCOL.format("generate/base"), "FunctionDefinition")],
}
OF_OPENAI = {
    Chat: [openai_chats.CompletionCreateParamsBase, openai_chats.CompletionCreateParamsStreaming],
    Complete: [openai_texts.CompletionCreateParamsBase, openai_texts.CompletionCreateParamsStreaming],
    bodies.StreamOptions: [openai_chat.ChatCompletionStreamOptionsParam],
    Message: [
        openai_chat.ChatCompletionDeveloperMessageParam, openai_chat.ChatCompletionSystemMessageParam,
        openai_chat.ChatCompletionUserMessageParam, openai_chat.ChatCompletionAssistantMessageParam,
        openai_chat.ChatCompletionToolMessageParam, openai_chat.ChatCompletionMessage,
        openai_chat.ParsedChatCompletionMessage,
    ],
    bodies.Part: [
        openai_chat.ChatCompletionContentPartTextParam, openai_chat.ChatCompletionContentPartRefusalParam,
        openai_chat.ChatCompletionContentPartImageParam, openai_chat.ChatCompletionContentPartInputAudioParam,
    ],
    bodies.Called: [
        openai_chat.ChatCompletionMessageFunctionToolCallParam, openai_chat.ChatCompletionMessageCustomToolCallParam,
        openai_chat.chat_completion_chunk.ChoiceDeltaToolCall,
    ],
    bodies.Tool: [openai_chat.ChatCompletionFunctionToolParam, openai_chat.ChatCompletionCustomToolParam],
    bodies.Function: [FunctionDefinition],
}  # fmt: skip
INSIDE_OF_VLLM = {"output_text_buffer_length"}
"""What vLLM sets in its own sampling parameters, whatever a request says."""


def test_every_field_that_openais_client_and_vllm_know_is_known_at_its_level():
    """So that none of them can be ignored; those that they add in later versions are refused by name until then."""
    num_fields = 0
    for level, classes in OF_OPENAI.items():
        for made in classes:
            names = made.model_fields if issubclass(made, BaseModel) else made.__annotations__
            assert set(names) <= known(level), (level, made, set(names) - known(level))
            num_fields += len(names)
    for level, places in OF_VLLM.items():
        for path, name in places:
            names = fields_of_vllm(path, name)
            assert set(names) <= known(level) | INSIDE_OF_VLLM, (level, set(names) - known(level))
            num_fields += len(names)
    assert num_fields > 200


def test_vllms_own_defaults_ask_for_nothing():
    """Clients that send all fields of vLLM's requests with their defaults are served as if they sent none."""
    for level, places in OF_VLLM.items():
        for path, name in places[:1]:
            defaults = {field: value for field, (is_there, value) in fields_of_vllm(path, name).items() if is_there}
            for field, value in defaults.items():
                if field not in INSIDE_OF_VLLM | REQUIRED:
                    kind, request = given(level, field, value)
                    if kind is Chat and not request["stream"]:
                        del request["stream_options"]
                    said(kind, request)
    chat = {field: value for field, (is_there, value) in fields_of_vllm(*OF_VLLM[Chat][0]).items() if is_there}
    chat |= {"messages": CHAT["messages"], "tools": [TOOL]}
    assert read(Chat, json.dumps(chat).encode()).shown_tools == []  # vLLM's tool_choice is "none"


# -- every field of every level ----------------------------------------------------------------------------------------
@each("level", LEVELS)
def test_null_stands_for_a_field_that_is_not_given(level):
    kind, request, way = LEVELS[level]
    for field in known(level):
        without = copy.deepcopy(request)
        here = without
        for step in way:
            here = here[step]
        here.pop(field, None)
        assert outcome(*given(level, field, None)) == outcome(kind, without), (level, field)
        if field in level.model_fields and level.model_fields[field].is_required():
            assert outcome(kind, without) == f"{where(level, field)}: field required"


@each("level", LEVELS)
def test_neutral_values_ask_for_nothing_and_all_others_are_refused_by_name(level):
    kind, request, _ = LEVELS[level]
    plain = said(kind, request)[1]
    for field, neutral in level.neutral.items():
        for value in neutral:
            assert said(*given(level, field, value))[1] == plain, (level, field)
        for value in WRONG:
            if any(value == other and type(value) is type(other) for other in neutral):
                continue
            found = refusal(*given(level, field, value))
            assert found.param == where(level, field), (level, field, value)
            assert found.message == f"{where(level, field)}: is not supported here; leave it out"
    for field in level.without_effect:
        for value in WRONG:
            assert said(*given(level, field, value))[1] == plain, (level, field)


RIGHT = {
    "model": ("m",), "n": (2,), "max_tokens": (3,), "max_completion_tokens": (3,), "temperature": (0, 0.5, 3),
    "top_p": (0.5, 1), "top_k": (-1, 0, 5), "min_p": (0, 0.5), "stop": ("a", ["a", "b"], []),
    "stop_token_ids": ([], [3]), "include_stop_str_in_output": (True,), "seed": (-3, 0, 2**70),
    "tools": ([], [TOOL]), "tool_choice": ("none", "auto"), "logprobs": (True, False), "top_logprobs": (0, 1),
    "return_token_ids": (True,), "stream": (True, False), "stream_options": ({"include_usage": False},),
    "chat_template_kwargs": ({}, {"x": [1]}), "reasoning_effort": ("low",),
}  # fmt: skip


def test_right_values_of_a_chat_are_taken_as_they_are():
    goes_with = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}
    for field, values in RIGHT.items():
        for value in values:
            request = {"messages": CHAT["messages"], **goes_with.get(field, {}), field: value}
            made = read(Chat, json.dumps(request).encode()).model_dump(exclude_unset=True)[field]
            assert made == value, field
    assert {*RIGHT, "messages"} == set(Chat.model_fields)


def kinds(annotation):
    """The JSON types that a field of this annotation takes."""
    text = str(annotation)
    for name in ("bool", "int", "float", "str"):
        if re.search(rf"\b{name}\b", re.sub(r"(list|dict)\[.*\]", "", text)):
            yield name
    if "list[" in text:
        yield "list"
    if "dict[" in text or any(
        isinstance(a, type) and issubclass(a, bodies.Fields) for a in (annotation, *get_args(annotation))
    ):
        yield "dict"


@each("level", LEVELS)
def test_values_of_another_type_are_refused_by_the_fields_name(level):
    """No text is taken for a number, no number for a boolean, and no boolean for a number."""
    for field, info in level.model_fields.items():
        takes = set(kinds(info.annotation))
        for value in (True, 7, 7.5, "7", [True], {"7": 7}):
            name = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict"}[type(value)]
            if name in takes or (name == "int" and "float" in takes):
                continue
            if "Literal" in str(info.annotation) and isinstance(value, str):
                continue
            found = refusal(*given(level, field, value))
            assert (found.param or "").startswith(where(level, field)), (level, field, value, found.message)


def test_numbers_out_of_range_and_no_numbers_are_refused():
    ranges = {
        "n": (0, -1, 129), "max_tokens": (0, -1), "max_completion_tokens": (0,), "temperature": (-0.1,),
        "top_p": (0, -1, 1.1), "top_k": (-2,), "min_p": (-0.1, 1.1), "top_logprobs": (-1, 2, 20),
    }  # fmt: skip
    for field, values in ranges.items():
        for value in values:
            assert refusal(Chat, {**CHAT, "stream": False, "stream_options": None, field: value}).param == field
    for name in ("NaN", "Infinity", "-Infinity", "1e999"):
        for field in ("temperature", "top_p", "min_p", "seed", "n"):
            raw = json.dumps({"messages": CHAT["messages"]})[:-1] + f', "{field}": {name}}}'
            with pytest.raises(Refusal) as caught:
                read(Chat, raw.encode())
            assert caught.value.status == 400
    with pytest.raises(Refusal, match="the field 'n' is there twice"):
        read(Chat, b'{"messages": [{"role": "user", "content": "a"}], "n": 1, "n": 2}')


# -- unknown fields ----------------------------------------------------------------------------------------------------
VOWELS = "abcdefghijklmnopqrstuvwxyz_"


def test_unknown_fields_are_refused_by_name_wherever_they_stand():
    """Random names, and names that are known at other levels or almost known here, with any value."""
    draw = random.Random(0)
    everywhere = sorted(set().union(*map(known, LEVELS)))
    for _ in range(600):
        level = draw.choice(list(LEVELS))
        name = draw.choice((draw.choice(everywhere), "".join(draw.choices(VOWELS, k=draw.randint(1, 12)))))
        if draw.random() < 0.3:
            name = draw.choice((name.upper(), f"{name}s", name[:-1] or "x", f" {name}", name.replace("_", "-") + "_"))
        if name in known(level):
            continue
        found = refusal(*given(level, name, draw.choice((None, *WRONG))))
        assert found.message.startswith(f"{where(level, name)}: is not known here; "), (level, name, found.message)
        assert found.param == where(level, name)
        assert found.body["error"]["param"] == found.param
        assert found.code == "unsupported_value"
    assert "did you mean max_tokens?" in refusal(*given(Chat, "max_token", 3)).message
    for level in LEVELS:
        assert "\\ud800" in refusal(*given(level, "\ud800", 3)).message, level


def test_fields_of_messages_of_another_role_and_what_contradicts_itself_are_refused():
    asked = {"role": "user", "content": "a"}
    for role in ("system", "developer", "user", "assistant", "tool"):
        for field, value, owner in (
            ("tool_calls", [CALLED], "assistant"),
            *((field, "hm", "assistant") for field in ("reasoning_content", "reasoning", "thinking")),
            ("tool_call_id", "000000001", "tool"),
        ):
            request = {"messages": [asked, {"role": role, "content": "b", field: value}]}
            if role == owner:
                said(Chat, request)
            else:
                assert refusal(Chat, request).param == f"messages.1.{field}"
        if role != "assistant":
            assert refusal(Chat, {"messages": [{"role": role, "content": None}]}).param == "messages.0.content"
    for more, param in (
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "n": 2}, "stream"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning": "a", "thinking": "b"}]},
         "messages.0.reasoning_content"),
    ):  # fmt: skip
        assert refusal(Chat, {"messages": [asked], **more}).param == param
    for request, param in (
        ({"prompt": "a", "messages": [asked]}, "prompt"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"messages": [asked], "add_special_tokens": True}, "add_special_tokens"),
        ({}, "prompt"),
    ):
        assert refusal(Tokenize, request).param == param


# -- the page ----------------------------------------------------------------------------------------------------------
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "serve.md"
NAMED = {
    Chat: "`/v1/chat/completions`", Complete: "`/v1/completions`", Generate: "`/inference/v1/generate`",
    bodies.DrawnTokens: "its `sampling_params`", Tokenize: "`/tokenize`", bodies.StreamOptions: "`stream_options`",
    Message: "a message", bodies.Part: "a part of its content", bodies.Called: "a call in `tool_calls`",
    bodies.CalledFunction: "its `function`", bodies.Tool: "a tool in `tools`", bodies.Function: "its `function`",
}  # fmt: skip
SAMPLED, TEXTS = bodies.NOT_USED["sampled"], bodies.NOT_USED["texts"]
SHARED = {Chat: TEXTS, Complete: TEXTS, bodies.DrawnTokens: SAMPLED}


def rows():
    """The rows of the page's table."""
    yield "| in | used | changes no answer | refused but for null and |"
    yield "|---|---|---|---|"
    yield f"| what samples | | | {values_of(SAMPLED, {})} |"
    yield f"| what samples texts | | | {values_of(TEXTS, SAMPLED)} |"
    for level, name in NAMED.items():
        neutral = values_of(level.neutral, SHARED.get(level, {}))
        yield f"| {name} | {names(level.model_fields)} | {names(sorted(level.without_effect))} | {neutral} |"


def names(fields):
    return ", ".join(f"`{field}`" for field in fields)


def values_of(neutral, shared):
    own = {field: values for field, values in neutral.items() if field not in shared}
    shown = {field: " or ".join(f"`{json.dumps(value)}`" for value in values) for field, values in own.items()}
    return ", ".join(f"`{field}` {values}".strip() for field, values in shown.items())


def test_the_page_has_the_list_of_fields():
    assert "\n".join(rows()) in PAGE.read_text(), "\n".join(rows())
