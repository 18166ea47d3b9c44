"""The share of tests that the program in a completion passes, or whether it passes all; the program is untrusted.

Tests compare what the program prints, or call it; they are in a field of the prompt's metadata or in its answer, in the
forms of the data sets that publish them (code_tests.py).

No test shares a process with the program, and expected results never enter its sandbox: there is nothing that it could
end, patch, print, overload or read to pass (system/sandbox/protocol.py).
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import textwrap
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from enum import StrEnum
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, ClassVar

from rlft.config.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from rlft.reward.code_tests import Call, Doubt, Pair, Tests, doubts, function_in, lines_of, names_called, parse_tests
from rlft.system.process.running_time import TICK_S, RunningTime
from rlft.system.sandbox import bubblewrap, protocol
from rlft.system.sandbox.bubblewrap import Isolation, Limits, Reason, Required, check_isolation
from rlft.tokens.answers import Block, blocks, tagged, without_reasoning
from rlft.types import Group, Prompt, UserError, require

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
