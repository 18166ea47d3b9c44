"""Calls from tests to the program under test, which run in two sandboxes: what both execute, standard library only.

    python calls.py program PROGRAM      requests on stdin, replies on stdout
    python calls.py tests TESTS FD       replies on stdin, requests on descriptor FD, verdicts on stdout

Tests that share a process with an untrusted program prove nothing: it can end the process with success, replace what
`assert` compares with, return an object that equals everything, or read the tests and their answers. So only JSON of
plain data crosses. A name that the tests neither define nor import is the program's: its plain values are copied, all
else (functions, classes, instances, iterators) stays where it is, and the tests hold a `Remote` of it that they call,
iterate and ask for attributes, but never compare: it equals the same object of the program and nothing else, and
contains nothing. The program sees names and arguments; it never sees what is expected.

So tests can't hand the program a function, see a list changed in place, or use a builtin that the program redefines.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

PASSED, FAILED = "passed", "failed"
PROGRAM = "program"  # name of the module that the program is run as

Keep = Callable[[Any], int]
"""Gives the place under which an object without a plain form is kept."""


class ProgramError(Exception):
    """The program ended, or raised something that is no builtin exception."""


# -- plain data ------------------------------------------------------------------------------------------------------
def pack(value: Any, keep: Keep) -> Any:
    """The value as JSON can hold it: scalars as they are, all else as [kind, content].

    Subclasses go as what they are made of (Counter as a dict), but for containers of a class that the program defines,
    whose methods the tests may want: they are kept. Named tuples are tuples all the same.

    >>> pack([1, (2.5, "x")], id)
    ['list', [1, ['tuple', [2.5, 'x']]]]
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if type(value).__module__ == PROGRAM and not hasattr(value, "_fields"):
        return ["object", keep(value)]
    if isinstance(value, dict):
        return ["dict", [[pack(k, keep), pack(v, keep)] for k, v in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [pack(item, keep) for item in value]]
    return ["object", keep(value)]


def unpack(packed: Any, fetch: Callable[[int], Any]) -> Any:
    """The value that `pack` was given; `fetch` makes one of an object's place.

    >>> unpack(pack({"a": {1, 2}, (0,): b"x"}, id), id)
    {'a': {1, 2}, (0,): b'x'}
    """
    if not isinstance(packed, list):
        return packed
    kind, content = packed
    if kind == "object":
        return fetch(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {unpack(k, fetch): unpack(v, fetch) for k, v in content}
    made = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return made(unpack(item, fetch) for item in content)


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

    def fetch(self, place: int) -> Any:
        return self._objects[place]


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
    """The reply to a request: ["value", packed] or ["error", name of the exception, its text]."""
    try:
        return ["value", pack(perform(request, module, kept), kept.keep)]
    except Exception as error:
        return ["error", type(error).__name__, str(error)]


def perform(request: Any, module: types.ModuleType, kept: Kept) -> Any:
    match request:
        case ["name", name]:
            return getattr(module, name)
        case ["attribute", place, name]:
            return getattr(kept.fetch(place), name)
        case ["truth", place]:
            return bool(kept.fetch(place))
        case ["call", place, arguments, keywords]:
            keywords = unpack(keywords, kept.fetch)
            return kept.fetch(place)(*unpack(arguments, kept.fetch), **keywords)
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
                return unpack(packed, lambda place: Remote(self, place))
            case ["error", str(name), str(text)]:
                kind = getattr(builtins, name, None)
                raise kind(text) if isinstance(kind, type) and issubclass(kind, Exception) else ProgramError(text)
        raise ProgramError("the program answered nonsense")

    def call(self, place: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self.ask("call", place, pack(arguments, place_of), pack(keywords, place_of))


class Remote:
    """An object of the program's, as the tests see it: to be called, iterated, asked for attributes, not compared."""

    __contains__ = None  # else `3 in f()` holds for an object that says so, or that yields every number in turn

    def __init__(self, channel: Channel, place: int) -> None:
        self._channel, self._place = channel, place

    def __getattr__(self, name: str) -> Any:
        return self._channel.ask("attribute", self._place, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._channel.call(self._place, arguments, keywords)

    def __bool__(self) -> bool:
        return bool(self._channel.ask("truth", self._place))

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and other._place == self._place

    def __hash__(self) -> int:
        return hash(self._place)


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._channel.ask("attribute", self._place, name)(*arguments)


for _name in ("iter", "next", "len", "getitem", "setitem", "delitem", "str"):
    setattr(Remote, f"__{_name}__", _forward(f"__{_name}__"))


def place_of(value: Any) -> int:
    """The place of a Remote that goes back to the program."""
    if type(value) is not Remote:
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
    tree = ast.parse(source, "tests.py")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    namespace: dict[str, Any] = {"__name__": "tests"}
    for name in sorted(names - set(dir(builtins))):
        with contextlib.suppress(AttributeError):  # the tests define it themselves, or it will raise a NameError
            namespace[name] = channel.ask("name", name)
    exec(compile(tree, "tests.py", "exec"), namespace)


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
