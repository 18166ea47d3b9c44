"""Runs to export, report and talk to: one that was trained, and ones put together from a config and tensors."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import tiny
from torch import Tensor

from rlft import cli
from rlft.config.compose import compose
from rlft.config.instantiate import from_mapping
from rlft.config.model import ModelConfig
from rlft.model.backbone import fingerprint
from rlft.model.roles import Roles
from rlft.runs import checkpoint, run_folder
from rlft.runs.checkpoint import Checkpoint
from rlft.runs.find import NamedRun, find

# The adapter of the fixture `make_roles`.
LORA = ("lora.rank=4", "lora.alpha=8")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three large steps, with a checkpoint of the last two."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = ["+recipe=grpo_arithmetic", *LORA, "steps=3", "trainer.lr=0.02", "prompts_per_step=4", "group_size=8"]
    words += ["generation=transformers", "generation.max_tokens=32", "model.device=cpu", "checkpoint.every=1"]
    words += ["eval.every=1", "eval.num_prompts=8", "eval.num_samples=2", "scoring.workers=0", "console=null"]
    assert cli.run(["train", *words, f"hydra.run.dir={folder}"]) == 0
    return folder


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
def save_run(tmp_path: Path) -> Callable[..., NamedRun]:
    """Makes a run's folder with one checkpoint, of these adapters and heads, and gives the place."""

    def save(
        *overrides: str,
        adapters: Mapping[str, Mapping[str, Tensor]],
        config: Mapping[str, Any],
        heads: Mapping[str, Mapping[str, Tensor]] | None = None,
        name: str = "run",
    ) -> NamedRun:
        folder = tmp_path / name
        folder.mkdir()
        plain = compose([*LORA, "model.device=cpu", "scoring.workers=0", *overrides])
        base = {"base_fingerprint": fingerprint(from_mapping(ModelConfig, plain["model"], "model"))}
        run_folder.write_config(folder, plain, base)
        saved = Checkpoint(
            step=7,
            adapters=adapters,
            adapter_config=config,
            optimizer={"nothing": torch.zeros(1)},
            state=base,
            heads=heads or {},
        )
        checkpoint.save(run_folder.checkpoints(folder), saved, keep=2)
        return find(folder)

    return save


@pytest.fixture
def policy_run(make_roles: Callable[..., Roles], save_run: Callable[..., NamedRun]) -> Callable[..., NamedRun]:
    """Makes the folder of a run whose policy is an adapter of random numbers, on the base that the overrides name."""

    def save(*overrides: str, noise: float = 0.05) -> NamedRun:
        roles = make_roles(noise=noise)
        return save_run(*overrides, adapters={"policy": roles.weights("policy")}, config=roles.adapter_config())

    return save
