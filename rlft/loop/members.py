"""Opens the launcher of a run's members, and says which GPUs a member gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch

from rlft.config.model import ModelConfig
from rlft.config.schema import RunConfig
from rlft.model.backbone import resolve_device
from rlft.plan.train_plan import TrainPlan
from rlft.reward.workers.reward_members import RewardMembers, reward_specs
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.system.process.launcher import open_launcher
from rlft.system.process.member import Launcher
from rlft.system.process.placement import all_gpus, environment_of


class Gpus(TypedDict):
    """The fields of a `MemberSpec` that say which GPUs it has."""

    gpus: float
    environment: Mapping[str, str]


def gpus_of_a_member(config: RunConfig, gpus: Sequence[int]) -> Gpus:
    """The fields for a member with these GPUs of the run's placement.

    A cluster that the run has joined assigns GPUs itself. Members on this machine, also those of a Ray that the run
    has started, see theirs through environment variables.
    """
    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return {"gpus": 0, "environment": {}}
    if config.cluster.is_joined:
        return {"gpus": len(gpus), "environment": {}}
    return {"gpus": 0, "environment": environment_of(gpus, all_gpus(device))}


def opened_launcher(plan: TrainPlan, folder: Path) -> AbstractContextManager[Launcher]:
    """Opens the launcher of a run's engines and ranks; it keeps the run's own GPU from them unless they share it."""
    config, device = plan.config, resolve_device(plan.config.model.device)
    on_gpus = device.type == "cuda"
    own_gpu = all_gpus(device)[0] if on_gpus else None
    scorers = config.scoring.workers if config.cluster.scoring else 0
    threads = torch.get_num_threads()
    return open_launcher(config.cluster, folder, on_gpus=on_gpus, own_gpu=own_gpu, threads=threads, scorers=scorers)


def open_reward_members(
    config: RunConfig, launcher: Launcher, note: Callable[[str], None], rewards: Sequence[RewardSpec]
) -> RewardMembers:
    """The reward workers of a run on the cluster.

    Args:
        config: the run's config.
        launcher: starts the members.
        note: called with a line when a worker is replaced.
        rewards: the rewards that they score with.
    """
    scoring = config.scoring
    specs = reward_specs(rewards, scoring.workers, scoring.timeout)
    return RewardMembers(launcher, specs, timeout_s=scoring.timeout, answer_s=config.cluster.timeout, note=note)


def model_of_a_member(model: ModelConfig) -> ModelConfig:
    """The model's settings for a process that sees only its own GPUs."""
    return replace(model, device=resolve_device(model.device).type)
