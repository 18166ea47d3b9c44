"""Calls from tests to the program under test, which run in two sandboxes: what both execute, standard library only.

    python protocol.py program PROGRAM      requests on stdin, replies on stdout
    python protocol.py tests TESTS FD       replies on stdin, requests on descriptor FD, verdicts on stdout

Tests that share a process with an untrusted program prove nothing: it can end the process with success, replace what
`assert` compares with, return an object that equals everything, or read the tests and their answers. So only JSON of
plain data crosses, and is rebuilt on this side as Python's own types. Names, modules and builtins are the tests' own:
what they define or import, and the standard library's modules where they write `math.isclose` without an import. Every
other name is the program's: its plain values are copied, iterators are pulled item by item, and what has no plain form
(functions, classes, instances) stays where it is. The tests hold an `Object` of it that they call and ask for
attributes and methods. It answers no operator, for the program would choose the answer: comparing it, `not x`,
`len(x)`, `x[0]`, `y in x` and the like fail the test. The program sees names and arguments, never what is expected.

So tests can't hand the program a function, see a list changed in place, or use a builtin that the program redefines;
code_tests.py says which tests need that.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
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

Keep = Callable[[Any], int]
"""Gives the number under which an object without a plain form is kept."""


class ProgramError(Exception):
    """The program ended, or raised something that is no builtin exception."""


class EndOfIterator(Exception):
    """An iterator of the program's has no more items."""


# -- plain data ------------------------------------------------------------------------------------------------------
WORDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
}
"""Kinds without parts of their own: type, its JSON, and what makes it of that."""

EXACT = {"Decimal": "decimal", "Fraction": "fractions"}
"""Numbers that go as their text, with the modules that have them; imported where they are needed only."""

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
"""Kinds that hold values: type, and what makes it of a list of them."""


def pack(value: Any, keep: Keep) -> Any:
    """The value as JSON can hold it: scalars as they are, all else as [kind, content].

    Subclasses go as what they are made of (Counter as a dict), but for containers of a class that the program defines,
    whose methods the tests may want: they are kept. Named tuples are tuples all the same.

    >>> pack([1, (2.5, "x")], id)
    ['list', [1, ['tuple', [2.5, 'x']]]]
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__ == PROGRAM and not hasattr(value, "_fields"):
        return ["iterator" if isinstance(value, Iterator) else "object", keep(value)]
    for kind, (type_, written, _) in WORDS.items():
        if isinstance(value, type_):
            return [kind, written(value)]
    if EXACT.get(type(value).__name__) == type(value).__module__:
        return [type(value).__name__, str(value)]
    if isinstance(value, dict):
        return ["dict", [[pack(k, keep), pack(v, keep)] for k, v in value.items()]]
    for kind, (type_, _) in COLLECTIONS.items():
        if isinstance(value, type_):
            return [kind, [pack(item, keep) for item in value]]
    return ["iterator" if isinstance(value, Iterator) else "object", keep(value)]


def unpack(packed: Any, fetch: Callable[[str, int], Any]) -> Any:
    """The value that `pack` was given; `fetch` makes one of the kind (object or iterator) and place of what was kept.

    >>> unpack(pack({"a": {1, 2}, (0,): b"x"}, id), print)
    {'a': {1, 2}, (0,): b'x'}
    """
    if not isinstance(packed, list):
        return packed
    kind, content = packed
    if kind in ("object", "iterator"):
        return fetch(kind, content)
    if kind in WORDS:
        return WORDS[kind][2](content)
    if kind in EXACT:
        return getattr(importlib.import_module(EXACT[kind]), kind)(content)
    if kind == "dict":
        return {unpack(k, fetch): unpack(v, fetch) for k, v in content}
    return COLLECTIONS[kind][1]([unpack(item, fetch) for item in content])


# -- the program's side ----------------------------------------------------------------------------------------------
class Kept:
    """The program's objects that the tests know by their place."""

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


def serve(program: str) -> None:
    """Runs the program as a module, not as the main program, then answers requests until there are no more.

    A process that the program forked off says nothing: its answers would race with the end of the program itself.
    """
    requests, replies = take_stdio()
    getpid, leave = os.getpid, os._exit
    own = getpid()
    module = types.ModuleType(PROGRAM)
    sys.modules[PROGRAM] = module
    exec(compile(program, "program.py", "exec"), module.__dict__)
    kept = Kept()
    if getpid() != own:
        leave(0)
    for line in requests:
        reply = json.dumps(answer(json.loads(line), module, kept))
        if getpid() != own:
            leave(0)
        replies.write(reply + "\n")
        replies.flush()


def answer(request: Any, module: types.ModuleType, kept: Kept) -> Any:
    """The reply to a request: ["value", packed], ["error", name of the exception, its text], or ["end"] of an iterator.

    A StopIteration out of a call is an error like any other: it would end a loop of the tests', and with it the test.
    """
    try:
        return ["value", pack(perform(request, module, kept), kept.keep)]
    except EndOfIterator:
        return ["end"]
    except Exception as error:  # the program's own, which the tests see by name and text
        return ["error", type(error).__name__, str(error)]


def perform(request: Any, module: types.ModuleType, kept: Kept) -> Any:
    match request:
        case ["name", name]:
            return getattr(module, name)
        case ["attribute", place, name]:
            return getattr(kept.fetch(place), name)
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
    """The tests' end of the two pipes. num_calls counts the calls so far."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self._requests, self._replies = requests, replies
        self.num_calls = 0

    def ask(self, *request: Any) -> Any:
        """The program's reply as a value; raises what the program raised, or ProgramError where it has ended."""
        self.num_calls += request[0] == "call"
        with contextlib.suppress(BrokenPipeError):  # the missing reply says so
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        line = self._replies.readline()
        if not line.endswith("\n"):
            raise ProgramError("the program has ended")
        match json.loads(line):
            case ["value", packed]:
                return unpack(packed, lambda kind, place: KEPT[kind](self, place))
            case ["end"] if request[0] == "next":
                raise StopIteration
            case ["error", str(name), str(text)]:
                kind = getattr(builtins, name, None)
                if not isinstance(kind, type) or not issubclass(kind, Exception) or name in ENDS_LOOPS:
                    raise ProgramError(text)
                raise kind(text)
        raise ProgramError("the program's reply is malformed")

    def call(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self.ask("call", number, pack(arguments, place_of), pack(keywords, place_of))


ENDS_LOOPS = ("StopIteration", "StopAsyncIteration")
ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
)
OPERATORS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "length_hint", "getitem", "setitem", "delitem", "contains"),
    *(
        "iter",
        "next",
        "reversed",
        "hash",
        "str",
        "repr",
        "format",
        "bytes",
        "int",
        "float",
        "complex",
        "index",
        "round",
    ),
    *("trunc", "floor", "ceil", "neg", "pos", "abs", "invert", "divmod", "rdivmod", "enter", "exit", "instancecheck"),
    *(side + name for name in ARITHMETIC for side in ("", "r", "i")),
)


class Distant:
    """What stays with the program, by its place there."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._place = channel, number


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any) -> Any:
        raise TypeError(f"__{name}__: what a program returns is compared and measured where it is plain data")

    return refuse


for _name in OPERATORS:
    setattr(Distant, f"__{_name}__", _refuse(_name))


class Object(Distant):
    """An object of the program's, as the tests see it: to be called and asked for attributes and methods."""

    def __getattr__(self, name: str) -> Any:
        return self._channel.ask("attribute", self._place, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._channel.call(self._place, arguments, keywords)


class Items(Distant):
    """An iterator of the program's: its items, one at a time."""

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> Any:
        return self._channel.ask("next", self._place)


KEPT: dict[str, Callable[[Channel, int], Any]] = {"object": Object, "iterator": Items}


def place_of(value: Any) -> int:
    """The place of an object that goes back to the program."""
    if not isinstance(value, Distant):
        raise TypeError(f"only plain data can be handed to the program, not {type(value).__name__}")
    return value._place


def judge(tests: list[str], channel: Channel) -> Iterator[str]:
    """The verdict on each test in turn; one that gets by without calling the program proves nothing, and failed."""
    for source in tests:
        before = channel.num_calls
        try:
            run(source, channel)
            yield PASSED if channel.num_calls > before else FAILED
        except BaseException:
            yield FAILED


def run(source: str, channel: Channel) -> None:
    """Runs a test to its end; it raises where it fails."""
    modules, names = missing_names(source)
    namespace: dict[str, Any] = {"__name__": "tests"}
    for name in sorted(modules):
        namespace[name] = importlib.import_module(name)
    for name in sorted(names):
        with contextlib.suppress(AttributeError):  # it will raise a NameError
            namespace[name] = channel.ask("name", name)
    exec(compile(source, "tests.py", "exec"), namespace)


def missing_names(source: str) -> tuple[set[str], set[str]]:
    """Names that a test uses and neither defines nor imports: (modules of the standard library, names of the program).

    A module is a name that is used for its attributes alone: a program may well have to define a function `token`.

    >>> missing_names("assert math.isclose(area(2), 12.566)")
    ({'math'}, {'area'})
    """
    missing = _free_names(symtable.symtable(source, "tests.py", "exec")) - set(dir(builtins))
    tree = ast.parse(source)
    bases = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    alone = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not any(node is b for b in bases)}
    modules = (missing & sys.stdlib_module_names) - alone
    return modules, missing - modules


def _free_names(module: symtable.SymbolTable) -> set[str]:
    """Global names that are read somewhere in a module and bound nowhere in it."""
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
    """stdin and stdout for ourselves alone: what is run here reads nothing and prints to nowhere."""
    taken = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return taken


def main(role: str, file: str, *descriptor: str) -> None:
    sys.set_int_max_str_digits(0)  # a long whole number is plain data
    source = (Path(__file__).parent / file).read_text(encoding="utf-8")
    if role == "program":
        serve(source)
        return
    replies, verdicts = take_stdio()
    channel = Channel(os.fdopen(int(descriptor[0]), "w", encoding="utf-8"), replies)
    for verdict in judge(json.loads(source), channel):
        verdicts.write(verdict + "\n")
        verdicts.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
