"""A Python interpreter as a tool, in the sandbox of the code reward."""

from dataclasses import replace

import pytest

from rlft.environment.python import Python
from rlft.system.sandbox.bubblewrap import Required
from rlft.types import UserError
from tests.environment.test_conversations import LIMITS

PYTHON = Python(
    **LIMITS, seconds=5.0, cpu_seconds=5, memory_bytes=2**29, output_bytes=1000, processes=4, file_bytes=2**20,
    isolation=Required.standard, allow_unsafe=False,
)  # fmt: skip


def answer(code, environment=PYTHON):
    return environment.make().call("python", {"code": code})


def test_it_answers_what_a_program_prints():
    assert answer("import math\nprint(math.factorial(20))") == "2432902008176640000\n"
    assert answer("x = 1") == ""


def test_what_a_program_raises_is_shown_with_its_own_lines_alone():
    text = answer("print('begun')\ndef f():\n    return 1 / 0\nf()")
    assert text.startswith("begun\nTraceback (most recent call last):\n")
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert "line 3" in text
    assert "run.py" not in text
    assert "SyntaxError" in answer("print(")


def test_limits_end_a_program_and_say_so():
    quick = replace(PYTHON, seconds=0.5)
    assert answer("print('on', flush=True)\nwhile True: pass", quick).endswith("[ended after 0.5 s]")
    assert answer("print('x' * 2000)").endswith("[ended: it printed more than 1000 bytes]")
    assert answer("import os\nos._exit(3)") == "[ended with exit code 3, having printed nothing]"


def test_a_program_sees_nothing_of_the_machine():
    assert "Error" in answer("print(open('/etc/passwd').read())")
    assert "Error" in answer("import socket\nsocket.create_connection(('192.0.2.1', 80), 1)")


def test_its_schema_names_its_only_parameter():
    [schema] = PYTHON.schemas()
    assert schema["function"]["name"] == "python"
    assert list(schema["function"]["parameters"]["properties"]) == ["code"]


def test_a_program_has_less_time_than_a_call():
    with pytest.raises(UserError, match=r"environment.seconds: .* got 9; lower it, or set environment.call_timeout=11"):
        replace(PYTHON, seconds=9.0).check()
