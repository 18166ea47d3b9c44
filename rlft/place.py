"""The run that a verb is about: which checkpoint of it, what it holds, and that the base is still its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft import runfolder
from rlft.trainer import checkpoint
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.model.config import ModelConfig  # not at run time: what is refused here is refused before torch could


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run, or one checkpoint of it. config: the run's plain config. checkpoint: its folder, None for the newest."""

    run: Path
    config: dict[str, Any]
    checkpoint: Path | None


def find(path: Path) -> Place:
    """The run that this folder is, or belongs to as a checkpoint."""
    is_checkpoint = (path / checkpoint.STATE).is_file()
    run = path if not is_checkpoint else path.parents[1] if len(path.parents) > 1 else path.absolute().parents[1]
    config = runfolder.read(run, "run")
    config.pop(runfolder.ORIGIN, None)
    return Place(run=run, config=config, checkpoint=path if is_checkpoint else None)


class Holds(StrEnum):
    """What a checkpoint is of, by the name of its folder in it.

    weights: a whole model. policy: a policy's adapter. reward: a reward model's adapter with its head, and no policy.
    """

    weights = "model"
    policy = "policy"
    reward = "reward"


def find_checkpoint(place: Place, say: Callable[[str], None]) -> Path:
    """The folder of the checkpoint that was named, or of the run's newest whole one, found whole.

    Damaged ones that are newer are named through `say` and passed over.

    Raises:
        UserError: there is none, or what there is is damaged.
    """
    if place.checkpoint is not None:
        damage = checkpoint.find_damage(place.checkpoint)
        if damage is not None:
            raise UserError("run", f"the checkpoint is damaged ({damage})", got=place.checkpoint, remedy="name another")
        return place.checkpoint
    root = runfolder.checkpoints(place.run)
    folder = checkpoint.newest_whole(root, say)
    if folder is not None:
        return folder
    if checkpoint.finished(root):
        raise UserError("run", "every checkpoint of this run is damaged", got=place.run, remedy="name another run")
    remedy = "let it reach checkpoint.every steps first"
    raise UserError("run", "there is no checkpoint in that run yet", got=place.run, remedy=remedy)


def what_it_holds(folder: Path) -> Holds:
    """What the checkpoint in this folder is of."""
    for held in Holds:
        if (folder / held / ("config.json" if held is Holds.weights else "adapter_config.json")).is_file():
            return held
    problem = f"there is no {', '.join(Holds)} in that checkpoint"
    raise UserError("run", problem, got=folder, remedy="point it at a run of rlft")


def check_base(folder: Path, model: ModelConfig) -> None:
    """Refuses a base other than the one that the checkpoint in this folder was trained on."""
    from rlft.model.backbone import fingerprint

    before = json.loads((folder / checkpoint.STATE).read_text()).get("base_fingerprint")
    if before != fingerprint(model):
        raise UserError(
            "model.path",
            "is not the base this run was trained on",
            got=model.path,
            remedy="leave it as it was, or, if the base has moved, say model.path=<where it is now>",
        )


def check_own_model(folder: Path, model: ModelConfig) -> None:
    """Refuses another model in place of the one that the checkpoint in this folder holds whole."""
    if Path(model.path).expanduser().resolve() != (folder / Holds.weights).resolve():
        problem = "is not the model that this run has trained"
        raise UserError("model.path", problem, got=model.path, remedy="leave it out")
