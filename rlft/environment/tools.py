"""`environment=tools`: functions that the policy may call; the calls are independent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlft.config.instantiate import locate
from rlft.environment.protocol import Environment, Play
from rlft.reward.workers.reward_spec import awaited
from rlft.types import UserError, require

KEY = "environment.tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools(Environment):
    """The keys of `environment=tools`: the tools, each as `module.function`."""

    keeps_state: ClassVar[bool] = False

    tools: Sequence[str]

    def check(self) -> None:
        remedy = "name importable functions, as environment.tools=[mine.search]"
        require(self.tools, KEY, "is empty, so there is nothing to call", got="[]", remedy=remedy)
        path_by_name: dict[str, str] = {}
        for path in self.tools:
            name = getattr(locate(path, KEY), "__name__", path.rpartition(".")[2])
            if name in path_by_name:
                problem = f"two tools are called {name}: {path_by_name[name]} and {path}"
                raise UserError(KEY, problem, got=path, remedy="rename one of the functions")
            path_by_name[name] = path

    def schemas(self) -> list[dict[str, Any]]:
        return [schema_of(locate(path, KEY), KEY, path) for path in self.tools]

    def start(self) -> None:
        for path in self.tools:
            locate(path, KEY)

    def make(self) -> FunctionCalls:
        return FunctionCalls({f.__name__: f for f in (locate(path, KEY) for path in self.tools)})


class FunctionCalls(Play):
    """Calls functions by their names."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return called(self.functions, name, arguments)


def called(functions: Mapping[str, Callable[..., Any]], name: str, arguments: Mapping[str, Any]) -> Any:
    """What the named function returns for these arguments, which fit its schema; a coroutine is run to its end."""
    return awaited(functions[name](**arguments))


def schema_of(function: Any, key: str, path: str) -> dict[str, Any]:
    """The JSON schema of a function. UserError: it has no docstring, or not the type or meaning of a parameter."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    remedy = "give it a docstring with an Args: line for each parameter, and each parameter a type"
    try:
        return _of_names(get_json_schema(function), function)
    except Exception as error:  # annotations are evaluated, and may raise anything
        is_explained = isinstance(error, DocstringParsingException | TypeHintParsingException)
        problem = f"{error}" if is_explained else f"{type(error).__name__}: {error}"
        raise UserError(key, f"cannot be shown as a tool ({problem})", got=path, remedy=remedy) from None


def _of_names(schema: dict[str, Any], function: Any) -> dict[str, Any]:
    """The schema without `*args` and `**kwargs`, which transformers takes for parameters; the latter allow any name."""
    parameters = schema["function"]["parameters"]
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            parameters["properties"].pop(name, None)
            parameters["required"] = [each for each in parameters.get("required", []) if each != name]
            parameters |= {"additionalProperties": True} if parameter.kind is parameter.VAR_KEYWORD else {}
    return schema
