"""The tests for CUDA GPUs on a machine without one: they are there, import what they need, and are not collected."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from in_one_test import each

TESTS = Path(__file__).parent
FOLDER = TESTS / "cuda"
FILES = sorted(FOLDER.glob("test_*.py"))


@each("file", FILES)
def test_its_files_import_and_hold_tests(file):
    spec = importlib.util.spec_from_file_location(f"cuda_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = [n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
    tests = [name for name in names if name.startswith("test_")]
    assert tests
    assert all(callable(getattr(module, name)) for name in tests)


@pytest.mark.slow
def test_they_are_collected_only_where_the_folder_is_named_and_skipped_without_a_gpu(request):
    asked = [Path(word.partition("::")[0]).resolve() for word in request.config.args]
    if not any(FOLDER in (one, *one.parents) for one in asked):
        assert not [item for item in request.session.items if FOLDER in item.path.parents]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-rs", "tests/cuda"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no CUDA GPU here" in done.stdout
    assert "passed" not in done.stdout
    assert sum(f"tests/cuda/{file.name}" in done.stdout for file in FILES) == len(FILES)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_refuses_in_a_line_where_there_is_no_driver():
    try:
        import ctypes

        ctypes.CDLL("libcuda.so.1")
    except OSError:
        command = ["make", "test-cuda", f"VENV={sys.prefix}"]
        # A make inside of `make test` would say which folder it enters.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 2
        assert done.stderr.startswith("make test-cuda: there is no CUDA GPU (no libcuda.so.1) here; ")
        assert done.stdout == ""
