"""`environment=python`: a Python interpreter in the sandbox of `reward=code`; each call is a program of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rlft.config.bounds import PositiveFloat, PositiveInt
from rlft.environment.protocol import Environment
from rlft.environment.tools import FunctionCalls, schema_of
from rlft.system.sandbox import bubblewrap
from rlft.system.sandbox.bubblewrap import Limits, Reason, Required, check_isolation
from rlft.tokens.answers import unfenced
from rlft.types import UserError, well_formed

SECTION = "environment"
SPARE_S = 2.0  # seconds that starting and ending the sandbox may take, in addition to the program

RUNNER = """
import os, sys, traceback
name = os.path.join(os.path.dirname(sys.argv[0]), "program.py")
try:
    with open(name, encoding="utf-8") as file:
        exec(compile(file.read(), "program.py", "exec"), {"__name__": "__main__"})
except SystemExit:
    raise
except BaseException as error:
    frames = traceback.TracebackException.from_exception(error)
    frames.stack = traceback.StackSummary.from_list([f for f in frames.stack if f.filename == "program.py"])
    print("".join(frames.format()), end="")
    sys.exit(1)
"""
"""Runs program.py and prints what it raises: a program's stderr is thrown away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Python(Environment):
    """Its own keys are the limits of a program (`sandbox.Limits`) and its isolation."""

    keeps_state: ClassVar[bool] = False

    seconds: PositiveFloat
    cpu_seconds: PositiveInt
    memory_bytes: PositiveInt
    output_bytes: PositiveInt
    processes: PositiveInt
    file_bytes: PositiveInt
    isolation: Required
    allow_unsafe: bool

    def check(self) -> None:
        if self.seconds + SPARE_S > self.call_timeout:
            problem = f"and the {SPARE_S:g} s in which a program starts exceed environment.call_timeout"
            remedy = f"lower it, or set environment.call_timeout={self.seconds + SPARE_S:g} or more"
            raise UserError(f"{SECTION}.seconds", problem, got=f"{self.seconds:g}", remedy=remedy)
        try:
            check_isolation(self.isolation, allow_unsafe=self.allow_unsafe)
        except UserError as error:
            raise UserError(f"{SECTION}.{error.key}", error.problem, got=error.got, remedy=error.remedy) from None

    def schemas(self) -> list[dict[str, Any]]:
        return [schema_of(self._tool(), SECTION, "python")]

    def start(self) -> None:
        bubblewrap.available()  # cached: the first call takes half a second

    def make(self) -> FunctionCalls:
        return FunctionCalls({"python": self._tool()})

    def _tool(self) -> Callable[[str], str]:
        limits = Limits.of(self, self.seconds)

        def python(code: str) -> str:
            """Runs a Python program with the standard library and returns what it prints. Each call begins anew.

            Args:
                code: the program, which prints what is to be seen

            Returns:
                What it printed, and the error if it raised one.
            """
            return printed(code, limits)

        return python


def printed(code: str, limits: Limits) -> str:
    """What a program, which may be in a fence, prints in the sandbox, what it raised, and whether a limit ended it."""
    files = {"run.py": RUNNER, "program.py": well_formed(unfenced(code))}
    result = bubblewrap.run(files, ["run.py"], limits, bubblewrap.available()[0])
    if result.reason is Reason.deadline:
        return f"{result.stdout}[ended after {limits.seconds:g} s]"
    if result.reason is Reason.output:
        return f"{result.stdout}[ended: it printed more than {limits.output_bytes} bytes]"
    if result.exit_code and not result.stdout:
        return f"[ended with exit code {result.exit_code}, having printed nothing]"
    return result.stdout
