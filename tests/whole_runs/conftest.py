"""Whole runs of the embedded model, small enough for seconds, in processes that are killed, stopped and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_processes import Nursery

TINY = (
    "+recipe=grpo_arithmetic", "steps=5", "prompts_per_step=3", "group_size=4", "generation=transformers",
    "generation.max_tokens=24", "model.device=cpu", "lora.rank=2", "lora.dropout=0.1", "data.size=64",
    "data.held_out_size=8", "eval.every=2", "eval.num_prompts=3", "eval.num_samples=2", "scoring.workers=0",
    "logger=[jsonl]",
)  # fmt: skip


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
def tiny() -> tuple[str, ...]:
    """What is said to `rlft train` for a run of five steps of 3 x 4 completions, evaluated at 0, 2, 4 and 5."""
    return TINY


@pytest.fixture(scope="session")
def two_steps() -> tuple[str, ...]:
    """Two steps, each saved, and enough held-out completions to tell the runs of a sweep apart."""
    changed = ("steps=", "eval.", "data.held_out_size")
    evaluated = ("data.held_out_size=16", "eval.num_prompts=16", "eval.num_samples=2")
    return *(key for key in TINY if not key.startswith(changed)), "steps=2", "checkpoint.every=1", *evaluated


@pytest.fixture(scope="session")
def all_checkpoints() -> tuple[str, ...]:
    """Keys that keep a checkpoint of every step."""
    return "checkpoint.every=1", "checkpoint.keep=99"


@pytest.fixture(scope="session")
def undisturbed(
    quiet: Nursery, tiny: tuple[str, ...], all_checkpoints: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """That run, with every checkpoint."""
    place = tmp_path_factory.mktemp("undisturbed")
    quiet.run("train", *tiny, *all_checkpoints, "hydra.run.dir=run", cwd=place, ends=0)
    return place / "run"


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
