"""The code sandbox without root: user namespaces where the kernel lets a user make them, a refusal where not."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "ensurepip", "tkinter", "config-*", "__pycache__", "lib2to3")


def readable_by_all(path):
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


@pytest.fixture(scope="module")
def python():
    """A Python that every user can run: the one of this environment, or a copy where that lies in root's home."""
    real = Path(os.path.realpath(sys._base_executable))
    if readable_by_all(real):
        yield real
        return
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        home.chmod(0o755)
        (home / "bin").mkdir()
        shutil.copy2(real, home / "bin")
        shutil.copytree(
            real.parent.parent / "lib", home / "lib", ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True
        )
        yield home / "bin" / real.name


@pytest.fixture(scope="module")
def project():
    """The repository where every user can read it: itself, or a copy of what is needed where it lies in a private
    folder, as one of `mktemp -d` is."""
    root = HERE.parents[2]
    if readable_by_all(root):
        yield root
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy.chmod(0o755)
        for part in ("rlft", "configs", "tests/system/sandbox", "tests/helpers"):
            shutil.copytree(root / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        yield copy


@pytest.fixture(scope="module")
def states(python, project):
    """The two lines of as_a_user.py."""
    search = os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(project / "tests" / "system" / "sandbox" / "as_a_user.py"), str(python)]
    environment = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_user_is_isolated_in_a_user_namespace_or_refused(states):
    here, _ = states
    assert here["user"] != 0
    if here["allowed"]:
        assert (here["isolation"], here["scores"]) == ("user", [1.0, 0.0])
        assert here["bound"]
        assert len(here["attempts"]) >= 30
        assert [name for name, answer in here["attempts"].items() if answer == "out"] == []
    else:
        assert here["isolation"] == "none"
        assert here["refusal"].startswith("allow_unsafe: programs that a model wrote would run unisolated here")


def test_where_the_kernel_makes_no_user_namespaces_programs_are_refused(states):
    _, forbidden = states
    assert (forbidden["user"] != 0, forbidden["allowed"], forbidden["isolation"]) == (True, False, "none")
    assert forbidden["refusal"].startswith(
        "allow_unsafe: programs that a model wrote would run unisolated here (bubblewrap does not isolate here: "
    )
    assert "install bubblewrap 0.7 or newer" in forbidden["refusal"]
    assert "a container must allow user namespaces" in forbidden["refusal"]
