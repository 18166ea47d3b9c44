"""Programs that earn their score, and programs that try to get it some other way."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from in_one_test import each
from reward_groups import make_group

from rlft.config.compose import compose
from rlft.config.resolved import resolve
from rlft.reward import code
from rlft.reward.code import Call, Doubt, Pair, ProgramIn, Required, Score, continued, doubts, parse_tests, wanted_by
from rlft.reward.workers.reward_spec import reported
from rlft.reward.workers.scorer import RewardError, Scorer, specs
from rlft.system.sandbox import bubblewrap
from rlft.system.sandbox.bubblewrap import Isolation
from rlft.types import UserError

KEYS = yaml.safe_load((Path(__file__).parents[2] / "configs" / "reward" / "code.yaml").read_text())["code"]
SHIPPED_SECONDS = KEYS["seconds"]
KEYS |= {"group_timeout": 30.0, "seconds": 2.0}
ADD_TESTS = '["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]'
DOUBLE_TESTS = '[{"input": "2", "output": "4"}, {"input": "-3", "output": "-6"}]'


def reward(**keys):
    fields = {name: value for name, value in KEYS.items() if name not in ("_target_", "weight")} | keys
    kinds = {"program_in": ProgramIn, "score": Score, "isolation": Required}
    return code.Code(**fields | {name: kind(fields[name]) for name, kind in kinds.items()})


def fence(program, language="python"):
    return f"So:\n```{language}\n{program}\n```\n"


def scores(group, programs, tests, **keys):
    return reward(**keys)(group([fence(program) for program in programs], answer=tests))


# -- where the program stands ----------------------------------------------------------------------------------------
BLOCKS = {  # {program: texts}; every fence: tests/tokens/test_answers.py; markers of reasoning: test_reasoning.py there
    "a\n": [
        fence("a", "{python}"), fence("a", "{.python}"),
        fence("a", ""), fence("a") + fence("output", ""), fence("a") + fence("b", "bash"),
        fence("a", "") + fence("b", "bash"), "```python\na\n```\n```python\nb", "```\na\n```\n```python\nb",
        "```python\na",  # such as before a stop string
    ],
    "b\n": [
        fence("a") + fence("b"), fence("a", "") + fence("b", ""), "```python\na\n```python\nb\n```",
        "<think>\n" + fence("a") + "</think>\n" + fence("b", ""),
    ],
    None: ["<think>\n" + fence("a") + "</think>\nDone.", fence(" \n"), "print(1)", ""],
}  # fmt: skip


@each(("program", "text"), [(program, text) for program, texts in BLOCKS.items() for text in texts])
def test_the_last_block_of_python_is_the_program(text, program):
    assert reward().extract(text) == program


def test_the_program_may_stand_in_a_tag_or_be_all_of_the_text():
    tagged = reward(program_in="tag")
    texts = ("<answer>a</answer> or <answer>b</answer>", "```python\na\n```", "<answer>\n```python\na\n```\n</answer>")
    assert [tagged.extract(text) for text in texts] == ["b", None, "a\n"]
    assert reward(program_in="text").extract("print(1)") == "print(1)"


@each(("tests", "blocks", "chosen"), [
    (["assert add(2, 3) == 5"], ["def add(a, b): return a + b", "print(add(1, 2))"], 0),
    (["assert add(2, 3) == 5"], ["def add(a, b): return 1", "def add(a, b): return 2", "add(1, 2)"], 1),
    (["assert add(2, 3) == 5"], ["add = lambda a, b: a + b", "x = add(1, 2)"], 0),
    (["assert Stack().pop() == 5"], ["class Stack: pass", "s = Stack()\ns.push(3)"], 0),
    (["assert add(2, 3) == 5"], ["def adder(a): pass", "print(2)"], 1),
    ([Call(function="add", arguments=[1], results=[1])], ["class Solution:\n    def add(self, a): 1", "add(1)"], 0),
    ([Call(function="add", arguments=[1], results=[1])], ["def add(a): return a", "assert add(1) == 1"], 0),
    ([Pair(input="1", output="2")], ["print(int(input()) + 1)", "print(solve(1))"], 0),
    ([Pair(input="1", output="2")], ["import sys\nfor line in sys.stdin: pass", "# 1\n# 2"], 0),
    ([Pair(input="", output="2")], ["x = 1", "print(2)"], 1),
])  # fmt: skip
def test_of_several_blocks_the_last_counts_that_is_a_program_and_no_example_of_its_use(tests, blocks, chosen):
    for language in ("python", ""):
        text = "".join(fence(block, language) for block in blocks)
        assert reward().extract(text, wanted_by(tests)) == blocks[chosen] + "\n"


PROMPT = 'from typing import List\n\ndef add(a: int, b: int) -> int:\n    """Adds."""\n'


@each(("prefix", "program"), [
    *((PROMPT, program) for program in (
        "    return a + b\n", "    c = a + b\n    return c\n", "\n    return a + b", "return a + b",
        "c = a + b\nreturn c", "c = a + b\n    return c", "def add(a, b):\n    return a + b",
    )),
    (PROMPT + "    ", "return a + b"), (PROMPT.rstrip(), "    return a + b"), (PROMPT + "    return", " a + b"),
    ("def add(a, b):\n", "def add(a, b):\n    return a + b"), ("def add(a, b):", "return a + b"),
    ("class Solution:\n    def add(self, a, b):\n        ", "return a + b\n"),
])  # fmt: skip
def test_a_program_may_continue_the_code_of_its_prompt(prefix, program):
    names = {}
    exec(continued(prefix, program), names)
    assert (names["add"](2, 3) if "add" in names else names["Solution"]().add(2, 3)) == 5


def test_a_hostile_text_is_read_in_linear_time():
    start = time.process_time()
    reward().extract("```python\n" * 20_000)
    reward().extract("`" * 200_000)
    reward(program_in="tag").extract("<answer>" * 20_000)
    assert time.process_time() - start < 10


# -- what the tests are ----------------------------------------------------------------------------------------------
@each(("given", "tests"), [
    (ADD_TESTS, ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]),
    ("assert f() == [1]", ["assert f() == [1]"]),
    (["assert f() == 1"], ["assert f() == 1"]),
    ([{"input": "1", "output": 1, "note": "one"}], [Pair(input="1", output="1")]),
    # lists of lines; columns; the kinds of APPS, TACO, LiveCodeBench and others
    ([{"input": ["1", "2"], "output": ["3"]}], [Pair(input="1\n2", output="3")]),
    ({"input": "1", "output": "2"}, [Pair(input="1", output="2")]),
    ({"inputs": ["1\n", ["2", "3"]], "outputs": ["1\n", ["2"]]},
     [Pair(input="1\n", output="1\n"), Pair(input="2\n3", output="2")]),
    ('{"input": ["1"], "output": ["2"], "testtype": ["stdin"]}', [Pair(input="1", output="2")]),
    ([{"fn_name": None, "input": "1", "output": "2", "type": "stdin_stdout"}], [Pair(input="1", output="2")]),
    ('{"fn_name": "f", "inputs": [[1, "a"]], "outputs": [[3]]}',
     [Call(function="f", arguments=[1, "a"], results=[[3], 3])]),
    ({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [{"3": 4}]},
     [Call(function="f", arguments=[{1: 2}], results=[{3: 4}])]),
    ([{"fn_name": "f", "type": "function_call", "input": [[1, 2]], "output": 3}],
     [Call(function="f", arguments=[[1, 2]], results=[3])]),
    ([{"input": '[1, 2]\n"a"', "output": "[3]", "testtype": "functional", "metadata": {"func_name": "f"}}],
     [Call(function="f", arguments=[[1, 2], "a"], results=[[3]])]),
])  # fmt: skip
def test_tests_may_be_json_python_a_list_or_columns(given, tests):
    assert parse_tests(given) == tests


def test_another_field_may_name_the_function_and_hold_the_setup():
    called = [Call(function="add", arguments=[1], results=[2])]
    for entry in ("add", '{"func_name": "add"}', {"fn_name": "add"}):
        test = [{"input": "1", "output": "2", "testtype": "functional"}]
        assert reward(entry_field="e")._tests(prompt_of(test, e=entry)) == called
    check = "def check(candidate):\n    assert candidate(1) == 2"
    assert reward(entry_field="e")._tests(prompt_of(check, e="add")) == [check + "\n\ncheck(add)\n"]
    for setup in ("import math\n", ["import math"], "import math"):
        [test] = reward(setup_field="s")._tests(prompt_of(["assert f() == math.pi"], s=setup))
        assert test == "import math\nassert f() == math.pi"
    assert reward(setup_field="s")._tests(prompt_of(["assert f() == 1"], s="")) == ["assert f() == 1"]


def prompt_of(tests, **metadata):
    prompt = make_group([""], answer=tests if isinstance(tests, str) else json.dumps(tests)).prompt
    return replace(prompt, metadata=metadata)


@each(("given", "problem"), [
    ("", "only defines things"),
    ("18", "holds no tests"),
    (None, "holds no tests"),
    ([], "holds no tests"),
    ("assert f( == 1", "is not Python"),
    ("def check(candidate):\n    assert candidate(1) == 2", r"only defines things, .* as in check\(add\)"),
    ('["assert f()", {"input": "", "output": ""}]', "holds neither"),
    ('[{"input": ""}]', "holds neither"),
    ('[{"input": "", "output": "", "stdin": ""}]', "holds tests with 'stdin', whose meaning is not known"),
    ('[{"input": "", "output": "", "language": "cpp"}]', "holds tests with 'language', whose meaning is not known"),
    ('[{"input": "", "output": "", "checker": "lines"}]', "holds tests with 'checker', whose meaning is not known"),
    ('[{"input": "", "output": "", "testtype": "interactive"}]', "of the kind 'interactive', which is none of"),
    ('[{"input": "1", "output": "2", "testtype": "functional"}]', "holds calls of a function, and names none"),
    ('[{"input": "a b", "output": "2", "fn_name": "f"}]', "whose arguments are no lines of JSON"),
    ('[{"input": "1", "output": "a b", "fn_name": "f"}]', "or whose result is none"),
    ('[{"input": {"a": 1}, "output": 1, "fn_name": "f"}]', "whose arguments are no list"),
    ('{"inputs": ["1"], "outputs": ["1", "2"]}', "holds 1 input and 2 outputs"),
    ('{"inputs": ["1"]}', "holds neither"),
    ('[{"input": "1", "output": "1"}, {"input": "1", "output": "1", "fn_name": "f"}]', "a program is only one of"),
])  # fmt: skip
def test_tests_that_no_program_could_fail_or_pass_are_refused(group, given, problem):
    whole = group([fence("x = 1")], id="p7")
    prompt = replace(whole.prompt, metadata={"tests": given})
    with pytest.raises(ValueError, match=f"the metadata field 'tests' of prompt 'p7' .*{problem}"):
        reward(tests_field="tests")(replace(whole, prompt=prompt))


@pytest.mark.parametrize(("test", "problem"), [
    ("assert isclose(area(2), 12.566)", "have the program judge its own answer, by a helper .*; import the helper"),
    ("assert sum([1, 2]) == 3", "use no name that a program could define; call the program there"),
])  # fmt: skip
def test_tests_that_pay_for_nothing_are_refused_when_the_data_are_scanned(group, test, problem):
    prompts = [group([""], answer=test if i in (1, 2) else ADD_TESTS, id=f"p{i}").prompt for i in range(4)]
    with pytest.raises(UserError) as refused:
        list(reported(specs({"code": KEYS}), "examine", prompts))
    assert re.match(
        "reward.code.tests_field: 2 of 4 prompts have tests that cannot be used; the answer of prompt 'p1' holds tests "
        f"that {problem}.*, got null; fix these prompts or leave them out$",
        str(refused.value),
    )
    with pytest.raises(ValueError, match=problem):
        reward()(group([fence("x = 1")], answer=test))


def test_tests_that_need_more_than_plain_data_are_counted_when_the_data_are_scanned(group):
    answers = [ADD_TESTS, "assert f(lambda x: x) == 3", "x = [1]\nf(x)\nassert x == []"]
    answers.append("assert f(sorted, len) == f(1)")
    prompts = [group([""], answer=answer, id=f"p{i}").prompt for i, answer in enumerate([*answers, answers[1]])]
    assert tuple(reported(specs({"code": KEYS}), "examine", prompts)) == (
        "reward.code: of 5 prompts with tests, "
        "1 compare answers of the program with each other or with its own constants alone (the first: 'p3'); "
        "2 hand the program a function, which cannot cross (the first: 'p1'); "
        "1 look for a change in place, and the program gets copies (the first: 'p2')",
    )
    assert list(reported(specs({"code": KEYS}), "examine", prompts[:1])) == []


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_a_plan_scans_the_tests_of_both_splits(split, tmp_path):
    for name in ("train", "held-out"):
        test = "assert near(f(1), 2)" if name == split else "assert f(lambda x: x) == 1"
        lines = [{"prompt": f"{name} {i}", "answer": test} for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"data.path={tmp_path}/train.jsonl", f"data.held_out_path={tmp_path}/held-out.jsonl"]
    with pytest.raises(UserError, match=r"^reward.code.tests_field: 8 of 16 prompts have tests that cannot be used"):
        resolve(compose(["+recipe=grpo_arithmetic", "reward=code", "data=jsonl", *files])).plan()


def test_metadata_can_hold_the_tests(group):
    whole = group([fence("print(input() * 2)")])
    tests = [MappingProxyType({"input": "ab", "output": "abab"})]
    prompt = replace(whole.prompt, metadata={"cases": tests})
    assert reward(tests_field="cases")(replace(whole, prompt=prompt)) == [1.0]


def test_bad_tests_stop_the_run_with_the_prompts_name(group):
    with pytest.raises(RewardError, match="the answer of prompt 'p7' holds no tests"):
        Scorer(specs({"code": KEYS}), 0, 30.0, "stop")([group([fence("x = 1")], answer="18", id="p7")])


def test_examples_of_every_kind_are_passed_by_right_programs_only(group):
    lines = (Path(__file__).parent / "code_mini.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    programs = [
        "def add(a, b):\n    return a + b",
        "import sys\nprint(sum(map(int, sys.stdin)))",
        "class Stack(list):\n    push, size = list.append, list.__len__",
        "def below_zero(operations):\n    from itertools import accumulate\n"
        "    return any(balance < 0 for balance in accumulate(operations))",
    ]
    for answer, program in zip(answers, programs, strict=True):
        assert scores(group, [program, "pass"], answer) == [1.0, 0.0]


# -- verdicts --------------------------------------------------------------------------------------------------------
ALWAYS_EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return Equal(9)
"""
HUNT_FOR_THE_TESTS = """
import gc, glob, sys
from pathlib import Path
def add(a, b):
    found = [o for o in gc.get_objects() if isinstance(o, str) and "assert add" in o]
    for path in glob.glob("/files/*") + glob.glob("/tmp/*"):
        found += [line for line in Path(path).read_text().splitlines() if "assert add(" in line]
    for frame in sys._current_frames().values():
        while frame:
            found += [v for v in frame.f_locals.values() if isinstance(v, str) and "assert add(" in v]
            frame = frame.f_back
    return eval(found[0].split("==")[1]) if found else None
"""
FORGE_THE_VERDICT = """
import os
for descriptor in range(64):
    for line in (b"passed\\n", b'["value", 5]\\n', b'"passed"\\n'):
        try:
            os.write(descriptor, line * 8)
        except OSError:
            pass
"""
SPEAK_FIRST = """
import os
def add(a, b):
    for descriptor in range(64):
        try:
            os.write(descriptor, b'["value", 6]\\npassed\\npassed\\n')
        except OSError:
            pass
    os._exit(0)
"""
PATCH_EVERYTHING = """
import builtins, json, sys, ast
builtins.AssertionError = type("AssertionError", (BaseException,), {})
builtins.compile = lambda *a, **k: (lambda: None).__code__
builtins.exec = lambda *a: None
json.dumps = lambda value: '["value", true]'
sys.modules["__main__"].pack = lambda value, keep: True
sys.modules["__main__"].FAILED = "passed"
def add(a, b): return None
"""
KILL_THE_OTHERS = """
import os, signal
for pid in list(range(1, 200)) + [os.getppid(), -1]:
    try:
        if pid != os.getpid(): os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
def add(a, b): return 6
"""
ASSERT_VERDICTS = [
    ("def add(a, b): return a + b", True, "right"),
    ("add = lambda a, b: a + b", True, "a lambda"),
    ("class add:\n    def __new__(cls, a, b): return a + b", True, "a class"),
    ("print('hello')\ndef add(a, b):\n    print('working')\n    return a + b", True, "it may print"),
    ("def add(a, b): return a + b\nif __name__ == '__main__': raise SystemExit(1)", True, "it is no main program here"),
    ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
     "def add(a, b): return P(a + b).x", True, "dataclasses"),
    ("def add(a, b): return a - b", False, "wrong"),
    ("def add(a, b): return 5", 0.5, "right once"),
    ("def sub(a, b): return a + b", False, "another name"),
    ("def add(a, b) return a + b", False, "no Python"),
    ("def add(a, b): raise ValueError", False, "raises"),
    ("def add(a, b):\n    while True: pass", False, "never returns"),
    ("def add(a, b): return add(a, b)", False, "recursion without end"),
    ("import sys; sys.exit(0)", False, "ends with success before the tests"),
    ("import os; os._exit(0)", False, "ends at once with success"),
    ("exit()", False, "ends with success"),
    ("def add(a, b):\n    import os; os._exit(0)", False, "ends with success in the middle of a test"),
    ("def add(a, b): raise SystemExit(0)", False, "ends with success in the middle of a test"),
    ("import atexit, os\natexit.register(os._exit, 0)", False, "ends with success at exit"),
    ("print('passed\\npassed')\ndef add(a, b): print('passed', flush=True)", False, "prints the verdict"),
    ("import sys\nsys.stderr.write('passed\\npassed\\n')", False, "prints the verdict to stderr"),
    (FORGE_THE_VERDICT, False, "writes verdicts to every descriptor"),
    (SPEAK_FIRST, False, "answers for all calls to come, and ends"),
    (ALWAYS_EQUAL, False, "returns what equals everything"),
    ("class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()", False, "the same, no number"),
    ("from unittest.mock import ANY\ndef add(a, b): return ANY", False, "returns the library's own equal-to-all"),
    ("import builtins\nbuiltins.AssertionError = Exception", False, "replaces what assert raises"),
    (PATCH_EVERYTHING, False, "patches what it shares with the tests' side"),
    ("import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = print", False, "hooks"),
    (HUNT_FOR_THE_TESTS, False, "looks for the tests in files, memory and frames"),
    (KILL_THE_OTHERS, False, "kills whatever it can"),
    ("import os\nif os.fork(): os._exit(0)\ndef add(a, b): return a + b", False, "goes on in a child only"),
    ("import os\ndef add(a, b):\n    if os.fork(): os._exit(0)\n    return a + b", False, "answers in a child only"),
    ("def add(a, b): return __import__('itertools').count()", False, "everything in turn"),
    ("def add(a, b):\n    x = []\n    x.append(x)\n    return x", False, "a list that holds itself"),
    ("def add(a, b): return 'x' * 10**9", False, "an answer too large"),
    ("class N(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n    __module__ = 'builtins'\n"
     "def add(a, b): return N(7)", False, "a number that equals everything"),
    ("def add(a, b): raise StopIteration", False, "ends the tests' loops"),
    ("raise AssertionError", False, "raises at once"),
    ("", False, "nothing"),
]  # fmt: skip


PAIR_VERDICTS = [
    ("print(2 * int(input()))", True, "right"),
    ("import sys\nsys.stdout.write(str(2 * int(sys.stdin.read())) + '   \\n\\n')", True, "white space at the end"),
    ("if __name__ == '__main__':\n    print(2 * int(input()))\n    exit()", True, "a main program"),
    ("print(int(input()) ** 2)", 0.5, "right once"),
    ("print(2 * int(input()), 'is the answer')", False, "more than the answer"),
    ("print(4, -6, sep='\\n')", False, "all answers"),
    ("print(2 * int(input())); raise SystemExit(1)", False, "right, then fails"),
    ("print(2 * int(input()), flush=True)\nwhile True: pass", False, "right, then never ends"),
    ("print(2 * int(input()))\nimport os; os.kill(os.getpid(), 9)", False, "right, then dies"),
    ("import glob\nprint(*[open(p).read() for p in glob.glob('/files/*')])", False, "looks for the expected output"),
    ("while True: print(4)", False, "the answer over and over"),
    ("", False, "nothing"),
]


VERDICTS = [*((ADD_TESTS, *case) for case in ASSERT_VERDICTS), *((DOUBLE_TESTS, *case) for case in PAIR_VERDICTS)]


@pytest.mark.parametrize(("tests", "program", "score", "why"), VERDICTS, ids=[why for *_, why in VERDICTS])
def test_verdicts(group, tests, program, score, why):
    seconds = 0.5 if why == "never returns" else 2.0  # that is wrong however little time it has
    assert scores(group, [program], tests, score="fraction", cpu_seconds=1, seconds=seconds) == [float(score)]


HELPERS = """
class math:
    isclose = staticmethod(lambda *a, **k: True)
class Chameleon:
    def __ne__(self, other): return True
    def __bool__(self): return False
    def __len__(self): return 3
def area(r): return Chameleon()
"""


@pytest.mark.parametrize(("test", "right"), [
    ("assert math.isclose(area(2), 12.566, rel_tol=1e-4)", "import math\ndef area(r): return math.pi * r**2 + 2e-10"),
    ("assert area(2) != 5", "def area(r): return 4"),
    ("assert not area(2)", "def area(r): return []"),
    ("assert len(area(2)) == 3", "def area(r): return [1, 2, 3]"),
])  # fmt: skip
def test_nothing_is_paid_for_helpers_and_operators_of_the_programs(group, test, right):
    assert scores(group, [HELPERS, right], test) == [0.0, 1.0]


TWO_SUM = """class Solution:
    def two_sum(self, nums: List[int], target: int) -> List[int]:
        at = defaultdict(lambda: -1)
        for i, n in enumerate(nums):
            if at[target - n] >= 0:
                return [at[target - n], i]
            at[n] = i
"""


FUNCTIONAL = [{"input": "[2, 7, 11]\n9", "output": "[0, 1]", "testtype": "functional", "fn_name": "two_sum"}]


def called(argument, result):
    return {"fn_name": "f", "inputs": [[argument]], "outputs": [result]}


FORMS = [  # (tests, [(program, its score)])
    (FUNCTIONAL, [
        (TWO_SUM, 1), (TWO_SUM.replace("List", "list"), 1), ("def two_sum(a, b): return (0, 1)", 1),
        (TWO_SUM.replace("i]", "0]"), 0),
    ]),
    ({"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}, [
        ("def f(a, b): return a + b", 1), ("def f(a, b): return str(a + b)", 0), ("def g(a, b): return a + b", 0),
        ("f = 3", 0),
    ]),
    (called({"1": 5}, 5), [("def f(d): return d[1]", 1)]),
    (called(5000, 5000), [("def f(n): return 0 if n == 0 else 1 + f(n - 1)", 1)]),
    (called(1, True), [("def f(x): return x == 1", 1), ("def f(x): return [x]", 0)]),
    (called(1, [1, 2]), [
        ("def f(x): return [1, 2]", 1),
        ("class A(list):\n    def __eq__(self, other): return True\ndef f(x): return A()", 0),
        ("def f(x):\n    yield 1\n    yield 2", 0),
        ("def f(x): return 1", 0),
        ("import os\ndef f(x): os._exit(0)", 0),
    ]),
    ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [("print(int(input()) + int(input()))", 1), ("print(12)", 0)]),
    (["assert only([1, 'a'], int) == [1]", "assert kind(2) == int", "assert kind('a') is str"], [
        ("def kind(x): return type(x)\ndef only(xs, t): return [x for x in xs if isinstance(x, t)]", 1),
        ("kind = only = lambda *x: eval", 0),
    ]),
]  # fmt: skip


@each(("tests", "programs"), FORMS)
def test_verdicts_by_the_forms_of_data_sets(group, tests, programs):
    assert scores(group, [program for program, _ in programs], json.dumps(tests)) == [score for _, score in programs]


def test_setup_code_may_build_objects_of_the_program(group):
    program = (
        "class Node:\n    def __init__(self, value): self.left = None\n"
        "def depth(node): return 0 if node is None else 1 + depth(node.left)"
    )
    made = group([fence(program), fence(program.replace("1 +", "2 +"))], answer='["assert depth(root) == 2"]')
    prompt = replace(made.prompt, metadata={"setup": "root = Node(1)\nroot.left = Node(2)"})
    assert reward(setup_field="setup")(replace(made, prompt=prompt)) == [1.0, 0.0]


@each(("printed", "expected", "tolerance", "same"), [
    ("0.50", "0.5", 0.0, True), ("5.0", "5", 0.0, True), ("1e3", "1000", 0.0, True), ("1 2.0", "1  2", 0.0, True),
    (" 1", "1", 0.0, True), ("nan", "nan", 0.0, True), ("a 0.50", "a 0.5", 0.0, False),
    ("0.51", "0.5", 0.0, False), ("0.5000001", "0.5", 0.0, False), ("0.5000001", "0.5", 1e-6, True),
    ("0.50001", "0.5", 1e-6, False), ("1000000.5", "1000000.0", 1e-6, True), ("1000001", "1000000", 1e-3, False),
    ("4", "3", 1.0, False), ("inf", "1.0", 1.0, False), ("0.5 0.5", "0.5", 0.0, False), ("1_0", "10", 0.0, False),
    ("1e9999", "2.0", 1e-6, False), ("9" * 401, "1.0", 1e-6, False),
])  # fmt: skip
def test_numbers_that_are_printed_are_compared_by_value(printed, expected, tolerance, same):
    assert code.same_output(printed, expected, tolerance) is same


def test_a_tolerance_is_for_results_of_calls_too(group):
    tests = json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [0.3333333, [0.6666667]]})
    programs = ["def f(x): return x / 3", "def f(x): return x / 3 + 0.01"]
    assert scores(group, programs, tests) == [0.0, 0.0]
    assert scores(group, programs, tests, tolerance=1e-6) == [1.0, 0.0]


def test_all_wants_every_test_and_those_passed_before_the_deadline_count_as_a_fraction(group):
    assert scores(group, ["def add(a, b): return 5"], ADD_TESTS, score="all") == [0.0]
    program = "def add(a, b):\n    while a < 0: pass\n    return a + b"
    assert scores(group, [program], ADD_TESTS, score="fraction", seconds=1.0) == [0.5]


def test_scores_stay_with_their_completions_whichever_is_done_first(group):
    programs = ["import time; time.sleep(0.5)\ndef add(a, b): return a + b", "", "def add(a, b): return a + b", "1/0"]
    assert scores(group, programs, ADD_TESTS, workers=4) == [1.0, 0.0, 1.0, 0.0]


# -- limits ----------------------------------------------------------------------------------------------------------
def test_programs_of_a_large_group_share_the_scorers_time(group):
    made = reward(group_timeout=5.0, workers=2, seconds=2.0)
    # Two at a time: 4 programs have (5 - 1) / 2 = 2 s each, 8 have (5 - 1) / 4 = 1 s.
    assert [made.limits(n).seconds for n in (1, 4, 8)] == [2.0, 2.0, 1.0]
    # What others have not used is left: the last 2 of 8 after 1 s have (5 - 1 - 1) / 1 s, but no more than `seconds`.
    assert [made.limits(n, passed_s=1.0).seconds for n in (2, 6, 8)] == [2.0, 1.0, 0.75]
    assert made.limits(1, passed_s=9.0).seconds == 0.0


def test_processor_time_is_limited_and_waiting_is_not(group):
    waits = "import time\ntime.sleep(1.1)\ndef add(a, b): return a + b"
    works = "while True: pass"
    assert scores(group, [waits, works], ADD_TESTS, seconds=20.0, cpu_seconds=1) == [1.0, 0.0]
    assert 5 * KEYS["cpu_seconds"] <= SHIPPED_SECONDS, "a machine that is five times too busy ends no program"


def test_a_group_of_programs_that_never_end_stays_within_the_scorers_time(group):
    texts = [fence("def add(a, b):\n    while True: pass")] * 3 + [fence("def add(a, b): return a + b")]
    score = Scorer(specs({"code": {**KEYS, "group_timeout": 2.5}}), 0, 2.5, "stop")
    assert score([group(texts, answer=ADD_TESTS)]).total.tolist() == [[0.0, 0.0, 0.0, 1.0]]


def test_a_timeout_that_leaves_no_time_is_refused():
    with pytest.raises(UserError, match=r"group_timeout: must be more than 1 s, .* got 1.0; set scoring.timeout=10"):
        reward(group_timeout=1.0)


@pytest.fixture
def nothing_isolates(monkeypatch):
    monkeypatch.setattr(bubblewrap, "available", lambda: (Isolation.none, "bubblewrap is not installed"))


@pytest.mark.usefixtures("nothing_isolates")
def test_unisolated_programs_are_refused_before_anything_is_loaded():
    with pytest.raises(UserError) as refused:
        specs({"code": KEYS})
    assert str(refused.value).startswith(
        "reward.code.allow_unsafe: programs that a model wrote would run unisolated here (bubblewrap is not installed)"
        ", got false; install bubblewrap 0.7 or newer (apt install bubblewrap, dnf install bubblewrap; "
    )
    strict = r"^isolation: .*would run unisolated here .*, got strict; .* or set isolation=s"
    with pytest.raises(UserError, match=strict):
        reward(isolation="strict", allow_unsafe=True)


@pytest.mark.usefixtures("nothing_isolates")
def test_unisolated_programs_run_where_that_is_allowed_and_the_note_says_so(group):
    assert scores(group, ["def add(a, b): return a + b", ""], ADD_TESTS, allow_unsafe=True) == [1.0, 0.0]
    assert scores(group, ["print(2 * int(input()))", ""], DOUBLE_TESTS, allow_unsafe=True) == [1.0, 0.0]
    note = reward(allow_unsafe=True).note()
    assert note.startswith("programs are NOT isolated: programs run with this user's rights")
    assert note.endswith("(bubblewrap is not installed)")


def test_the_note_says_which_isolation_is_active_and_what_bounds_memory():
    note = reward(allow_unsafe=True).note()
    assert note.startswith("programs are isolated by bubblewrap ")
    assert note.endswith("; all memory is bounded by resource limits and a system-call filter")
    assert "; all memory is bounded by " in reward(isolation="strict").note()


@pytest.fixture
def no_bound(monkeypatch):
    """No filter."""
    bubblewrap.memory_bound.cache_clear()
    monkeypatch.setattr(bubblewrap, "system_call_filter", lambda: None)
    yield
    bubblewrap.memory_bound.cache_clear()


@pytest.mark.usefixtures("no_bound")
def test_what_is_not_bounded_is_named(group):
    held = "System V shared memory, memfds, descriptors in flight"
    assert f"; memory is NOT bounded: {held} can be held besides what processes are limited to" in reward().note()
    assert scores(group, ["def add(a, b): return a + b"], ADD_TESTS) == [1.0]
    with pytest.raises(UserError, match=r"^isolation: memory is NOT bounded: .*, got strict; .* or set it to standard"):
        reward(isolation="strict")


def test_a_sandbox_that_breaks_stops_the_run(group, monkeypatch):
    broken = ["/bin/sh", "-c", "echo broken >&2; exit 1", "sh"]
    monkeypatch.setattr(code.bubblewrap, "prefix", lambda *arguments: broken)
    with pytest.raises(RewardError, match=r"raised SandboxError: a program could not be started .*\(broken\)"):
        Scorer(specs({"code": KEYS}), 0, 30.0, "stop")([group([fence("x = 1")], answer=ADD_TESTS)])


CHECK = "def check(candidate):\n    {}\ncheck(f)"
STACK = "stack = Stack()\nstack.push(3)\n"

DOUBTS = {
    None: [
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
    ],
    Doubt.own_judge: [
        "assert isclose(area(2), 12.566)", "answer = area(2)\nassert isclose(answer, 12.566)",
        "assert not differ(f(1), 3)", "assert max_diff(f(2), 4) < 1e-6", "assert max_diff(f(2), 4) == 0",
        "assert isclose(f(2), 3) is True", "assert isclose(f(2), 3) and isclose(f(3), 4)",
        "assert f(2) == 3 or isclose(f(2), 3)", "assert np.allclose(f(2), [1, 2])",
        "solution = Solution()\nassert solution.isclose(solution.area(2), 12.5)", "assert is_sorted(sort([2, 1]))",
        "assert all(isclose(f(x), y) for x, y in [(1, 2)])", "if not isclose(f(2), 3):\n    raise AssertionError",
        CHECK.format("assert isclose(candidate(2), 3)"),
    ],
    Doubt.nothing: ["assert 1 == 1", "assert sum([1, 2]) == 3", "assert math.sqrt(4) == 2"],
    Doubt.itself: ["assert f(2) == g(2)", "assert f() == RED"],
    Doubt.function: [
        "assert f(lambda x: x) == 3", "assert f(key=lambda x: x) == 3", "def k(a): return a\nassert f(k, 1) == 2",
    ],
    Doubt.in_place: ["x = [2, 1]\nf(x)\nassert x == [1, 2]"],
    Doubt.operators: [
        STACK + use for use in (
            "assert len(stack) == 1", "assert stack[0] == 3", "assert not stack", "assert stack == [3]",
            "for x in stack: assert x", "assert 3 in stack", "assert list(stack) == [3]",
            "assert [x for x in stack] == [3]",
        )
    ],
}  # fmt: skip


@each(("doubt", "source"), [(doubt, source) for doubt, sources in DOUBTS.items() for source in sources])
def test_doubtful_tests_are_named_and_sound_ones_are_left_alone(doubt, source):
    assert doubts(source) == {doubt} - {None}
