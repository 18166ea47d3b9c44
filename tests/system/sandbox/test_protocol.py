"""The seam between tests and program; what programs try at it stands in test_code.py."""

import io
import json
import math
import types
from collections import deque
from decimal import Decimal
from fractions import Fraction

import pytest
from in_one_test import each

from rlft.system.sandbox.protocol import (
    FAILED,
    PASSED,
    Channel,
    Kept,
    ProgramError,
    answer,
    judge,
    missing_names,
    pack,
    unpack,
)


class Loop(io.StringIO):
    """Both pipes in one, with the program in this process: each request is answered when the reply is read."""

    def __init__(self, source):
        super().__init__()
        self.module, self.kept = types.ModuleType("program"), Kept()
        exec(source, self.module.__dict__)

    def readline(self):
        request = json.loads(self.getvalue().splitlines()[-1])
        return json.dumps(answer(request, self.module, self.kept)) + "\n"


def verdicts(program, *tests):
    loop = Loop(program)
    return list(judge(list(tests), Channel(loop, loop)))


PLAIN = [None, True, 3, 10**4000, -0.5, math.inf, "x\n\u2028", b"\x00\xff", 1 + 2j, [], [[1]], (), (1, "a"), {1, 2}]
PLAIN += [frozenset({(1,)}), {}, {"a": [1], (2, 3): {4}, None: 5}, bytearray(b"x"), range(3, 9, 2), deque([1, [2]])]
PLAIN += [Decimal("0.10"), Fraction(1, 3), {"a": 1}.keys(), {"a": 1}.items()]


def nothing_kept(kind, place):
    raise AssertionError(kind)


def test_values_of_a_dict_arrive_as_such():
    arrived = unpack(pack({"a": 1, "b": 1}.values(), id), nothing_kept)
    assert (list(arrived), len(arrived), type(arrived)) == ([1, 1], 2, type({}.values()))


@each("value", PLAIN, ids=lambda value: f"{value!r:.20}")
def test_plain_data_arrives_as_it_was(value):
    arrived = unpack(json.loads(json.dumps(pack(value, id))), nothing_kept)
    assert arrived == value
    assert type(arrived) is type(value)


def test_subclasses_arrive_as_what_they_are_made_of():
    from collections import Counter, namedtuple

    assert unpack(pack([Counter("aab"), namedtuple("Point", "x y")(1, 2)], id), nothing_kept) == [
        {"a": 2, "b": 1},
        (1, 2),
    ]


CHAMELEON = """
class Chameleon:
    def __eq__(self, other): return True
    def __bool__(self): return False
    def __len__(self): return 3
    def __iter__(self): return iter(range(3))
    def __getattr__(self, name): return lambda *a: self
    def __str__(self): return "2"
    __repr__ = __format__ = lambda self, *a: "2"
for _name in ("lt le gt ge ne contains hash instancecheck").split():
    setattr(Chameleon, f"__{_name}__", lambda self, *a: True)
for _name in ("add sub mul truediv floordiv mod pow neg abs round getitem enter and or xor invert").split():
    setattr(Chameleon, f"__{_name}__", lambda self, *a: self)
for _name in ("int", "index"):
    setattr(Chameleon, f"__{_name}__", lambda self: 2)
def f(x): return Chameleon()
"""
"""An object that answers every operator as a test may want it."""


@each(
    "test",
    [
        *("assert f(1) == 2", "assert 2 == f(1)", "assert f(1) != 5", "assert not f(1) != 2", "assert not f(1)"),
        *("assert len(f(1)) == 3", "assert 2 in f(1)", "assert f(1) in (2, 3)", "assert f(1) not in (7, 8)"),
        *("assert 0 < f(1) < 9", "assert f(1) >= 2", "assert bool(f(1)) is False", "assert f(1) or True"),
        *("assert not (f(1) - 2)", "assert abs(f(1) - 2) < 1e-6", "assert -f(1) <= 0", "assert not f(1)[0]"),
        *("assert str(f(1)) == '2'", "assert f'{f(1)}' == '2'", "assert repr(f(1)) == '2'", "assert int(f(1)) == 2"),
        *("assert [0, 1, 2][f(1)] == 2", "assert round(f(1), 2) != 9", "assert isinstance(2, f(1))"),
        *("assert list(f(1)) == [0, 1, 2]", "assert sorted(f(1)) == [0, 1, 2]", "assert all(x < 5 for x in f(1))"),
        *("assert {f(1)} != {7}", "with f(1):\n    pass", "assert ~f(1) != 4", "assert f(1) | 1 != 0"),
        *("assert [f(1)] == [2]", "assert (f(1), 1) != (3, 1)", "assert {'a': f(1)} == {'a': 2}", "a, b, c = f(1)"),
        *("x = f(1)\nx += 1", "assert max(f(1), 1) == 2", "assert f(1) if f(1) else 1", "assert f(1).value == 2"),
    ],
)
def test_an_object_answers_no_operator(test):
    assert verdicts(CHAMELEON, test) == [FAILED]


CONTAINERS = """
from collections import namedtuple
__name__ = "program"
class Stack(list):
    push, size = list.append, list.__len__
Point = namedtuple("Point", "x y")
def point(): return Point(1, 2)
"""
INSTANCES = """
class Counter:
    step = 2
    def __init__(self, start=0): self.value = start
    def add(self, *, times=1): self.value += self.step * times; return self
    def same(self, other): return self is other
def count():
    n = 0
    while True:
        yield n
        n += 1
"""
COUNTS = """
counter = Counter(start=1)
assert counter.add().add(times=2).value == 7
assert counter.same(counter) and Counter.step == 2
numbers = count()
assert [next(numbers) for _ in range(3)] == [0, 1, 2]
"""
ITERATORS = """
import itertools
def squares(n): return (i * i for i in range(n))
def doubled(xs): return map(lambda x: 2 * x, xs)
def everything(): return itertools.count()
class Endless:
    def __iter__(self): return self
    def __next__(self): return 1
def hostile(): return Endless()
def broken():
    yield 1
    raise ValueError("so")
"""
MATH = """
class math:
    isclose = staticmethod(lambda *a, **k: True)
    inf = pi = 0
def area(r): return 0.0
"""
RAISES = """
class Odd(Exception): pass
def f(x):
    raise {1: ValueError, 2: Odd, 3: KeyError}[x]("so")
"""
CATCHES = "try:\n    f(X)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'so'"
BINDS = """
import math as y
def helper(x, *, limit=3):
    global z
    z = [w for w in range(x)]
    return limit
assert f(helper(2)) == 3 and z == [0, 1]
for x in [1]: pass
assert f(x) == 1
"""
# What it is about; a program; tests that pass, and tests that fail.
SEAMS = {
    "containers of the program's own keep their methods": (
        CONTAINERS,
        ["s = Stack()\ns.push(3)\nassert s.size() == 1 and s.pop() == 3", "assert point() == (1, 2)"], [],
    ),
    # The program chooses which objects it gives out, and could always give the same.
    "its objects are not compared with each other": (
        "class Colour: pass\nRED = BLUE = Colour()\ndef f(): return RED", [],
        ["assert f() == RED", "assert f() == BLUE"],
    ),
    "classes, instances and iterators stay with it": (INSTANCES, [COUNTS], []),
    "iterators give their items and contain nothing": (
        ITERATORS,
        ["assert list(squares(3)) == [0, 1, 4]", "assert sum(doubled([1, 2])) == 6", "assert next(hostile()) == 1",
         "assert sorted(squares(3), reverse=True) == [4, 1, 0]",
         "x = broken()\nassert next(x) == 1\ntry:\n    next(x)\nexcept ValueError:\n    pass"],
        ["assert 7 in everything()", "assert squares(3) != [0, 1, 4]", "assert not squares(0)", "len(squares(2))"],
    ),
    "a StopIteration out of a call ends no loop of the tests": (
        "def f(x): raise StopIteration", [], ["assert all(map(f, [1, 2, 3]))", "assert not list(map(f, [1]))"],
    ),
    "modules are the tests' own without an import too": (
        MATH, [], ["assert math.isclose(area(2), 12.566)", "assert area(1) == math.pi"],
    ),
    "modules that are right": (
        "import math\ndef area(r): return math.pi * r * r", ["assert math.isclose(area(2), 12.566, rel_tol=1e-4)"], [],
    ),
    "a function named as a module": ("def token(x): return x", ["assert token(3) == 3"], []),
    "its values are copies": (
        "LIMIT = 3\ndef clear(items): items.clear(); return items",
        ["x = [1]\nassert clear(x) == [] and x == [1] and LIMIT == 3"], [],
    ),
    "exceptions arrive by their builtin names": (
        RAISES, [CATCHES.replace("X", "1")], [CATCHES.replace("X", "2"), CATCHES.replace("X", "3")],
    ),
    "a test that calls nothing of it is not passed": (
        "def f(): return 1", [], ["assert 1 == 1", "try:\n    g()\nexcept NameError:\n    pass"],
    ),
    "builtins are the tests' own": (
        "def abs(x): return 0.0\ndef all(x): return True\nlen = abs\ndef f(x): return [9.0]", [],
        ["assert abs(f(1)[0] - 1.0) < 1e-6", "assert all(y < 5 for y in f(1))"],
    ),
    "what the tests define goes before it": (
        "def expected(x): return f(x)\ndef f(x): return 7", [],
        ["def expected(x):\n    return 8\nassert f(1) == expected(1)"],
    ),
    "names that the tests bind anywhere are not asked for": ("def f(x): return x\nx = y = z = limit = 99", [BINDS], []),
    "functions cannot be handed to it": ("def f(g): return 1", [], ["assert f(lambda: 0) == 1"]),
}  # fmt: skip


@each("name", SEAMS)
def test_the_program_gives_values_and_no_verdicts(name):
    program, right, wrong = SEAMS[name]
    assert verdicts(program, *right, *wrong) == [PASSED] * len(right) + [FAILED] * len(wrong)


def test_names_that_are_bound_are_not_missing():
    assert missing_names(BINDS) == (set(), {"f"})


@each("reply", ["", "[]\n", "1\n", '["value"', '["error", 1, 2]\n', '["value", ["list", 3]]\n', "{" * 9])
def test_nonsense_from_the_program_fails_the_test(reply):
    channel = Channel(io.StringIO(), io.StringIO(reply))
    assert list(judge(["assert f(1) == 1", "pass"], channel)) == [FAILED, FAILED]


def test_a_program_that_has_ended_is_told():
    with pytest.raises(ProgramError, match="has ended"):
        Channel(io.StringIO(), io.StringIO("")).ask("name", "f")
