"""What scripts/test_versions.py installs at both ends of the ranges, and that `make test-all` runs it first."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    import test_versions

    return test_versions


def test_both_ends_are_of_every_core_requirement_but_torch(script: Any) -> None:
    core = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    ranges = {Requirement(text).name: Requirement(text).specifier for text in core}
    for end in ("oldest", "newest"):
        found = {Requirement(text).name: Requirement(text).specifier for text in script.requirements(end)}
        assert set(found) == set(ranges) - {"torch"}
        for name, specifier in found.items():
            pins = [clause.version for clause in specifier if clause.operator == "=="]
            assert len(pins) == (end == "oldest")
            assert all(ranges[name].contains(version) for version in pins)
            lows = [clause.version for clause in ranges[name] if clause.operator == ">="]
            assert end == "newest" or pins == lows


def test_a_requirement_without_a_lower_bound_is_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.lowest("x-y>=1.2,<2; python_version < '3.13'") == "x-y==1.2; python_version < '3.13'"
    with pytest.raises(SystemExit):
        script.lowest("x<2")
    assert "x<2 has no lower bound" in capsys.readouterr().err


def test_make_test_all_runs_it_before_every_test_and_stops_where_it_fails() -> None:
    lines = (REPOSITORY / "Makefile").read_text().partition("\ntest-all:")[2].partition("\n\n")[0].splitlines()
    places = [
        next(i for i, line in enumerate(lines) if name in line) for name in ("test_versions.py", '$(PYTEST) -m ""')
    ]
    assert places == sorted(places)
    assert not lines[places[0]].lstrip("\t@").startswith("-"), "make goes on after a line that begins with a dash"
    assert "|| true" not in lines[places[0]]


def test_every_quick_test_exists(script: Any) -> None:
    for name in (*script.QUICK_TESTS, *script.TIMED):
        path, _, test = name.partition("::")
        text = (REPOSITORY / path).read_text(encoding="utf-8")
        assert f"def {test.partition('[')[0]}(" in text if test else "def test_" in text, name
