"""Calls from tests to the program under test, which run in two sandboxes; both run this file, standard library only.

    python protocol.py program PROGRAM      requests on stdin, replies on stdout
    python protocol.py solution PROGRAM     the same, for programs that are judged with the usual names imported
    python protocol.py tests TESTS FD       replies on stdin, requests on descriptor FD, verdicts on stdout

Tests that share a process with an untrusted program prove nothing: it can end the process with success, replace what
`assert` compares with, return an object that equals everything, or read the tests and their answers. So only JSON of
plain data is exchanged, and is rebuilt on this side as Python's own types. Names, modules and builtins belong to the
tests if they define or import them, and so do the standard library's modules if they write `math.isclose` without an
import. Every other name is the program's: its plain values are copied, iterators are read item by item, and what has no
plain form (functions, classes, instances) stays in the program. The tests hold an `Object` for it, which they can call
and ask for attributes and methods. It supports no operator, since the program would choose the result: comparing it,
`not x`, `len(x)`, `x[0]`, `y in x` and the like fail the test. The program sees names and arguments, never the expected
results.

So tests can't pass a function to the program, see a list changed in place, or use a builtin that the program redefines;
reward/code.py says which tests need that.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import math
import os
import symtable
import sys
import types
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from pathlib import Path
from typing import IO, Any

PASSED, FAILED = "passed", "failed"
PROGRAM = "program"  # name of the module that the program is run as

Keep = Callable[[Any], int]  # keeps an object without a plain form, and returns its number


class ProgramError(Exception):
    """The program has ended, or raised something other than a builtin exception."""


class EndOfIterator(Exception):
    """An iterator of the program has no more items."""


# -- plain data ------------------------------------------------------------------------------------------------------
WORDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
}
"""{kind without parts: (type, function to JSON, function from JSON)}."""

EXACT = {"Decimal": "decimal", "Fraction": "fractions"}
"""{type of numbers that are sent as text: its module}; the modules are imported only when needed."""

COLLECTIONS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "list": (list, list),
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "deque": (deque, deque),
    "keys": (KeysView, lambda items: dict.fromkeys(items).keys()),
    "values": (ValuesView, lambda items: dict(enumerate(items)).values()),
    "items": (ItemsView, lambda items: dict(items).items()),
}
"""{kind that holds values: (type, function from a list of values)}."""


def pack(value: Any, keep: Keep) -> Any:
    """The value in a form for JSON: scalars as they are, everything else as [kind, content].

    Python's own types are sent by name. Subclasses are sent as their base (Counter as a dict). But containers of a
    class that the program defines are kept, because tests may need their methods; named tuples are sent as tuples.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__ == PROGRAM and not hasattr(value, "_fields"):
        return ["iterator" if isinstance(value, Iterator) else "object", keep(value)]
    for kind, (type_, written, _) in WORDS.items():
        if isinstance(value, type_):
            return [kind, written(value)]
    if name := name_of_type(value):
        return ["type", name]
    if EXACT.get(type(value).__name__) == type(value).__module__:
        return [type(value).__name__, str(value)]
    if isinstance(value, dict):
        return ["dict", [[pack(k, keep), pack(v, keep)] for k, v in value.items()]]
    for kind, (type_, _) in COLLECTIONS.items():
        if isinstance(value, type_):
            return [kind, [pack(item, keep) for item in value]]
    return ["iterator" if isinstance(value, Iterator) else "object", keep(value)]


def unpack(packed: Any, fetch: Callable[[str, int], Any]) -> Any:
    """The value that was given to `pack`; `fetch` gets the kind (object or iterator) and number of kept objects."""
    if not isinstance(packed, list):
        return packed
    kind, content = packed
    if kind in ("object", "iterator"):
        return fetch(kind, content)
    if kind == "type":
        return own_type(content)
    if kind in WORDS:
        return WORDS[kind][2](content)
    if kind in EXACT:
        return getattr(importlib.import_module(EXACT[kind]), kind)(content)
    if kind == "dict":
        return {unpack(k, fetch): unpack(v, fetch) for k, v in content}
    return COLLECTIONS[kind][1]([unpack(item, fetch) for item in content])


def name_of_type(value: Any) -> str:
    """The name of a type that is Python's own; "" for everything else."""
    return value.__name__ if isinstance(value, type) and getattr(builtins, value.__name__, None) is value else ""


def own_type(name: str) -> type:
    """Python's own type of this name. TypeError for another builtin: nothing but types is sent by name."""
    found = getattr(builtins, name, None)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no type of Python's")
    return found


# -- the program's side ----------------------------------------------------------------------------------------------
class Kept:
    """The program's objects that the tests know by number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._places: dict[int, int] = {}

    def keep(self, value: Any) -> int:
        if id(value) not in self._places:
            self._places[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._places[id(value)]

    def fetch(self, number: int) -> Any:
        return self._objects[number]

    def unpack(self, packed: Any) -> Any:
        return unpack(packed, lambda _, place: self.fetch(place))


def serve(program: str, *, with_names: bool = False) -> None:
    """Runs the program as a module, not as the main program, then answers requests until there are no more.

    With `with_names` it finds the names of COMMON_MODULES, and may recurse deeply, as with the judges of APPS and
    LiveCodeBench, whose starter code writes `List[int]` without an import. A process that the program has forked
    answers nothing: its answers would compete with the program's.
    """
    requests, replies = take_stdio()
    getpid, leave = os.getpid, os._exit
    own_pid = getpid()
    module = types.ModuleType(PROGRAM)
    sys.modules[PROGRAM] = module
    if with_names:
        sys.setrecursionlimit(MAX_RECURSION)
        module.__dict__.update(common_names(program))
    exec(compile(program, "program.py", "exec"), module.__dict__)
    kept = Kept()
    if getpid() != own_pid:
        leave(0)
    for line in requests:
        reply = json.dumps(answer(json.loads(line), module, kept))
        if getpid() != own_pid:
            leave(0)
        replies.write(reply + "\n")
        replies.flush()


COMMON_MODULES = (
    *("typing", "collections", "math", "heapq", "bisect", "itertools", "functools", "string", "re", "random", "copy"),
    *("datetime", "operator", "statistics"),
)
"""Modules whose names programs use as if they had imported them."""
MAX_RECURSION = 50_000


def common_names(program: str) -> dict[str, Any]:
    """{name: what it is} for names that a program uses and defines nowhere: modules, and names of COMMON_MODULES."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # running it will show that
        missing = _free_names(symtable.symtable(program, "program.py", "exec")) - set(dir(builtins))
        found: dict[str, Any] = {}
        for name in missing:
            if name in sys.stdlib_module_names:
                with contextlib.suppress(ImportError):
                    found[name] = importlib.import_module(name)
                continue
            modules = map(importlib.import_module, COMMON_MODULES)
            home = next((module for module in modules if name in getattr(module, "__all__", dir(module))), None)
            if home is not None:
                found[name] = getattr(home, name)
        return found
    return {}


def answer(request: Any, module: types.ModuleType, kept: Kept) -> Any:
    """The reply to a request: ["value", packed], ["error", name of the exception, its text], or ["end"] of an iterator.

    A StopIteration from a call is an error like any other: it would end a loop in the tests, and so the test.
    """
    try:
        return ["value", pack(perform(request, module, kept), kept.keep)]
    except EndOfIterator:
        return ["end"]
    except Exception as error:  # raised by the program; the tests get its name and text
        return ["error", type(error).__name__, str(error)]


def perform(request: Any, module: types.ModuleType, kept: Kept) -> Any:
    match request:
        case ["name", name]:
            return getattr(module, name)
        case ["attribute", place, name]:
            return getattr(kept.fetch(place), name)
        case ["set", place, name, value]:
            return setattr(kept.fetch(place), name, kept.unpack(value))
        case ["next", place]:
            try:
                return next(kept.fetch(place))
            except StopIteration:
                raise EndOfIterator from None
        case ["call", place, arguments, keywords]:
            return kept.fetch(place)(*kept.unpack(arguments), **kept.unpack(keywords))
    raise ValueError(request)


# -- the tests' side -------------------------------------------------------------------------------------------------
class Channel:
    """The tests' end of the two pipes; `num_calls` is the number of calls so far."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self._requests, self._replies = requests, replies
        self.num_calls = 0

    def ask(self, *request: Any) -> Any:
        """The program's reply as a value; raises what the program raised, or ProgramError if it has ended."""
        self.num_calls += request[0] == "call"
        with contextlib.suppress(BrokenPipeError):  # the missing reply will show it
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        line = self._replies.readline()
        if not line.endswith("\n"):
            raise ProgramError("the program has ended")
        match json.loads(line):
            case ["value", packed]:
                return unpack(packed, self.reach)
            case ["end"] if request[0] == "next":
                raise StopIteration
            case ["error", str(name), str(text)]:
                kind = getattr(builtins, name, None)
                if not isinstance(kind, type) or not issubclass(kind, Exception) or name in ENDS_LOOPS:
                    raise ProgramError(text)
                raise kind(text)
        raise ProgramError("the program's reply is malformed")

    def reach(self, kind: str, number: int) -> Any:
        """An object or iterator of the program, by its number there."""
        return KEPT[kind](self, number)


ENDS_LOOPS = ("StopIteration", "StopAsyncIteration")
ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
OPERATORS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "length_hint", "getitem", "setitem", "delitem", "contains"),
    *("iter", "next", "reversed", "hash", "str", "repr", "format", "bytes"),
    *("int", "float", "complex", "index", "round"),
    *("trunc", "floor", "ceil", "neg", "pos", "abs", "invert", "divmod", "rdivmod", "enter", "exit", "instancecheck"),
    *(side + name for name in ARITHMETIC for side in ("", "r", "i")),
)


class Distant:
    """An object that stays in the program, known by its number there."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._place = channel, number


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any) -> Any:
        raise TypeError(f"__{name}__: what a program returns is compared and measured where it is plain data")

    return refuse


for _name in OPERATORS:
    setattr(Distant, f"__{_name}__", _refuse(_name))


class Object(Distant):
    """An object of the program, which the tests can call and ask for attributes and methods."""

    def __getattr__(self, name: str) -> Any:
        return self._channel.ask("attribute", self._place, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_channel", "_place"):
            object.__setattr__(self, name, value)
        else:
            self._channel.ask("set", self._place, name, pack(value, place_of))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._channel.ask("call", self._place, pack(arguments, place_of), pack(keywords, place_of))


class Items(Distant):
    """An iterator of the program, whose items are sent one at a time."""

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> Any:
        return self._channel.ask("next", self._place)


KEPT: dict[str, Callable[[Channel, int], Any]] = {"object": Object, "iterator": Items}


def place_of(value: Any) -> int:
    """The number of an object that is sent back to the program."""
    if not isinstance(value, Distant):
        raise TypeError(f"only plain data can be handed to the program, not {type(value).__name__}")
    return value._place


def judge(tests: list[Any], channel: Channel) -> Iterator[str]:
    """The verdict on each test in turn; a test that never calls the program proves nothing, and counts as failed.

    A test is Python, or what `call_test` makes of a call.
    """
    for test in tests:
        calls_before = channel.num_calls
        try:
            run(test, channel) if isinstance(test, str) else check_call(test, channel)
            yield PASSED if channel.num_calls > calls_before else FAILED
        except BaseException:
            yield FAILED


def call_test(function: str, arguments: list[Any], results: list[Any], tolerance: float) -> dict[str, Any]:
    """A test that calls a function with these arguments; each of these results is right. Plain data, for JSON."""
    data = {"arguments": pack(arguments, place_of), "results": pack(results, place_of)}
    return {"function": function, **data, "tolerance": tolerance}


def check_call(test: dict[str, Any], channel: Channel) -> None:
    """Raises an error unless the program's function returns one of the right results for these arguments."""
    arguments, results = (unpack(test[part], channel.reach) for part in ("arguments", "results"))
    returned = function_named(test["function"], channel)(*arguments)
    if not any(same_value(returned, expected, test["tolerance"]) for expected in results):
        raise AssertionError(test["function"])


def function_named(name: str, channel: Channel) -> Any:
    """The method of the program's class Solution (LeetCode), or else its function, of this name."""
    with contextlib.suppress(AttributeError):
        return getattr(channel.ask("name", "Solution")(), name)
    return channel.ask("name", name)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether plain data are what JSON expects: tuples are lists, and floats may differ by the tolerance.

    >>> same_value((1, [0.1 + 0.2]), [1, [0.3]], 1e-9), same_value(1, 2, 1e-9)
    (True, False)
    """
    if isinstance(expected, list):
        is_list = isinstance(value, list | tuple) and len(value) == len(expected)
        return is_list and all(same_value(v, e, tolerance) for v, e in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        is_dict = isinstance(value, dict) and set(value) == set(expected)
        return is_dict and all(same_value(value[key], each, tolerance) for key, each in expected.items())
    if isinstance(expected, float) and isinstance(value, int | float):
        return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(value == expected)


def run(source: str, channel: Channel) -> None:
    """Runs a test to its end, which raises if it fails."""
    modules, names = missing_names(source)
    namespace: dict[str, Any] = {"__name__": "tests"}
    for name in sorted(modules):
        namespace[name] = importlib.import_module(name)
    for name in sorted(names):
        with contextlib.suppress(AttributeError):  # the test will raise a NameError
            namespace[name] = channel.ask("name", name)
    exec(compile(source, "tests.py", "exec"), namespace)


def missing_names(source: str) -> tuple[set[str], set[str]]:
    """Names that a test uses and neither defines nor imports: (modules of the standard library, names of the program).

    A name is a module only if nothing but its attributes is used: a program may have to define a function `token`.

    >>> missing_names("assert math.isclose(area(2), 12.566)")
    ({'math'}, {'area'})
    """
    missing = _free_names(symtable.symtable(source, "tests.py", "exec")) - set(dir(builtins))
    tree = ast.parse(source)
    bases = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used_alone = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not any(node is b for b in bases)
    }
    modules = (missing & sys.stdlib_module_names) - used_alone
    return modules, missing - modules


def _free_names(module: symtable.SymbolTable) -> set[str]:
    """Global names that a module reads somewhere and binds nowhere."""
    read, bound, tables = set(), set(), [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table is module or symbol.is_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                bound.add(symbol.get_name())
            elif is_global and symbol.is_referenced():
                read.add(symbol.get_name())
    return read - bound


# -- both ------------------------------------------------------------------------------------------------------------
def take_stdio() -> tuple[IO[str], IO[str]]:
    """stdin and stdout for the caller alone: other code then reads nothing, and what it prints is dropped."""
    streams = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return streams


def main(role: str, file: str, *descriptor: str) -> None:
    sys.set_int_max_str_digits(0)  # a long whole number is plain data
    source = (Path(__file__).parent / file).read_text(encoding="utf-8")
    if role != "tests":
        serve(source, with_names=role == "solution")
        return
    replies, verdicts = take_stdio()
    channel = Channel(os.fdopen(int(descriptor[0]), "w", encoding="utf-8"), replies)
    for verdict in judge(json.loads(source), channel):
        verdicts.write(verdict + "\n")
        verdicts.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
