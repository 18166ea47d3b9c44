"""Versions of libraries: the files of pins/, which are in the ranges of pyproject.toml and fit together, and what
scripts/test_versions.py installs at both ends of the ranges, which `make test-all` runs first.
"""

import tomllib
from pathlib import Path

import install
import pytest
import write_pins
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
FILES = sorted(path.stem for path in (REPOSITORY / "pins").glob("*.txt"))


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    import test_versions

    return test_versions


def lines_of(text):
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_each_file_has_a_version_of_all_that_its_extras_ask_for_and_in_their_ranges():
    assert list(write_pins.ALL) == FILES == ["cpu", "cuda", "qlora"]
    for name, kind in write_pins.ALL.items():
        lines = lines_of((REPOSITORY / "pins" / f"{name}.txt").read_text())
        pins = dict(line.split("==") for line in lines)
        assert len(pins) == len(lines), "each package once"
        if name == "cpu":
            assert f"torch=={pins['torch']}" == install.TORCH, "the one of `make demo` and `make test`"
        asked = [*PROJECT["dependencies"], *kind.chosen]
        asked += [text for extra in kind.extras for text in PROJECT["optional-dependencies"][extra]]
        for requirement in map(Requirement, asked):
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), (name, str(requirement))
        assert not set(kind.without) & set(pins)
        assert SpecifierSet(PROJECT["requires-python"]).contains(write_pins.PYTHON)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_dry_resolution_of_a_file_asks_for_nothing_else(name):
    lines = lines_of((REPOSITORY / "pins" / f"{name}.txt").read_text())
    assert lines_of(write_pins.resolve(name, "\n".join(lines))) == lines


def test_both_ends_are_of_every_core_requirement_but_torch(script, capsys):
    ranges = {Requirement(text).name: Requirement(text).specifier for text in PROJECT["dependencies"]}
    for end in ("oldest", "newest"):
        found = {Requirement(text).name: Requirement(text).specifier for text in script.requirements(end)}
        assert set(found) == set(ranges) - {"torch"}
        for name, specifier in found.items():
            pins = [clause.version for clause in specifier if clause.operator == "=="]
            assert len(pins) == (end == "oldest")
            assert all(ranges[name].contains(version) for version in pins)
            lows = [clause.version for clause in ranges[name] if clause.operator == ">="]
            assert end == "newest" or pins == lows
    assert script.lowest("x-y>=1.2,<2; python_version < '3.13'") == "x-y==1.2; python_version < '3.13'"
    with pytest.raises(SystemExit):
        script.lowest("x<2")
    assert "x<2 has no lower bound" in capsys.readouterr().err


def test_make_test_all_runs_the_versions_before_every_test_and_stops_where_they_fail(script):
    lines = (REPOSITORY / "Makefile").read_text().partition("\ntest-all:")[2].partition("\n\n")[0].splitlines()
    first, second = (next(line for line in lines if name in line) for name in ("test_versions.py", '$(PYTEST) -m ""'))
    assert lines.index(first) < lines.index(second)
    assert not first.lstrip("\t@").startswith("-"), "make goes on after a line that begins with a dash"
    assert "|| true" not in first
    for name in (*script.QUICK_TESTS, *script.TIMED):
        path, _, test = name.partition("::")
        text = (REPOSITORY / path).read_text(encoding="utf-8")
        assert f"def {test.partition('[')[0]}(" in text if test else "def test_" in text, name
