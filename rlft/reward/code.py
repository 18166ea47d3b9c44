"""The share of tests that the program in a completion passes, or whether it passes all; the program is untrusted.

There are two kinds of tests, which are in a field of the prompt's metadata or in its answer:

    [{"input": "2 3", "output": "5"}, ...]        the program reads stdin and prints; its lines are compared out here
    ["assert add(2, 3) == 5", ...] or one text    Python code that calls the program (as in MBPP and HumanEval)

Neither kind shares a process with the program, and expected results never enter its sandbox: there is nothing that
it could end, patch, print, overload or read to pass (system/sandbox/protocol.py). HumanEval's `test` only defines a
function: append `check(<entry point>)` to it.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rlft.config.bounds import PositiveFloat, PositiveInt
from rlft.reward.answer import tagged
from rlft.reward.code_tests import REFUSED, Doubt, doubts
from rlft.system.process.running_time import RunningTime
from rlft.system.sandbox import bubblewrap, protocol, trials
from rlft.system.sandbox.bubblewrap import Isolation, Limits, Reason
from rlft.system.sandbox.trials import Required, check_isolation
from rlft.types import Group, Prompt, UserError, require

SPARE_S = 1.0  # part of the scorer's time limit that is not for the programs themselves

_FENCE = re.compile(r"(?m)^```[ \t]*([A-Za-z0-9]*)[^\n]*$")
_PYTHON = ("python", "python3", "py")
MAX_CHECKED = 65536  # tests whose doubts are cached

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)

Judge = Callable[[str], int]
"""Returns the number of tests that a program passes."""


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
class Pair:
    """A test that compares a program's stdout for a given stdin."""

    input: str
    output: str


Tests = list[Pair] | list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """1.0 (or the share of tests passed) for each completion whose program passes its tests, else 0.0.

    configs/reward/code.yaml explains the keys. The limits `cpu_seconds` to `file_bytes` are for each test by stdin, or
    for all other tests together. If a group is so large that not all of its programs could take `seconds` within
    `group_timeout`, each gets an equal share instead. isolation=strict has priority over allow_unsafe.

    Raises:
        UserError: no isolation works here and `allow_unsafe` is false, or the isolation is less than `isolation`.
        ValueError: when called, for tests that no program could pass.
    """

    metadata_keys: ClassVar[tuple[str, ...]] = ("tests_field",)

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

    def __post_init__(self) -> None:
        problem = f"must be more than {SPARE_S:g} s, which starting and comparing may take"
        is_enough = self.group_timeout > SPARE_S
        require(is_enough, "group_timeout", problem, got=self.group_timeout, remedy="set scoring.timeout=10")
        check_isolation(self.isolation, allow_unsafe=self.allow_unsafe)

    def note(self) -> str:
        """Which isolation is active and what bounds memory, reported when a run starts."""
        isolation, what = trials.available()
        if isolation is Isolation.none:
            return f"programs are {isolation.sentence} ({what})"
        return f"programs are {isolation.sentence}; {trials.memory_bound().sentence}"

    def __call__(self, group: Group) -> list[float]:
        tests = prompt_tests(group.prompt, self.tests_field)
        programs = [self.extract(rollout.completion.text) for rollout in group.rollouts]
        judge = partial(num_passed, tests=tests, limits=self.limits(len(programs)), isolation=trials.available()[0])
        scores = partial(self._score, judge=judge, num_tests=len(tests))
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(scores, programs))

    def examine(self, prompts: Sequence[Prompt]) -> str | None:
        """What may be wrong with the tests of these prompts, with counts; None if nothing is.

        Raises:
            UserError: tests that no program could pass, or that any program passes.
        """
        refused: list[str] = []
        doubtful: dict[Doubt, list[str]] = {}
        for prompt in prompts:
            try:
                tests = prompt_tests(prompt, self.tests_field)
            except ValueError as error:
                refused.append(str(error))
                continue
            for doubt in {doubt for test in tests if isinstance(test, str) for doubt in _doubts(test)}:
                doubtful.setdefault(doubt, []).append(prompt.id)
        if refused:
            problem = f"{len(refused)} of {len(prompts)} prompts have tests that cannot be used; {refused[0]}"
            remedy = "fix these prompts or leave them out"
            raise UserError("tests_field", problem, got=self.tests_field or "null", remedy=remedy)
        notes = [f"{len(ids)} {doubt.value} (the first: {ids[0]!r})" for doubt, ids in sorted(doubtful.items())]
        return f"of {len(prompts)} prompts with tests, {'; '.join(notes)}" if notes else None

    def extract(self, text: str) -> str | None:
        """The program in a completion, or None if there is none."""
        match self.program_in:
            case ProgramIn.fence:
                program = fenced(text)
            case ProgramIn.tag:
                program = next(reversed(list(tagged(text, self.tag))), None)
            case _:
                program = text
        return program if program and program.strip() else None

    def limits(self, num_programs: int) -> Limits:
        """The limits of each program of a group with `num_programs` programs."""
        share = (self.group_timeout - SPARE_S) / math.ceil(num_programs / self.workers)
        return Limits(
            seconds=min(self.seconds, share),
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory_bytes,
            output_bytes=self.output_bytes,
            processes=self.processes,
            file_bytes=self.file_bytes,
        )

    def _score(self, program: str | None, judge: Judge, num_tests: int) -> float:
        passed = judge(program) if program is not None else 0
        return passed / num_tests if self.score is Score.fraction else float(passed == num_tests)


def fenced(text: str) -> str | None:
    """The content of the last closed block of Python, fenced by three backticks at the start of a line; else None.

    A fence that names a language always opens a block, even inside another one.

    >>> fenced("So:\\n```python\\nprint(17)\\n```\\nNo:\\n```python\\nprint(18)\\n```\\nIt prints\\n```\\n18\\n```")
    'print(18)\\n'
    """
    program, opened = None, None
    for fence in _FENCE.finditer(text):
        if opened is None or fence[1]:
            opened = fence
            continue
        if opened[1].lower() in _PYTHON:
            program = text[opened.end() + 1 : fence.start()]
        opened = None
    return program


def same_output(printed: str, expected: str) -> bool:
    r"""Whether two outputs have the same lines, except for white space at the end of lines and empty lines at the end.

    >>> same_output("1 2 \n3\n\n", "1 2\n3"), same_output("1  2", "1 2")
    (True, False)
    """
    return _lines(printed) == _lines(expected)


def prompt_tests(prompt: Prompt, field: str | None) -> Tests:
    """The prompt's tests. ValueError, with the prompt's id, if there are none or no program could pass them."""
    where = "answer" if field is None else f"metadata field {field!r}"
    tests = prompt.answer if field is None else prompt.metadata.get(field)
    try:
        return parse_tests(tests)
    except ValueError as error:
        raise ValueError(f"the {where} of prompt {prompt.id!r} {error}") from None


def parse_tests(value: Any) -> Tests:
    """Tests from a list, or from text: JSON of such a list, or else a test in Python.

    >>> parse_tests('[{"input": "1", "output": 2}]'), parse_tests("assert f(1) == 2")
    ([Pair(input='1', output='2')], ['assert f(1) == 2'])
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("holds no tests")
    if all(isinstance(test, str) for test in value):
        for test in value:
            _check_python(test)
        return list(value)
    if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in value):
        return [Pair(input=str(test["input"]), output=str(test["output"])) for test in value]
    raise ValueError('holds neither texts of Python nor {"input": ..., "output": ...} alone')


def num_passed(program: str, tests: Tests, limits: Limits, isolation: Isolation) -> int:
    """The number of tests that the program passes within its limits."""
    clock = RunningTime()
    texts = [test for test in tests if isinstance(test, str)]
    if texts:
        return _num_calls_passed(program, texts, limits, isolation)
    passed = 0
    for test in tests:
        left = limits.seconds - clock()
        if isinstance(test, Pair) and left > 0:
            passed += _prints(program, test, replace(limits, seconds=left), isolation, clock)
    return passed


def _prints(program: str, pair: Pair, limits: Limits, isolation: Isolation, clock: RunningTime) -> bool:
    result = bubblewrap.run({"program.py": program}, ["program.py"], limits, isolation, stdin=pair.input, clock=clock)
    return result.reason is Reason.exited and result.exit_code == 0 and same_output(result.stdout, pair.output)


def _num_calls_passed(program: str, tests: Sequence[str], limits: Limits, isolation: Isolation) -> int:
    """Runs program and tests in a sandbox each, connected by two pipes; the verdicts are in the tests' stdout."""
    source = Path(protocol.__file__).read_text(encoding="utf-8")
    program_files = {"protocol.py": source, "program.py": program}
    test_files = {"protocol.py": source, "tests.json": json.dumps(tests)}
    request_reader, request_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    open_here = [request_reader, request_writer, answer_reader, answer_writer]

    def hand_over(*descriptors: int) -> None:
        """Closes descriptors that only the processes need now, so that each notices when the other has ended."""
        for descriptor in descriptors:
            open_here.remove(descriptor)
            os.close(descriptor)

    try:
        arguments = ["protocol.py", "program", "program.py"]
        with bubblewrap.running(
            program_files, arguments, limits, isolation, stdin=request_reader, stdout=answer_writer
        ):
            hand_over(request_reader, answer_writer)
            arguments = ["protocol.py", "tests", "tests.json", str(request_writer)]
            streams: dict[str, Any] = {"stdin": answer_reader, "stdout": subprocess.PIPE, "pass_fds": [request_writer]}
            with bubblewrap.running(test_files, arguments, limits, isolation, **streams) as process:
                hand_over(answer_reader, request_writer)
                verdicts = bubblewrap.collect(process, limits).stdout
    finally:
        hand_over(*open_here)
    return verdicts.split("\n").count(protocol.PASSED)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _check_python(test: str) -> None:
    """ValueError for a test that is not Python, that only defines things, or that any program passes."""
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"holds a test that is not Python ({error}): {test!r:.80}") from None
    if all(isinstance(statement, _DEFINITIONS) for statement in statements):
        problem = "holds a test that only defines things, and would be passed by every program; call them, as in "
        raise ValueError(f"{problem}check(add): {test!r:.80}")
    for doubt in _doubts(test) & set(REFUSED):
        raise ValueError(f"holds tests that {doubt.value}; {REFUSED[doubt]}: {test!r:.80}")


@functools.lru_cache(MAX_CHECKED)
def _doubts(test: str) -> frozenset[Doubt]:
    return frozenset(doubts(test))
