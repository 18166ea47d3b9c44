"""Opens the launcher of a run's members, and says which cards a member gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch

from rlft.cluster.cards import all_cards
from rlft.cluster.launcher import open_launcher
from rlft.cluster.member import Launcher
from rlft.cluster.placement import environment_of
from rlft.cluster.reward_members import RewardMembers, reward_specs
from rlft.config.schema import RunConfig
from rlft.model.backbone import resolve_device
from rlft.model.config import ModelConfig
from rlft.planning.train_plan import TrainPlan
from rlft.scoring.reward_spec import RewardSpec


class Cards(TypedDict):
    """The fields of a `MemberSpec` that say which cards it has."""

    gpus: float
    environment: Mapping[str, str]


def cards_of_a_member(config: RunConfig, cards: Sequence[int]) -> Cards:
    """The fields for a member with these cards of the run's placement.

    A cluster that the run has joined assigns cards itself. Members on this machine, also those of a Ray that the run
    has started, see theirs through environment variables.
    """
    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return {"gpus": 0, "environment": {}}
    if config.cluster.is_joined:
        return {"gpus": len(cards), "environment": {}}
    return {"gpus": 0, "environment": environment_of(cards, all_cards(device))}


def opened_launcher(plan: TrainPlan, folder: Path) -> AbstractContextManager[Launcher]:
    """Opens the launcher of a run's engines and ranks; it keeps the run's own card from them unless they share it."""
    config, device = plan.config, resolve_device(plan.config.model.device)
    on_cards = device.type == "cuda"
    own_card = all_cards(device)[0] if on_cards else None
    scorers = config.scoring.workers if config.cluster.scoring else 0
    threads = torch.get_num_threads()
    return open_launcher(config.cluster, folder, on_cards=on_cards, own_card=own_card, threads=threads, scorers=scorers)


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
    """The model's settings for a process that sees only its own cards."""
    return replace(model, device=resolve_device(model.device).type)
