"""The share of tests that the program in a completion passes, or whether it passes all; the program is untrusted.

Tests compare what the program prints, or call it; they are in a field of the prompt's metadata or in its answer, in the
forms of the data sets that publish them:

    [{"input": "2 3", "output": "5"}, ...]         stdin and stdout, as text or as a list of lines
    {"inputs": [...], "outputs": [...]}            the same in columns (APPS, TACO, CodeContests)
    ... with a function's name                     calls: `fn_name` (APPS, TACO), `testtype: functional` (LiveCodeBench)
    ["assert add(2, 3) == 5", ...] or one text     Python that calls the program (MBPP, HumanEval)

Arguments of a call are a list, or a text with a line of JSON for each (LiveCodeBench). What else a test says is refused
by its name: a test that is half understood would judge something else.

No test shares a process with the program, and expected results never enter its sandbox: there is nothing that it could
end, patch, print, overload or read to pass (system/sandbox/protocol.py). A test shares only plain data with the
program. So it proves nothing if the program judges itself: if an `assert` is decided by a function of the program that
gets the program's own answer, as in `assert isclose(area(2), 12.566)` without an import of `isclose`. And no program
can pass a test that needs an operator on one of the program's objects, passes a function to the program, or looks for a
change in place. Tests are not run, so only some faults are found in their source: those that are reported exist, and
there may be others.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import subprocess
import textwrap
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from enum import StrEnum
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, ClassVar

from rlft.config.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from rlft.system.process.running_time import TICK_S, RunningTime
from rlft.system.sandbox import bubblewrap, protocol
from rlft.system.sandbox.bubblewrap import Isolation, Limits, Reason, Required, check_isolation
from rlft.system.sandbox.protocol import missing_names
from rlft.tokens.answers import Block, blocks, tagged
from rlft.tokens.reasoning import without_reasoning
from rlft.types import Group, Prompt, UserError, counted, require

SPARE_S = 1.0  # part of the scorer's time limit that is not for the programs themselves

_PYTHON = ("python", "python3", "py")
_MARKDOWN = ("markdown", "md")
_READS_INPUT = re.compile(r"\b(?:input|stdin|fileinput)\b|\bopen\(\s*0")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}\.?[0-9]{0,400}|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")


class ProgramIn(StrEnum):
    """Where a completion puts its program."""

    fence = "fence"
    tag = "tag"
    text = "text"


class Score(StrEnum):
    """What a program gets: 1 if it passes every test (else 0), or the share of tests that it passes."""

    all = "all"
    fraction = "fraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """1.0 (or the share of tests passed) for each completion whose program passes its tests, else 0.0.

    The limits `cpu_seconds` to `file_bytes` are for each test by stdin, or for all other tests together. When called,
    it raises ValueError for tests that no program could pass.
    """

    metadata_keys: ClassVar[tuple[str, ...]] = ("tests_field", "entry_field", "setup_field", "prefix_field")

    program_in: ProgramIn
    tag: str
    tests_field: str | None
    score: Score
    workers: PositiveInt
    group_timeout: PositiveFloat
    seconds: PositiveFloat
    cpu_seconds: PositiveInt
    memory_bytes: PositiveInt
    output_bytes: PositiveInt
    processes: PositiveInt
    file_bytes: PositiveInt
    isolation: Required
    allow_unsafe: bool
    entry_field: str | None = None
    setup_field: str | None = None
    prefix_field: str | None = None
    tolerance: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        problem, got = f"must be more than {SPARE_S:g} s, which starting and comparing may take", self.group_timeout
        require(got > SPARE_S, "group_timeout", problem, got=got, remedy="set scoring.timeout=10")
        check_isolation(self.isolation, allow_unsafe=self.allow_unsafe)

    def note(self) -> str:
        """Which isolation is active and what bounds memory, reported when a run starts."""
        isolation, what = bubblewrap.available()
        more = f" ({what})" if isolation is Isolation.none else f"; {bubblewrap.memory_bound()[1]}"
        return f"programs are {isolation.sentence}{more}"

    def __call__(self, group: Group) -> list[float]:
        tests, isolation = self._tests(group.prompt), bubblewrap.available()[0]
        programs = [self.program(rollout.completion.text, group.prompt, tests) for rollout in group.rollouts]
        clock, lock, to_run = RunningTime(), threading.Lock(), len(programs)

        def scored(program: str | None) -> float:
            nonlocal to_run
            with lock:
                limits, to_run = self.limits(to_run, passed_s=clock()), to_run - 1
            passed = 0 if program is None else num_passed(program, tests, limits, isolation, self.tolerance)
            return passed / len(tests) if self.score is Score.fraction else float(passed == len(tests))

        with ThreadPoolExecutor(self.workers) as threads:
            futures = [threads.submit(scored, program) for program in programs]
            while wait(futures, timeout=TICK_S).not_done:
                with lock:
                    clock.since_last()
            return [future.result() for future in futures]

    def examine(self, prompts: Sequence[Prompt]) -> str | None:
        """What may be wrong with the tests of these prompts. UserError: no program could pass some, or any would."""
        refused: list[str] = []
        doubtful: dict[Doubt, list[str]] = {}
        for prompt in prompts:
            try:
                tests = self._tests(prompt)
            except ValueError as error:
                refused.append(str(error))
                continue
            for doubt in {doubt for test in tests if isinstance(test, str) for doubt in doubts(test)}:
                doubtful.setdefault(doubt, []).append(prompt.id)
        if refused:
            problem = f"{len(refused)} of {len(prompts)} prompts have tests that cannot be used; {refused[0]}"
            remedy = "fix these prompts or leave them out"
            raise UserError("tests_field", problem, got=self.tests_field or "null", remedy=remedy)
        notes = [f"{len(ids)} {doubt.value} (the first: {ids[0]!r})" for doubt, ids in sorted(doubtful.items())]
        return f"of {len(prompts)} prompts with tests, {'; '.join(notes)}" if notes else None

    def program(self, text: str, prompt: Prompt, tests: Tests) -> str | None:
        """The program in a completion for this prompt, behind the code that it continues; None if there is none."""
        program = self.extract(text, wanted_by(tests))
        prefix = "" if self.prefix_field is None else lines_of(prompt.metadata.get(self.prefix_field) or "")
        return program if program is None or not prefix.strip() else continued(prefix, program)

    def extract(self, text: str, wanted: re.Pattern[str] | None = None) -> str | None:
        """The program in a completion, or None if there is none. Among blocks, the last that is `wanted` counts."""
        match self.program_in:
            case ProgramIn.fence:
                program = fenced(without_reasoning(text), wanted)
            case ProgramIn.tag:
                program = next(reversed(list(tagged(without_reasoning(text), self.tag))), None)
                program = program and (fenced(program, wanted) or program)
            case _:
                program = without_reasoning(text)
                program = text if program == text else program.lstrip(" ")
        return program if program and program.strip() else None

    def limits(self, num_programs: int, passed_s: float = 0.0) -> Limits:
        """The limits of the next of `num_programs` programs that are still to run, so long after the group's first."""
        left = self.group_timeout - SPARE_S - passed_s
        return Limits.of(self, max(0.0, min(self.seconds, left / math.ceil(num_programs / self.workers))))

    def _tests(self, prompt: Prompt) -> Tests:
        entry, setup = (field and prompt.metadata.get(field) for field in (self.entry_field, self.setup_field))
        return prompt_tests(prompt, self.tests_field, entry=function_in(entry), setup=lines_of(setup or ""))


def fenced(text: str, wanted: re.Pattern[str] | None = None) -> str | None:
    """The program in the fenced blocks of a text; None if there is none.

    Closed blocks have priority over one that goes on to the end of the text, those of Python over those that name no
    language. The last one counts in which `wanted` is found, or else the last one: programs are followed by examples of
    their use.
    """
    by_kind: dict[tuple[bool, bool], list[str]] = {}
    for block in _inner_blocks(text):
        if not block.language or block.language in _PYTHON:
            by_kind.setdefault((block.is_closed, bool(block.language)), []).append(block.text)
    found = by_kind[max(by_kind)] if by_kind else []
    useful = [program for program in found if wanted is not None and wanted.search(program)]
    return next(reversed(useful or found), None)


def _inner_blocks(text: str) -> Iterator[Block]:
    """The blocks of a text; of one that is Markdown, or that begins with a block of Python, those in it."""
    for block in blocks(text):
        inner = list(blocks(block.text)) if block.language in ("", *_MARKDOWN) else []
        is_outer = block.text.lstrip().startswith(("```", "~~~")) and any(each.language in _PYTHON for each in inner)
        yield from inner if is_outer or block.language in _MARKDOWN else (block,)


def wanted_by(tests: Tests) -> re.Pattern[str]:
    """What is found in programs for such tests, and not in examples of their use: that they read stdin, or define."""
    if isinstance(tests[0], Pair):
        return _READS_INPUT
    names = {name for test in tests if not isinstance(test, Pair) for name in names_called(test)}
    either = "|".join(map(re.escape, sorted(names))) or "(?!)"
    return re.compile(rf"(?m)^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(?:{either})\b|^(?:{either})[ \t]*=")


def continued(prefix: str, program: str) -> str:
    """The program behind the code that it continues: in the middle of a line, as a body, or as a whole again."""
    body = prefix if prefix.endswith("\n") else f"{prefix}\n"
    indented = f"{body}    {program.lstrip()}", body + textwrap.indent(program, "    ")
    forms = (prefix + program, body + program, program, *indented)
    return next(filter(_compiles, forms), prefix + program)


def _compiles(program: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(program, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False
    return True


def same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    r"""Whether two outputs have the same lines, except for white space at the end of lines and empty lines at the end.

    Lines of numbers are the same if these have the same values, those with a point up to the tolerance.

    >>> same_output("1 2 \n3\n\n", "1 2\n3"), same_output("a  b", "a b"), same_output("0.50  2", "0.5 2.0")
    (True, False, True)
    >>> same_output("0.3333", "0.333333"), same_output("0.3333", "0.333333", 1e-3), same_output("3", "4", 1.0)
    (False, True, False)
    """
    lines, due = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return len(lines) == len(due) and all(
        line == other or _same_numbers(line.split(), other.split(), tolerance)
        for line, other in zip(lines, due, strict=True)
    )


def _same_numbers(printed: list[str], expected: list[str], tolerance: float) -> bool:
    if len(printed) != len(expected) or not all(map(_NUMBER.fullmatch, (*printed, *expected))):
        return False
    for one, other in zip(printed, expected, strict=True):
        value, due = Decimal(one), Decimal(other)
        is_whole = not set(other) & set(".eE")
        if value != due and (is_whole or abs(value - due) > Decimal(tolerance) * max(1, abs(due))):
            return False
    return True


def prompt_tests(prompt: Prompt, field: str | None, *, entry: str = "", setup: str = "") -> Tests:
    """The prompt's tests, as `parse_tests`. ValueError, with the prompt's id, if no program could be judged by them."""
    where = "answer" if field is None else f"metadata field {field!r}"
    answers = [prompt.answer, *prompt.other_answers] if prompt.other_answers else prompt.answer
    tests = answers if field is None else prompt.metadata.get(field)
    try:
        return parse_tests(tests, entry=entry, setup=setup)
    except ValueError as error:
        raise ValueError(f"the {where} of prompt {prompt.id!r} {error}") from None


def num_passed(program: str, tests: Tests, limits: Limits, isolation: Isolation, tolerance: float = 0.0) -> int:
    """The number of tests that the program passes within its limits."""
    if not isinstance(tests[0], Pair):
        return _num_calls_passed(program, tests, limits, isolation, tolerance)
    clock, passed, files = RunningTime(), 0, {"program.py": program}
    for test in tests:
        left = replace(limits, seconds=limits.seconds - clock())
        if isinstance(test, Pair) and left.seconds > 0:
            result = bubblewrap.run(files, ["program.py"], left, isolation, stdin=test.input, clock=clock)
            has_ended = result.reason is Reason.exited and result.exit_code == 0
            passed += has_ended and same_output(result.stdout, test.output, tolerance)
    return passed


def _num_calls_passed(program: str, tests: Tests, limits: Limits, isolation: Isolation, tolerance: float) -> int:
    """Runs program and tests in a sandbox each, connected by two pipes; the verdicts are in the tests' stdout."""
    source = Path(protocol.__file__).read_text(encoding="utf-8")
    program_files = {"protocol.py": source, "program.py": program}
    role = "solution" if isinstance(tests[0], Call) else "program"
    written = [
        protocol.call_test(**asdict(test), tolerance=tolerance) if isinstance(test, Call) else test for test in tests
    ]
    test_files = {"protocol.py": source, "tests.json": json.dumps(written)}
    # What only the processes need is closed here, so that each notices when the other has ended.
    (request_reader, request_writer), (answer_reader, answer_writer) = Pipe(duplex=False), Pipe(duplex=False)
    with request_reader, request_writer, answer_reader, answer_writer:
        arguments = ["protocol.py", role, "program.py"]
        streams: dict[str, Any] = {"stdin": request_reader, "stdout": answer_writer}
        with bubblewrap.running(program_files, arguments, limits, isolation, **streams):
            request_reader.close()
            answer_writer.close()
            requests = request_writer.fileno()
            arguments = ["protocol.py", "tests", "tests.json", str(requests)]
            streams = {"stdin": answer_reader, "stdout": subprocess.PIPE, "pass_fds": [requests]}
            with bubblewrap.running(test_files, arguments, limits, isolation, **streams) as process:
                answer_reader.close()
                request_writer.close()
                verdicts = bubblewrap.collect(process, limits).stdout
    return verdicts.split("\n").count(protocol.PASSED)


# -- tests -------------------------------------------------------------------------------------------------------------
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

    The arguments are plain data of JSON; each of the results is right.
    """

    function: str
    arguments: list[Any]
    results: list[Any]


Tests = list[Pair] | list[Call] | list[str]


def parse_tests(value: Any, *, entry: str = "", setup: str = "") -> Tests:
    """Tests from a list, from columns, or from text: JSON of these, or else a test in Python.

    `entry` is the function that is tested, where the tests do not name it; `setup` stands before each test in Python.
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
        num_inputs, num_outputs = (max(length, 0) for length in lengths)
        raise ValueError(f"holds {counted(num_inputs, 'input')} and {counted(num_outputs, 'output')}")
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
    if _only_defines(test):
        problem = "holds a test that only defines things, and would be passed by every program; call them, as in "
        raise ValueError(f"{problem}check(add): {test!r:.80}")
    for doubt in doubts(test) & set(REFUSED):
        raise ValueError(f"holds tests that {doubt.value}; {REFUSED[doubt]}: {test!r:.80}")
    return test


def _only_defines(test: str) -> bool:
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"holds a test that is not Python ({error}): {test!r:.80}") from None
    return all(isinstance(statement, _DEFINITIONS) for statement in statements)


# -- what is wrong with them -------------------------------------------------------------------------------------------
PLAIN = (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, range)
PLAIN_ATTRIBUTES = frozenset(name for kind in PLAIN for name in dir(kind))
MEASURES = {"len", "list", "tuple", "set", "sorted", "sum", "min", "max", "str", "repr", "abs", "bool", "iter"}
TRIVIAL = (0, 1, "", None)  # includes True and False, which helpers return if all is well


class Doubt(StrEnum):
    """What may be wrong with tests, in words that follow the number of such tests."""

    nothing = "use no name that a program could define"
    own_judge = "have the program judge its own answer, by a helper that they neither define nor import"
    itself = "compare answers of the program with each other or with its own constants alone"
    operators = "use an operator, len() or a loop on an object of the program, which answers methods only"
    function = "hand the program a function, which cannot cross"
    in_place = "look for a change in place, and the program gets copies"


REFUSED = {
    Doubt.nothing: "call the program there",
    Doubt.own_judge: "import the helper there, as in from math import isclose",
}
"""{doubt that makes a test worthless: what to do}."""


@functools.lru_cache(65536)
def doubts(source: str) -> frozenset[Doubt]:
    """What may be wrong with a test in Python. SyntaxError if it is not Python.

    >>> [doubt.name for doubt in doubts("assert isclose(area(2), 12.566)")]
    ['own_judge']
    """
    tree = ast.parse(source)
    names = missing_names(source)[1]
    if not names:
        return frozenset({Doubt.nothing})
    reader, nodes = Reader(tree, names), list(ast.walk(tree))
    result = {doubt for node in nodes for doubt in reader.doubts_at(node)}
    # What decides whether the test is passed: its asserts, and conditions under which it raises.
    raising = [node for node in nodes if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)]
    verdicts = [node.test for node in (*raising, *(node for node in nodes if isinstance(node, ast.Assert)))]
    if verdicts and all(reader.judges_itself(verdict) for verdict in verdicts):
        result.add(Doubt.own_judge)
    return frozenset(result)


class Reader:
    """What is known about a test's names."""

    def __init__(self, tree: ast.AST, names: set[str]) -> None:
        nodes = list(ast.walk(tree))
        defined = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        parameters = {a.arg for f in defined for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)}
        parameters &= {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        self.callables = names | parameters  # the program's names, and parameters that are called: they may hold one
        self.functions = {f.name for f in defined if not isinstance(f, ast.Lambda)}
        self.answers: dict[str, set[str]] = {}  # {variable with an answer of the program: the callables it comes from}
        self.objects: set[str] = set()  # variables that hold an object of the program
        for _ in range(2):  # twice, since a loop may use a variable before the line that sets it
            for node in nodes:
                self._read(node)

    def doubts_at(self, node: ast.AST) -> Iterator[Doubt]:
        match node:
            case ast.Call() if self.callee(node) and any(self._is_function(a) for a in arguments(node)):
                yield Doubt.function
            case ast.Call(func=ast.Name(id=name)) if name in MEASURES and any(map(self._is_object, arguments(node))):
                yield Doubt.operators
            case ast.Compare(left=left, ops=operators, comparators=others):
                sides = [left, *others]
                if any(map(self._is_object, sides)) and not all(isinstance(o, ast.Is | ast.IsNot) for o in operators):
                    yield Doubt.operators
                if all(self.sources(side) for side in sides):
                    yield Doubt.itself
            case ast.Subscript(value=value) | ast.For(iter=value) | ast.comprehension(iter=value):
                if self._is_object(value):
                    yield Doubt.operators
            case ast.Assert(test=value) | ast.UnaryOp(op=ast.Not(), operand=value) if self._is_object(value):
                yield Doubt.operators
            case ast.Expr(value=ast.Call() as call) if self._changes_arguments(call):
                yield Doubt.in_place

    def judges_itself(self, verdict: ast.expr) -> bool:
        """Whether the verdict comes from a program's function that gets the program's own answer.

        It does not if the function's result is compared with something that the program cannot guess.
        """
        if isinstance(verdict, ast.UnaryOp) and isinstance(verdict.op, ast.Not):
            return self.judges_itself(verdict.operand)
        if isinstance(verdict, ast.BoolOp):
            combined = all if isinstance(verdict.op, ast.And) else any
            return combined(self.judges_itself(value) for value in verdict.values)
        if isinstance(verdict, ast.Compare):
            sides = [verdict.left, *verdict.comparators]
            telling = any(isinstance(op, ast.Eq | ast.Is | ast.In) for op in verdict.ops)
            told = [side for side in sides if not (isinstance(side, ast.Constant) and side.value in TRIVIAL)]
            if telling and not all(map(self.sources, told)):
                return False
        return any(self._is_own_judge(node) for node in ast.walk(verdict) if isinstance(node, ast.Call))

    def sources(self, expression: ast.AST) -> set[str]:
        """The program's names on which an expression's value depends; none if the test itself knows the value."""
        names: set[str] = set()
        for node in ast.walk(expression):
            if isinstance(node, ast.Call):
                names |= {name for name in [self.callee(node)] if name}
            elif isinstance(node, ast.Name):
                names |= self.answers.get(node.id, set())
                names |= {node.id} & self.callables
        return names

    def callee(self, call: ast.Call) -> str | None:
        """The name of the called function, class or method if it belongs to the program, else None."""
        match call.func:
            case ast.Name(id=name):
                return name if name in self.callables else None
            case ast.Attribute(value=value, attr=name) if name not in PLAIN_ATTRIBUTES and self.sources(value):
                return name
        return None

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                targets = [target]
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                targets = [target]
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                if name in self.answers and attribute not in PLAIN_ATTRIBUTES:
                    self.objects.add(name)
                return
            case _:
                return
        if sources := self.sources(value):
            for name in [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]:
                self.answers[name] = self.answers.get(name, set()) | sources

    def _is_object(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.objects

    def _is_function(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Lambda) or (isinstance(node, ast.Name) and node.id in self.functions)

    def _is_own_judge(self, call: ast.Call) -> bool:
        name = self.callee(call)
        return name is not None and any(self.sources(argument) - {name} for argument in arguments(call))

    def _changes_arguments(self, call: ast.Call) -> bool:
        """Whether a function is called only for what it does to a variable."""
        plain = isinstance(call.func, ast.Name) and self.callee(call) is not None
        variables = [a.id for a in arguments(call) if isinstance(a, ast.Name)]
        return plain and any(name not in self.answers and name not in self.callables for name in variables)


def arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
