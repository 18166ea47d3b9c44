"""The seam between tests and program; what programs try at it stands in test_code.py."""

import io
import json
import math
import types

import pytest

from rlft.reward.calls import FAILED, PASSED, Channel, Kept, ProgramError, answer, judge, pack, unpack


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
PLAIN += [frozenset({(1,)}), {}, {"a": [1], (2, 3): {4}, None: 5}]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.20}")
def test_plain_data_arrives_as_it_was(value):
    arrived = unpack(json.loads(json.dumps(pack(value, id))), id)
    assert arrived == value
    assert type(arrived) is type(value)


def test_subclasses_arrive_as_what_they_are_made_of():
    from collections import Counter, namedtuple

    assert unpack(pack([Counter("aab"), namedtuple("Point", "x y")(1, 2)], id), id) == [{"a": 2, "b": 1}, (1, 2)]


def test_containers_of_the_programs_own_keep_their_methods():
    program = """
from collections import namedtuple
__name__ = "program"
class Stack(list): push = list.append
Point = namedtuple("Point", "x y")
def point(): return Point(1, 2)
"""
    test = "stack = Stack()\nstack.push(3)\nassert len(stack) == 1 and stack[0] == 3 and list(stack) == [3]"
    assert verdicts(program, test, "assert point() == (1, 2)") == [PASSED, PASSED]


def test_what_equals_everything_equals_nothing_once_it_has_crossed():
    program = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __contains__(self, other): return True
    def __iter__(self): return iter(range(100))
def f(x): return Equal()
"""
    tests = [
        "assert f(1) == 2",
        "assert 2 == f(1)",
        "assert not f(1) != 2",
        "assert 2 in f(1)",
        "assert f(1) in (2, 3)",
    ]
    assert verdicts(program, *tests) == [FAILED] * 5


def test_the_same_object_of_the_program_equals_itself():
    program = "class Colour: pass\nRED, BLUE = Colour(), Colour()\ndef f(): return RED"
    assert verdicts(program, "assert f() == RED", "assert f() == BLUE") == [PASSED, FAILED]


def test_classes_instances_and_iterators_stay_with_the_program():
    program = """
class Counter:
    step = 2
    def __init__(self, start=0): self.value = start
    def add(self, *, times=1): self.value += self.step * times; return self
    def __len__(self): return self.value
    def __getitem__(self, key): return key * 2
def count():
    n = 0
    while True:
        yield n
        n += 1
"""
    test = """
counter = Counter(start=1)
assert counter.add().add(times=2).value == 7
assert len(counter) == 7 and counter["a"] == "aa" and Counter.step == 2
assert counter and not Counter()
numbers = count()
assert [next(numbers) for _ in range(3)] == [0, 1, 2]
"""
    assert verdicts(program, test) == [PASSED]


def test_values_of_the_program_are_copies():
    program = "LIMIT = 3\ndef clear(items): items.clear(); return items"
    assert verdicts(program, "x = [1]\nassert clear(x) == [] and x == [1] and LIMIT == 3") == [PASSED]


def test_exceptions_arrive_by_their_builtin_names():
    program = """
class Odd(Exception): pass
def f(x):
    raise {1: ValueError, 2: Odd, 3: KeyError}[x]("so")
"""
    test = "try:\n    f(X)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'so'"
    assert verdicts(program, test.replace("X", "1")) == [PASSED]
    assert verdicts(program, test.replace("X", "2")) == [FAILED]
    assert verdicts(program, test.replace("X", "3")) == [FAILED]


def test_a_test_that_calls_nothing_of_the_program_is_not_passed():
    assert verdicts("def f(): return 1", "assert 1 == 1", "try:\n    g()\nexcept NameError:\n    pass") == [FAILED] * 2


def test_builtins_are_the_tests_own():
    program = "def abs(x): return 0.0\ndef all(x): return True\nlen = abs\ndef f(x): return [9.0]"
    assert verdicts(program, "assert abs(f(1)[0] - 1.0) < 1e-6", "assert all(y < 5 for y in f(1))") == [FAILED] * 2


def test_what_the_tests_define_goes_before_the_program():
    program = "def expected(x): return f(x)\ndef f(x): return 7"
    assert verdicts(program, "def expected(x):\n    return 8\nassert f(1) == expected(1)") == [FAILED]


def test_functions_cannot_be_handed_to_the_program():
    assert verdicts("def f(g): return 1", "assert f(lambda: 0) == 1") == [FAILED]


@pytest.mark.parametrize(
    "reply", ["", "[]\n", "1\n", '["value"', '["error", 1, 2]\n', '["value", ["list", 3]]\n', "{" * 9]
)
def test_nonsense_from_the_program_fails_the_test(reply):
    channel = Channel(io.StringIO(), io.StringIO(reply))
    assert list(judge(["assert f(1) == 1", "pass"], channel)) == [FAILED, FAILED]


def test_a_program_that_has_ended_is_told():
    with pytest.raises(ProgramError, match="has ended"):
        Channel(io.StringIO(), io.StringIO("")).ask("name", "f")
