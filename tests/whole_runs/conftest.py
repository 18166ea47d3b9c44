"""Whole runs of the embedded model, small enough for seconds, in processes that are killed, stopped and resumed."""

import pytest
from warm_python import WarmProcesses

from rlft.system.process import launcher


@pytest.fixture
def warm_workers(monkeypatch):
    """Ranks and engines of runs in this process are forked from one that has imported torch."""
    monkeypatch.setattr(launcher, "LocalProcesses", WarmProcesses)


VARIED = """
def reward(group):
    return [float(sum(rollout.completion.token_ids) % 7) for rollout in group.rollouts]
"""


@pytest.fixture
def varied_reward(tmp_path, monkeypatch):
    """A folder of configs (--config-dir) with `reward=[varied]`, which differs among siblings of any model."""
    (tmp_path / "varied_reward.py").write_text(VARIED)
    config = tmp_path / "mine" / "reward" / "varied.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("varied:\n  _target_: varied_reward.reward\n  weight: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "mine"
