"""Notes about a run whose libraries or config.yaml have changed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from in_one_test import each

from rlft.config.compose import compose
from rlft.runs import run_folder
from rlft.runs.chain import Chain
from rlft.runs.find import changes_since
from rlft.runs.fork import FORKED_FROM


@cache
def composed() -> dict[str, Any]:
    return compose([])


def begin(folder: Path, steps: int, origin: dict[str, object] | None = None) -> Path:
    """A run that has made the chain of these steps."""
    folder.mkdir()
    run_folder.write_config(folder, composed(), {}, origin)
    add_steps(folder, 0, steps)
    return folder


def add_steps(folder: Path, first: int, last: int) -> None:
    chain = Chain(folder)
    chain.start(first - 1, {}, {})
    for step in range(first, last + 1):
        chain.seal(step)
    chain.close()


def test_a_run_that_is_as_it_was_has_no_notes(tmp_path: Path) -> None:
    assert changes_since(begin(tmp_path / "run", 3)) == []


def test_any_change_of_its_config_by_hand_is_noted_until_a_step_is_made_with_it(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", 3)
    config = run / "config.yaml"
    text = config.read_text()
    for old, new in (("lr:", "lr:  "), ("seed: 0", "seed: 1"), ("group_size: 8", "group_size: 4")):
        assert text.count(old) >= 1
        config.write_text(text.replace(old, new, 1))
        [note] = changes_since(run)
        assert note.startswith("config.yaml changed since step 3: keys were edited in it")
    add_steps(run, 4, 4)
    assert changes_since(run) == []


def test_a_fork_has_a_config_of_its_own_from_its_first_step_on(tmp_path: Path) -> None:
    fork = begin(tmp_path / "fork", 3)
    run_folder.write_config(fork, compose(["seed=3"]), {}, {FORKED_FROM: {"step": 3}})
    assert changes_since(fork) == []
    add_steps(fork, 4, 4)
    assert changes_since(fork) == []
    run_folder.write_config(fork, compose(["seed=4"]), {}, {FORKED_FROM: {"step": 3}})
    assert len(changes_since(fork)) == 1


@each("package", [name for name in run_folder.PACKAGES if name in run_folder.versions(run_folder.PACKAGES)])
def test_a_library_of_another_version_is_noted_and_another_build_is_not(package: str, tmp_path: Path) -> None:
    version = run_folder.versions([package])[package].split("+")[0]
    for name, origin in (("build", f"{version}+cu999"), ("older", "0.0.1")):
        run = begin(tmp_path / f"{package}_{name}", 1, {package: origin})
        expected = [f"libraries changed since the run began: {package} 0.0.1 -> {version}"] if name == "older" else []
        assert changes_since(run) == expected


def test_a_run_without_a_chain_has_no_note_about_its_config(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run_folder.write_config(run, compose([], command="sample"), {})
    assert changes_since(run) == []
