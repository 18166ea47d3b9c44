"""Tests of programs in the forms in which data sets hold them.

    [{"input": "2 3", "output": "5"}, ...]         stdin and stdout, as text or as a list of lines
    {"inputs": [...], "outputs": [...]}            the same in columns (APPS, TACO, CodeContests)
    ... with a function's name                     calls: `fn_name` (APPS, TACO), `testtype: functional` (LiveCodeBench)
    ["assert add(2, 3) == 5", ...] or one text     Python that calls the program (MBPP, HumanEval)

Arguments of a call are a list, or a text with a line of JSON for each (LiveCodeBench). What else a test says is refused
by its name: a test that is half understood would judge something else.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlft.reward.code_tests import REFUSED, Doubt, doubts
from rlft.system.sandbox.protocol import missing_names
from rlft.types import counted

MAX_CHECKED = 65536  # tests whose doubts are cached

INPUTS, OUTPUTS = ("input", "inputs"), ("output", "outputs")
KINDS, NAMES = ("testtype", "type"), ("fn_name", "func_name", "function", "entry_point")
CALLED = {"functional": True, "function_call": True, "call_based": True, "stdin": False, "stdin_stdout": False}
"""{kind of test, as data sets call it: whether a function is called}."""
COMMENTS = ("metadata", "note", "explanation", "name", "id", "difficulty", "is_public", "public")
"""Keys that change no verdict; a LiveCodeBench test's `metadata` may hold the function's name."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A test that compares a program's stdout for a given stdin."""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A test that calls a function of the program, or the method of its class Solution, and compares the result.

    Attributes:
        function: its name.
        arguments: plain data of JSON.
        results: the results of which each is right.
    """

    function: str
    arguments: list[Any]
    results: list[Any]


Tests = list[Pair] | list[Call] | list[str]


def parse_tests(value: Any, *, entry: str = "", setup: str = "") -> Tests:
    """Tests from a list, from columns, or from text: JSON of these, or else a test in Python.

    `entry` is the function that is tested, where the tests do not name it; `setup` is Python before each test in
    Python.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [value]
    if isinstance(value, Mapping):
        value = list(_rows(value))
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("holds no tests")
    if all(isinstance(test, str) for test in value):
        return [_python(test, entry, setup) for test in value]
    if not all(isinstance(test, Mapping) for test in value):
        raise ValueError('holds neither texts of Python nor {"input": ..., "output": ...} alone')
    if setup.strip():
        raise ValueError("holds tests that are not Python, before which no setup code can stand")
    tests: list[Any] = [_compared(test, entry) for test in value]
    if len({type(test) for test in tests}) > 1:
        raise ValueError("holds tests of stdin and tests of a function, and a program is only one of them")
    return tests


def names_called(test: str | Call) -> set[str]:
    """The names of which a program for this test has to define one at least."""
    return {test.function, "Solution"} if isinstance(test, Call) else missing_names(test)[1]


def lines_of(value: Any) -> str:
    """A text, or the lines of one; of anything else its JSON-like text."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def function_in(value: Any) -> str:
    """The function that a field of the data names: the field itself, or what it holds under one of NAMES.

    >>> function_in("add"), function_in('{"func_name": "add"}'), function_in(None)
    ('add', 'add', '')
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return ""
    if isinstance(value, Mapping):
        value = next((value[name] for name in NAMES if value.get(name)), "")
    return value if isinstance(value, str) else ""


def _rows(columns: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The tests of a mapping: columns of inputs and outputs with what holds for all, or a single test."""
    inputs, outputs = _only(columns, INPUTS), _only(columns, OUTPUTS)
    lengths = [len(columns[key]) if isinstance(columns[key], list | tuple) else -1 for key in (inputs, outputs)]
    if lengths == [-1, -1]:
        yield columns
        return
    if lengths[0] != lengths[1]:
        both = counted(max(lengths[0], 0), "input"), counted(max(lengths[1], 0), "output")
        raise ValueError("holds {} and {}".format(*both))
    num, singular = lengths[0], {inputs: INPUTS[0], outputs: OUTPUTS[0]}
    is_column = {key: isinstance(value, list | tuple) and len(value) == num for key, value in columns.items()}
    for i in range(num):
        yield {singular.get(key, key): each[i] if is_column[key] else each for key, each in columns.items()}


def _only(test: Mapping[str, Any], keys: Sequence[str]) -> str:
    found = [key for key in keys if key in test]
    if len(found) != 1:
        raise ValueError(f"holds neither texts of Python nor tests with one of {', '.join(keys)}: {test!r:.80}")
    return found[0]


def _compared(test: Mapping[str, Any], entry: str) -> Pair | Call:
    if unknown := set(test) - {*INPUTS, *OUTPUTS, *KINDS, *NAMES, *COMMENTS}:
        raise ValueError(f"holds tests with {sorted(map(str, unknown))[0]!r}, whose meaning is not known: {test!r:.80}")
    given, expected = test[_only(test, INPUTS)], test[_only(test, OUTPUTS)]
    kind = next((test[key] for key in KINDS if test.get(key) is not None), None)
    if kind is not None and kind not in CALLED:
        raise ValueError(f"holds tests of the kind {kind!r}, which is none of {', '.join(CALLED)}")
    named = function_in(test) or function_in(test.get("metadata"))
    if not (bool(named) if kind is None else CALLED[kind]):
        return Pair(input=lines_of(given), output=lines_of(expected))
    function = named or entry
    if not function.isidentifier():
        raise ValueError(f"holds calls of a function, and names none ({NAMES[0]}): {test!r:.80}")
    return _call(function, given, expected)


def _call(function: str, given: Any, expected: Any) -> Call:
    if isinstance(given, str):
        try:
            arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
            return Call(function=function, arguments=arguments, results=[json.loads(expected)])
        except (ValueError, TypeError, RecursionError):
            problem = "holds a call whose arguments are no lines of JSON, or whose result is none"
            raise ValueError(f"{problem}: {given!r:.80} -> {expected!r:.80}") from None
    if not isinstance(given, list | tuple):
        raise ValueError(f"holds a call whose arguments are no list: {given!r:.80}")
    results = [_with_whole_keys(expected)]
    if isinstance(expected, list | tuple) and len(expected) == 1:  # APPS puts some results into lists
        results.append(_with_whole_keys(expected[0]))
    return Call(function=function, arguments=[_with_whole_keys(each) for each in given], results=results)


def _with_whole_keys(value: Any) -> Any:
    """A dict with numbers for keys that JSON had to write as text, as APPS's own judge makes it; else the value."""
    if not isinstance(value, Mapping):
        return value
    is_whole = bool(value) and all(isinstance(key, str) and key.removeprefix("-").isdecimal() for key in value)
    return {int(key): each for key, each in value.items()} if is_whole else dict(value)


def _python(test: str, entry: str, setup: str) -> str:
    """The test, with the setup code; HumanEval's `check` is called. ValueError if it could judge no program."""
    if entry and "def check(" in test and _only_defines(test):
        test = f"{test.rstrip()}\n\ncheck({entry})\n"
    test = f"{setup.rstrip()}\n{test}" if setup.strip() else test
    _check_python(test)
    return test


def _only_defines(test: str) -> bool:
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"holds a test that is not Python ({error}): {test!r:.80}") from None
    return all(isinstance(statement, _DEFINITIONS) for statement in statements)


def _check_python(test: str) -> None:
    """ValueError for a test that is not Python, that only defines things, or that any program passes."""
    if _only_defines(test):
        problem = "holds a test that only defines things, and would be passed by every program; call them, as in "
        raise ValueError(f"{problem}check(add): {test!r:.80}")
    for doubt in doubts_of(test) & set(REFUSED):
        raise ValueError(f"holds tests that {doubt.value}; {REFUSED[doubt]}: {test!r:.80}")


@functools.lru_cache(MAX_CHECKED)
def doubts_of(test: str) -> frozenset[Doubt]:
    """What may be wrong with a test in Python."""
    return frozenset(doubts(test))
