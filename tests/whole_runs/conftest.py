"""Whole runs of the embedded model, small enough for seconds, in processes that are killed, stopped and resumed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import tiny
from warm_python import WarmProcesses

from rlft import cli
from rlft.system.process import launcher


@pytest.fixture(scope="session")
def undisturbed_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of the run that these words give, with every checkpoint; the same words run once.

    It is made in this process, whose hashes are not those of `forks`, where runs are killed and resumed.
    """

    @functools.cache
    def folder(*words: str) -> Path:
        run = tmp_path_factory.mktemp("undisturbed") / "run"
        keep = () if words[0] == "sample" else ("checkpoint.every=1", "checkpoint.keep=99")
        assert cli.run([*words, *keep, f"hydra.run.dir={run}"]) == 0
        return run

    return folder


@pytest.fixture(scope="session")
def undisturbed(undisturbed_of: Callable[..., Path]) -> Path:
    """The run of TINY, with every checkpoint."""
    return undisturbed_of(*tiny())


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and engines of runs in this process are forked from one that has imported torch."""
    monkeypatch.setattr(launcher, "LocalProcesses", WarmProcesses)


VARIED = """
def reward(group):
    return [float(sum(rollout.completion.token_ids) % 7) for rollout in group.rollouts]
"""


@pytest.fixture
def varied_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configs (--config-dir) with `reward=[varied]`, which differs among siblings of any model."""
    (tmp_path / "varied_reward.py").write_text(VARIED)
    config = tmp_path / "mine" / "reward" / "varied.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("varied:\n  _target_: varied_reward.reward\n  weight: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "mine"
