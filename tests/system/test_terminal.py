"""What takes long says how far it is; hints are commands that work where they are printed."""

import ast
import subprocess
import sys
from pathlib import Path

import rlft
from rlft.system.terminal import CHECKED, EVERY_S, pip_install, with_progress


def clock_of(seconds):
    """Goes on by so many seconds each time that it is looked at."""
    now = 0.0

    def clock():
        nonlocal now
        now += seconds
        return now

    return clock


def test_a_line_now_and_then_says_how_much_is_done_and_how_long_it_still_takes(capsys):
    number = 4 * CHECKED
    # The clock is looked at once at the start and after every 256 items: 6 s each, so a line after 512 and after 1024.
    assert list(with_progress(range(number), "data.path: reading x", 2 * number, lambda item: 2, clock_of(6.0))) == [
        *range(number)
    ]
    # After 512 of 1024 items 12 s have passed, and as many are still to come.
    assert capsys.readouterr().err.splitlines() == [
        "data.path: reading x: 50 %, about 12 s more",
        "data.path: reading x: 100 %, about 0 s more",
    ]


def test_of_what_has_no_known_end_the_number_is_said_and_of_what_takes_few_seconds_nothing(capsys):
    list(with_progress(range(4 * CHECKED), "data.path: reading x", None, lambda item: 2, clock_of(11.0)))
    assert capsys.readouterr().err.splitlines()[-1] == "data.path: reading x: row 1,024"
    assert len(list(with_progress(range(4 * CHECKED), "x", 4 * CHECKED, clock=clock_of(EVERY_S / 5)))) == 4 * CHECKED
    assert capsys.readouterr().err == ""


def executable(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def test_a_hint_names_the_pip_of_this_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, other = (executable(tmp_path / name / "bin" / "pip").parent for name in (".venv", "elsewhere"))
    monkeypatch.setattr(sys, "prefix", str(own.parent))
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(own))
    assert pip_install("rlft[vllm]", "trl") == "pip install 'rlft[vllm]' trl", "a bare pip is this environment's"
    for path in (str(other), f"{other}:{own}", ""):
        monkeypatch.setenv("PATH", path)
        assert pip_install("rlft[vllm]") == ".venv/bin/python -m pip install 'rlft[vllm]'"
    monkeypatch.setattr(sys, "executable", "/opt/its own/bin/python")
    assert pip_install("trl") == "'/opt/its own/bin/python' -m pip install trl"


def test_a_hint_leaves_setuptools_its_distutils():
    """Looking for the module pip takes them away for the rest of the process, and vLLM cannot be imported then."""
    code = (
        "from rlft.system.terminal import pip_install; pip_install('trl'); import distutils; print(distutils.__file__)"
    )
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(Path(rlft.__file__).parent.parent)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "setuptools" in found.stdout


def test_a_hint_in_an_environment_without_pip_is_for_uv(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: [])
    monkeypatch.setenv("PATH", str(executable(tmp_path / "tools" / "uv").parent))
    assert pip_install("trl") == "uv pip install --python .venv/bin/python trl"
    monkeypatch.setenv("PATH", "")
    assert pip_install("trl") == ".venv/bin/python -m pip install trl", "which says itself what is missing"


def test_every_hint_to_install_something_is_made_by_one_function():
    """No other text of rlft's and its scripts', beside docstrings, has the words."""
    found = []
    scripts = (Path(__file__).parents[2] / "scripts").glob("*.py")
    for file in (*Path(rlft.__file__).parent.rglob("*.py"), *scripts):
        if "pip" not in (text := file.read_text()):
            continue
        tree = ast.parse(text)
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [file.name for text in texts if "pip install" in text.value and id(text) not in described]
    assert not found
