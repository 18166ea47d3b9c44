"""Whether the arguments of a call fit the JSON schema of its tool: for tools of every kind, before the call is made.

Nothing is converted: "1" is no integer, and the policy reads why. Only 1.0 becomes 1, which JSON does not tell apart.
A name that the schema does not know is refused unless it says otherwise (additionalProperties).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rlft.environment.protocol import Malformed
from rlft.types import Schema

MAX_TOLD = 3
"""The most errors of a call that the policy reads at once."""
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"} | {
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas")
}
"""Keywords by which a schema itself says which further names an object may have, or by which its parts may."""


class Checker:
    """Checks the arguments of calls of these tools, whose `schemas` are as chat templates show them."""

    def __init__(self, schemas: Sequence[Schema]) -> None:
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing.jsonschema import EMPTY_REGISTRY

        self._validators = {}
        for schema in (schema["function"] for schema in schemas):
            parameters = strict(schema["parameters"])
            kind = validator_for(parameters, default=Draft202012Validator)
            self._validators[schema["name"]] = kind(parameters, registry=EMPTY_REGISTRY)  # which loads nothing

    def checked(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with whole numbers as int where an integer is due. Malformed: they are not the tool's."""
        from jsonschema.exceptions import best_match

        if name not in self._validators:
            raise Malformed(f"there is no tool {name!r:.80}; the tools are {', '.join(self._validators)}")
        validator = self._validators[name]
        found = [best_match([error]) for error in islice(validator.iter_errors(dict(arguments)), MAX_TOLD)]
        if found:
            told = (f"{error.json_path.removeprefix('$').lstrip('.')}: {error.message}".lstrip(": ") for error in found)
            raise Malformed(f"{name}: {'; '.join(text[:200] for text in told)}")
        return whole(dict(arguments), validator.schema)


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


def whole(value: Any, schema: Any) -> Any:
    """The value, in which numbers such as 1.0 are int where the schema wants integers and no other numbers.

    >>> whole({"a": [1.0, 2]}, {"properties": {"a": {"items": {"type": "integer"}}}})
    {'a': [1, 2]}
    """
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        return {key: whole(each, known.get(key, others)) for key, each in value.items()}
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        kinds = [*first, *[schema.get("items")] * (len(value) - len(first))]
        return [whole(each, kind) for each, kind in zip(value, kinds, strict=False)]
    kinds = schema.get("type", "")
    is_whole = isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds
    return int(value) if is_whole else value


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
