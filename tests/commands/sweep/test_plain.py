"""What surrounds the jobs that Hydra starts."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlft.commands.sweep import plain as sweep
from rlft.config import overrides

YAMLS = {
    "one that says nothing of logging": "x: 1\n",
    "one that switches it off": (
        "defaults:\n  - _self_\n  - override hydra/job_logging: disabled\n"
        "  - override hydra/hydra_logging: disabled\nx: 1\n"
    ),
}


@pytest.fixture
def early_logger() -> Iterator[logging.Logger]:
    """Of a module that was imported before Hydra starts."""
    logger = logging.getLogger("rlft.imported_early")
    yield logger
    logger.disabled = False


@pytest.mark.parametrize("yaml", YAMLS)
def test_a_verbs_yaml_neither_switches_warnings_off_nor_writes_log_files(
    yaml: str, early_logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    before, jobs = (list(root.handlers), root.level), []
    (tmp_path / "train.yaml").write_text(YAMLS[yaml])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.configs, "primary_folders", lambda verb: [tmp_path])
    sweep._hydra("train", overrides.parse(["-m", "x=2,3"]), lambda composed: jobs.append(composed.x))
    assert jobs == [2, 3]
    assert not early_logger.disabled
    assert (list(root.handlers), root.level) == before
    assert list(tmp_path.rglob("*.log")) == []
