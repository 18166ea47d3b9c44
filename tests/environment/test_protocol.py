"""Arguments of calls against schemas: right ones made from a schema, and wrong ones by one change that it forbids."""

import copy
import itertools
import random

import pytest
from in_one_test import each

from rlft.environment.protocol import Checker, Malformed
from rlft.environment.tools import schema_of
from rlft.types import UserError
from tests.environment.test_tools import add

WRONG = {
    "integer": ["1", 1.5, True, None, [1], {}],
    "number": ["1.5", False, None, []],
    "string": [1, True, None, ["a"], {}],
    "boolean": ["true", 0, 1, None],
    "array": ["[1]", {}, 3, None],
    "object": ["{}", [], 3, None],
}
"""{type: values of another type}; nothing is converted."""
RIGHT = {"integer": [0, -7, 3.0, 10**20], "number": [1, -2.5], "string": ["", "1"], "boolean": [True]}


def some_schema(rng, depth=0):
    kind = rng.choice([*RIGHT, *(["array", "object"] if depth < 3 else [])])
    schema = {"type": kind, "description": "x"}
    if kind == "array":
        schema["items"] = some_schema(rng, depth + 1)
    if kind == "object":
        names = rng.sample("abcdef", rng.randint(1, 3))
        schema["properties"] = {name: some_schema(rng, depth + 1) for name in names}
        schema["required"] = names[: rng.randint(0, len(names))]
    if kind == "string" and rng.random() < 0.3:
        schema["enum"] = ["x", "y"]
    if rng.random() < 0.2:
        schema["nullable"] = True  # as transformers writes Optional
    return schema


def right_values(schema, rng):
    if schema.get("nullable") and rng.random() < 0.3:
        return None
    if schema["type"] == "array":
        return [right_values(schema["items"], rng) for _ in range(rng.randint(0, 3))]
    if schema["type"] == "object":
        kept = [n for n in schema["properties"] if n in schema["required"] or rng.random() < 0.5]
        return {name: right_values(schema["properties"][name], rng) for name in kept}
    return rng.choice(schema.get("enum") or RIGHT[schema["type"]])


def wrong_values(value, schema, rng):
    """The value with one change, anywhere in it, that the schema forbids."""
    nullable = schema.get("nullable", False)
    yield rng.choice([each for each in WRONG[schema["type"]] if not (nullable and each is None)])
    if "enum" in schema and value is not None:
        yield "z"
    if isinstance(value, list):
        for n, inner in enumerate(value):
            for bad in wrong_values(inner, schema["items"], rng):
                yield [*value[:n], bad, *value[n + 1 :]]
    if isinstance(value, dict):
        yield {**value, "unknown": 1}
        for name, inner in value.items():
            for bad in wrong_values(inner, schema["properties"][name], rng):
                yield {**value, name: bad}
        for name in schema["required"]:
            yield {key: each for key, each in value.items() if key != name}


def test_right_arguments_are_taken_and_each_forbidden_change_is_told():
    rng, number = random.Random(0), 0
    for _ in range(250):
        parameters = {**some_schema(rng, 3), "type": "object", "properties": {}, "required": []}
        for name in "pqr":
            parameters["properties"][name] = some_schema(rng)
        parameters["required"] = ["p"]
        parameters = {key: parameters[key] for key in ("type", "properties", "required")}
        shown = copy.deepcopy(parameters)
        checker = Checker([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        value = right_values(parameters, rng)
        assert checker.checked("f", value) == value
        for wrong in wrong_values(value, parameters, rng):
            if not isinstance(wrong, dict):
                continue  # the arguments as a whole are an object
            with pytest.raises(Malformed, match=r"^f: "):
                checker.checked("f", wrong)
            number += 1
        assert parameters == shown, "what prompts show stays"
    assert number > 1000


def checker_of(schema, **more):
    parameters = {"type": "object", "properties": {"a": schema}, **more}
    return Checker([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


BROKEN = [
    *({"type": name} for name in ("float", "str", "int", "bool", "dict", "any", ["integer", "none"])),
    *({"type": "string", "pattern": pattern} for pattern in ("(", "[a", "a**")),
    *({"$ref": to} for to in ("#/$defs/gone", "#gone", "https://example.org/x.json")),
    {"enum": 3},
    {"type": "integer", "minimum": "1"},
]
INSIDE = ("{}", "items", "anyOf", "properties")


def test_schemas_that_are_none_are_refused_at_the_start_by_the_tools_name():
    for broken, place in itertools.product(BROKEN, INSIDE):
        schema = {"{}": broken, "items": {"items": broken}, "anyOf": {"anyOf": [broken]}}.get(place)
        with pytest.raises(UserError, match=r"^environment: the parameters of the tool f are no JSON schema"):
            checker_of(schema or {"properties": {"b": broken}})


def test_whole_numbers_become_int_in_branches_that_want_no_other_numbers():
    integer, null, number = {"type": "integer"}, {"type": "null"}, {"type": "number"}
    defs = {"i": integer, "n": {"anyOf": [{"$ref": "#/$defs/i"}, null]}}
    wanted = [integer, *({"$ref": f"#/$defs/{name}"} for name in defs)]
    wanted += [{key: [each]} for key, each in itertools.product(("anyOf", "oneOf", "allOf"), wanted)]
    wanted += [{key: [integer, null]} for key in ("anyOf", "oneOf")]
    for schema, is_list in itertools.product(wanted, (False, True)):
        value = [1.0] if is_list else 1.0
        made = checker_of({"type": "array", "items": schema} if is_list else schema, **{"$defs": defs})
        assert repr(made.checked("f", {"a": value})) == f"{{'a': {'[1]' if is_list else '1'}}}", schema
    for schema, value in (({"anyOf": [integer, number]}, 1.0), ({"type": "array", "contains": integer}, [1.0])):
        assert repr(checker_of(schema).checked("f", {"a": value})) == f"{{'a': {value}}}"
    for schema in ({"oneOf": [integer, number]}, {"not": integer}):  # 1.0 is an integer in JSON
        with pytest.raises(Malformed, match=r"^f: a: 1\.0 "):
            checker_of(schema).checked("f", {"a": 1.0})


def test_no_more_errors_are_looked_for_than_are_told():
    class Text(str):
        read = 0

        def __repr__(self):
            Text.read += 1
            return super().__repr__()

    with pytest.raises(Malformed, match=r"a\[2\]: "):
        checker_of({"type": "array", "items": {"type": "integer"}}).checked("f", {"a": [Text("x")] * 1000})
    assert Text.read < 10


def test_what_a_schema_cannot_be_checked_for_is_told_as_malformed():
    with pytest.raises(Malformed, match="nested too deep or too large"):
        checker_of({"$ref": "#/$defs/x"}, **{"$defs": {"x": {"$ref": "#/$defs/x"}}}).checked("f", {"a": 1})
    with pytest.raises(Malformed, match="nested too deep or too large"):
        checker_of({"type": "integer", "multipleOf": 0.5}).checked("f", {"a": 10**400})


@each(("arguments", "passes"), [({"a": 1, "b": 2}, 1), ({"a": 1.0, "b": 2}, 2), ({"a": 1, "b": 2.0, "how": None}, 2)])
def test_whole_numbers_become_int_in_a_second_pass_only_if_there_are_any(arguments, passes, monkeypatch):
    checker, read = Checker([schema_of(add, "environment.tools", "mine")]), []
    with monkeypatch.context() as patched:
        patched.setattr("jsonschema.validators.extend", None)  # a class of validators is not made for each call
        patched.setattr("jsonschema._keywords.find_additional_properties", lambda *_: read.append(1) or iter(()))
        made = checker.checked("add", arguments)
    assert repr(made) == repr({**arguments, "a": 1, "b": 2})
    assert len(read) == passes
