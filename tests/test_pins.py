"""The files of pins/: exact versions in the ranges of pyproject.toml, which fit together."""

from __future__ import annotations

import tomllib
from pathlib import Path

import install
import pytest
import write_pins
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
FILES = sorted(path.stem for path in (REPOSITORY / "pins").glob("*.txt"))


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def pins_of(name: str) -> dict[str, str]:
    lines = lines_of((REPOSITORY / "pins" / f"{name}.txt").read_text())
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines), "each package once"
    return pins


def test_each_file_has_a_version_of_all_that_its_extras_ask_for_and_in_their_ranges() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert list(write_pins.ALL) == FILES == ["cpu", "cuda", "qlora"]
    assert f"torch=={pins_of('cpu')['torch']}" == install.TORCH, "the one of `make demo` and `make test`"
    for name, kind in write_pins.ALL.items():
        asked = [*project["dependencies"], *kind.chosen]
        asked += [text for extra in kind.extras for text in project["optional-dependencies"][extra]]
        pins = pins_of(name)
        for requirement in map(Requirement, asked):
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), (name, str(requirement))
        assert not set(kind.without) & set(pins)
        assert SpecifierSet(project["requires-python"]).contains(write_pins.PYTHON)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_dry_resolution_of_a_file_asks_for_nothing_else(name: str) -> None:
    lines = lines_of((REPOSITORY / "pins" / f"{name}.txt").read_text())
    assert lines_of(write_pins.resolve(name, "\n".join(lines))) == lines
