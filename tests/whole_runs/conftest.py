"""Whole runs of the embedded model, small enough for seconds, in processes that are killed, stopped and resumed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_folders import tiny
from run_processes import Nursery


@pytest.fixture(scope="session")
def quiet(forks: Nursery) -> Nursery:
    """Where runs go undisturbed."""
    return forks


@pytest.fixture(scope="session")
def rough() -> Iterator[Nursery]:
    """Where runs are killed and resumed."""
    nursery = Nursery(hash_seed=2)
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def two_steps() -> tuple[str, ...]:
    """Two steps, each saved, and enough held-out completions to tell the runs of a sweep apart."""
    keys = tiny("steps=2", "checkpoint.every=1", "data.held_out_size=16", "eval.num_prompts=16", "eval.num_samples=2")
    return tuple(key for key in keys[1:] if not key.startswith("eval.every="))


@pytest.fixture(scope="session")
def undisturbed_of(quiet: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of the run that these words give, with every checkpoint; the same words run once."""

    @functools.cache
    def folder(*words: str) -> Path:
        place = tmp_path_factory.mktemp("undisturbed")
        keep = () if words[0] == "sample" else ("checkpoint.every=1", "checkpoint.keep=99")
        quiet.run(*words, *keep, "hydra.run.dir=run", cwd=place, ends=0)
        return place / "run"

    return folder


@pytest.fixture(scope="session")
def undisturbed(undisturbed_of: Callable[..., Path]) -> Path:
    """The run of TINY, with every checkpoint."""
    return undisturbed_of(*tiny())


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
