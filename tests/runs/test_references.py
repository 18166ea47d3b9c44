"""Runs named where an adapter or a model is wanted: which folder a name stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlft.runs import checkpoint, run_folder
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.find import adapter_references, folder_of, with_named_runs
from rlft.types import UserError


def begun(folder: Path, **config: Any) -> Path:
    """A run without a checkpoint."""
    folder.mkdir()
    run_folder.start(folder, config, {})
    return folder


def reached(run: Path, step: int, *roles: str) -> Path:
    """A checkpoint of the run with an adapter in each of these roles; `model` is a folder of its own kind."""
    saved = Checkpoint(
        step=step,
        adapters={role: {"a": torch.full((1,), float(step))} for role in roles if role != "model"},
        adapter_config={},
        optimizer={},
        state={},
        write_folders={"model": Path.mkdir} if "model" in roles else {},
    )
    return checkpoint.save(run_folder.checkpoints(run), saved, keep=9)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two checkpoints with policy and critic."""
    made = begun(tmp_path / "run")
    for step in (1, 2):
        reached(made, step, "policy", "critic")
    return made


def test_a_run_is_its_newest_whole_checkpoints_role(run: Path) -> None:
    newest, before = run / "checkpoints" / "step_000002", run / "checkpoints" / "step_000001"
    assert folder_of(str(run), ["policy"], "lora.path") == str(newest / "policy")
    assert folder_of(str(run), ["reward", "critic"], "critic.init") == str(newest / "critic")
    (newest / "state.json").write_text("{}")  # not what its MANIFEST says
    assert folder_of(str(run), ["policy"], "lora.path") == str(before / "policy")


def test_a_checkpoint_is_its_own_role_whatever_came_after(run: Path) -> None:
    before = run / "checkpoints" / "step_000001"
    assert folder_of(str(before), ["policy"], "lora.path") == str(before / "policy")


def test_any_other_name_stays_as_it_is(run: Path, tmp_path: Path, tiny_path: Path) -> None:
    adapter = str(run / "checkpoints" / "step_000002" / "policy")
    (tmp_path / "config.yaml").touch()  # a model's folder that somebody keeps a config.yaml in
    (tmp_path / "config.json").touch()
    for name in (adapter, "embedded:tiny-arithmetic", "somebody/model", "base", "copy", "nowhere", str(tmp_path)):
        assert folder_of(name, ["policy"], "lora.path") == name
    assert folder_of(str(tiny_path), ["model"], "model.path") == str(tiny_path)


def test_the_first_role_that_is_there_is_taken(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    newest = reached(run, 3, "critic", "reward", "reward_taste")
    for roles, name in ((("critic", "reward"), "critic"), (("reward", "reward_taste"), "reward")):
        assert folder_of(str(run), roles, "key") == str(newest / name)
    assert folder_of(str(run), ("reward_taste",), "key") == str(newest / "reward_taste")


def test_a_run_without_a_checkpoint_or_the_role_is_refused_with_what_there_is(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with pytest.raises(UserError, match=r"^lora\.path: that run has no checkpoint, got .*run; let it reach one first"):
        folder_of(str(run), ["policy"], "lora.path")
    reached(run, 1, "model")
    with pytest.raises(UserError, match=r"^lora\.path: that checkpoint has no policy, only model, got .*step_000001; "):
        folder_of(str(run), ["policy"], "lora.path")


def test_every_key_that_may_name_a_run_is_looked_at(run: Path) -> None:
    plain = {
        "verb": "train",
        "lora": {"path": str(run), "rank": 4},
        "snapshot": {"reference": str(run)},
        "critic": {"init": "base"},
        "model": {"path": "embedded:tiny-arithmetic"},
        "reward": {"learned": {"path": "there"}, "format": {"weight": 1.0}},
        "adapter": None,
    }
    assert dict(adapter_references(plain)) == {
        "snapshot.reference": ("policy",),
        "lora.path": ("policy",),
        "critic.init": ("critic", "reward"),
        "model.path": ("model",),
        "reward.learned.path": ("reward", "reward_learned"),
    }
    policy = str(run / "checkpoints" / "step_000002" / "policy")
    found = with_named_runs(plain)
    assert found["lora"] == {"path": policy, "rank": 4}
    assert found["snapshot"]["reference"] == policy
    assert found["reward"] == plain["reward"]
    assert plain["lora"]["path"] == str(run), "what was given is left alone"
    assert with_named_runs(found) == found


def test_a_reward_model_goes_on_from_a_reward_model_or_begins_as_a_policy(run: Path, tmp_path: Path) -> None:
    other = begun(tmp_path / "other", verb="rm")
    newest = reached(other, 1, "reward")
    for path, expected in ((other, newest / "reward"), (run, run / "checkpoints" / "step_000002" / "policy")):
        assert with_named_runs({"verb": "rm", "lora": {"path": str(path)}})["lora"]["path"] == str(expected)


def test_without_an_adapter_there_is_nothing_to_name() -> None:
    assert with_named_runs({"verb": "sft", "lora": None}) == {"verb": "sft", "lora": None}
