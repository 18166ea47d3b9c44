"""Whether the arguments of a call fit the JSON schema of its tool: for tools of every kind, before the call is made.

Nothing is converted: "1" is no integer, and the policy reads why. Only 1.0 becomes 1, which JSON does not tell apart.
A name that the schema does not know is refused unless it says otherwise (additionalProperties).
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rlft.environment.protocol import Malformed
from rlft.types import Schema, require

MAX_TOLD = 3  # the most errors of a call that the policy reads at once
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"} | {
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas")
}
"""Keywords by which a schema itself says which further names an object may have, or by which its parts may."""


class Checker:
    """Checks the arguments of calls of these tools, whose `schemas` are as chat templates show them.

    Raises UserError: a schema is none by its own rules, or refers to what it does not have.
    """

    def __init__(self, schemas: Sequence[Schema]) -> None:
        from jsonschema.validators import Draft202012Validator, extend, validator_for
        from referencing.jsonschema import EMPTY_REGISTRY

        self._validators = {}
        self._strict_validators = {}  # for which 1.0 is no integer
        for schema in (schema["function"] for schema in schemas):
            parameters = strict(schema["parameters"])
            kind = validator_for(parameters, default=Draft202012Validator)
            _check(schema["name"], kind, parameters)
            self._validators[schema["name"]] = kind(parameters, registry=EMPTY_REGISTRY)  # which loads nothing
            types = kind.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
            strict_kind = extend(kind, type_checker=types)
            self._strict_validators[schema["name"]] = strict_kind(parameters, registry=EMPTY_REGISTRY)

    def checked(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with whole numbers as int where an integer is due. Malformed: they are not the tool's."""
        from jsonschema.exceptions import best_match

        if name not in self._validators:
            raise Malformed(f"there is no tool {name!r:.80}; the tools are {', '.join(self._validators)}")
        validator = self._validators[name]
        try:
            found = [best_match([error]) for error in islice(validator.iter_errors(dict(arguments)), MAX_TOLD)]
            made = dict(arguments)
            if not found and _has_whole_float(made):
                made = _with_whole_numbers(made, self._strict_validators[name])
        except (RecursionError, OverflowError) as error:
            raise Malformed(f"{name}: the arguments are nested too deep or too large ({error!s:.80})") from None
        if found:
            told = (f"{error.json_path.removeprefix('$').lstrip('.')}: {error.message}".lstrip(": ") for error in found)
            raise Malformed(f"{name}: {'; '.join(text[:200] for text in told)}")
        return made


def _check(name: str, kind: Any, parameters: Mapping[str, Any]) -> None:
    from jsonschema.exceptions import SchemaError
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

    problem = ""
    try:
        kind.check_schema(parameters)
        resolver = EMPTY_REGISTRY.with_resource("", DRAFT202012.create_resource(parameters)).resolver()
        for reference in _references(parameters):
            resolver.lookup(reference)
    except SchemaError as error:
        problem = f"{error.json_path}: {error.message:.200}"
    except Unresolvable as error:
        problem = f"$ref: {error.ref!r:.80} leads to nothing"
    problem = problem and f"the parameters of the tool {name} are no JSON schema ({problem})"
    require(not problem, "environment", problem, remedy="correct them in the tool")


def _references(schema: Any) -> Iterator[str]:
    for key, value in schema.items() if isinstance(schema, Mapping) else enumerate(schema):
        if key == "$ref" and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list) and key not in ("enum", "const", "default", "examples"):
            yield from _references(value)


def strict(schema: Any) -> Any:
    """The schema, in which names that it does not have are refused, and transformers' `nullable` allows null.

    >>> strict({"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}})["properties"]
    {'a': {'type': ['integer', 'null']}}
    """
    if not isinstance(schema, Mapping):
        return schema
    made = {**schema, **{key: strict(schema[key]) for key in ("items", "additionalProperties") if key in schema}}
    if "prefixItems" in schema:
        made["prefixItems"] = [strict(each) for each in schema["prefixItems"]]
    if "properties" in schema:
        made["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
    if made.pop("nullable", False) and "type" in made:
        made["type"] = [*([made["type"]] if isinstance(made["type"], str) else made["type"]), "null"]
        made |= {"enum": [*made["enum"], None]} if "enum" in made else {}
    if made.get("properties") and not _OPEN & set(made):
        made["additionalProperties"] = False
    return made


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return any(map(_has_whole_float, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, float) and value.is_integer()


def _with_whole_numbers(arguments: dict[str, Any], strict_validator: Any) -> dict[str, Any]:
    """The valid arguments, in which numbers such as 1.0 are int where the schema wants integers and no other numbers.

    Those are the errors that a validator finds for which 1.0 is no integer.
    """
    made, errors = copy.deepcopy(arguments), [*strict_validator.iter_errors(arguments)]
    while errors:
        error = errors.pop()
        errors += error.context  # of the branches, where schemas are combined
        value, wants_integer = error.instance, error.validator == "type" and "integer" in error.validator_value
        if wants_integer and isinstance(value, float) and value.is_integer():
            *way, last = error.absolute_path
            functools.reduce(operator.getitem, way, made)[last] = int(value)
    return made


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value of this schema is a text, so that one that is written without quotes is not read as JSON.

    >>> [is_text(schema) for schema in ({}, {"type": "integer"}, {"anyOf": [{"type": "string"}, {"type": "null"}]})]
    [True, False, True]
    """
    kinds = schema.get("type", [])
    kinds = {kinds} if isinstance(kinds, str) else {*kinds}
    branches = [is_text(each) for key in ("anyOf", "oneOf") for each in schema.get(key, []) if each != {"type": "null"}]
    others = [each for each in schema.get("enum", []) if not isinstance(each, str)]
    return kinds <= {"string", "null"} and all(branches) and not others and "$ref" not in schema
