"""What the source of a test says: who decides, and what crosses between it and the program."""

from in_one_test import each

from rlft.reward.code_tests import Doubt, doubts

CHECK = "def check(candidate):\n    {}\ncheck(f)"
STACK = "stack = Stack()\nstack.push(3)\n"

SOUND = [
    "assert add(2, 3) == 5",
    "assert add(add(1, 2), 3) == 6",
    "assert add(mul(2, 3), 4) == 10",
    "assert decode(encode('abc')) == 'abc'",
    "assert is_prime(7) and not is_prime(8)",
    "import math\nassert math.isclose(area(2), 12.5)",
    "assert math.isclose(area(2), 12.5)",
    "from math import isclose as near\nassert near(area(2), 12.5)",
    "def near(a, b): return abs(a - b) < 1e-6\nassert near(area(2), 12.5)",
    "assert abs(area(2) - 12.5) < 1e-6",
    "assert set(f([1, 1])) == {1} and len(f(2)) == 3 and f(3)[0] == 1 and 2 in f(4)",
    "assert isinstance(f(2), int) and isclose(f(2), 3)",
    "assert Solution().two([1], 2) == [0]",
    "stack = Stack()\nstack.push(3)\nassert stack.size() == 1 and stack.pop() == 3",
    "for a, b in [(1, 2)]:\n    assert f(a) == b",
    "assert all(f(x) == y for x, y in [(1, 2)])",
    "answer = f(3)\nexpected = 4\nassert answer == expected",
    "words = f('a b')\nwords.sort()\nassert words == ['a', 'b'] and words[0] == 'a'",
    "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
    "out = [f(x) for x in (1, 2)]\nif out != [2, 3]:\n    raise AssertionError",
    CHECK.format("assert candidate([1]) == 2\n    assert abs(candidate(3) - 2) < 1e-6"),
    "def compare(out, exp):\n    assert out == exp\ncompare(f(2), 4)",
    "import random\nfor _ in range(3):\n    s = str(random.random())\n    assert decode(encode(s)) == s",
]

DOUBTFUL = [
    ("assert isclose(area(2), 12.566)", Doubt.own_judge),
    ("answer = area(2)\nassert isclose(answer, 12.566)", Doubt.own_judge),
    ("assert not differ(f(1), 3)", Doubt.own_judge),
    ("assert max_diff(f(2), 4) < 1e-6", Doubt.own_judge),
    ("assert max_diff(f(2), 4) == 0", Doubt.own_judge),
    ("assert isclose(f(2), 3) is True", Doubt.own_judge),
    ("assert isclose(f(2), 3) and isclose(f(3), 4)", Doubt.own_judge),
    ("assert f(2) == 3 or isclose(f(2), 3)", Doubt.own_judge),
    ("assert np.allclose(f(2), [1, 2])", Doubt.own_judge),
    ("solution = Solution()\nassert solution.isclose(solution.area(2), 12.5)", Doubt.own_judge),
    ("assert is_sorted(sort([2, 1]))", Doubt.own_judge),
    ("assert all(isclose(f(x), y) for x, y in [(1, 2)])", Doubt.own_judge),
    ("if not isclose(f(2), 3):\n    raise AssertionError", Doubt.own_judge),
    (CHECK.format("assert isclose(candidate(2), 3)"), Doubt.own_judge),
    ("assert 1 == 1", Doubt.nothing),
    ("assert sum([1, 2]) == 3", Doubt.nothing),
    ("assert math.sqrt(4) == 2", Doubt.nothing),
    ("assert f(2) == g(2)", Doubt.itself),
    ("assert f() == RED", Doubt.itself),
    ("assert f(lambda x: x) == 3", Doubt.function),
    ("assert f(key=lambda x: x) == 3", Doubt.function),
    ("def k(a): return a\nassert f(k, 1) == 2", Doubt.function),
    ("x = [2, 1]\nf(x)\nassert x == [1, 2]", Doubt.in_place),
    *((STACK + use, Doubt.operators) for use in ("assert len(stack) == 1", "assert stack[0] == 3", "assert not stack")),
    *(
        (STACK + use, Doubt.operators)
        for use in ("assert stack == [3]", "for x in stack: assert x", "assert 3 in stack")
    ),
    *((STACK + use, Doubt.operators) for use in ("assert list(stack) == [3]", "assert [x for x in stack] == [3]")),
]


@each("source", SOUND)
def test_sound_tests_are_left_alone(source):
    assert doubts(source) == set()


@each(("source", "doubt"), DOUBTFUL)
def test_doubtful_tests_are_named(source, doubt):
    assert doubts(source) == {doubt}
