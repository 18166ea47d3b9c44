"""Finds the run that a verb uses, one of its checkpoints and its kind, and checks that the base is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.run_status import Status
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.config.model import ModelConfig  # not at run time: refusals here come before torch is imported


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run that a user has named.

    Attributes:
        run: the run's folder.
        config: its plain config.
        checkpoint: the folder of the named checkpoint; None for the newest.
    """

    run: Path
    config: dict[str, Any]
    checkpoint: Path | None


def find(path: Path) -> NamedRun:
    """The run in this folder, or the run of the checkpoint in this folder."""
    is_checkpoint = (path / checkpoint.STATE).is_file()
    run = path if not is_checkpoint else path.parents[1] if len(path.parents) > 1 else path.absolute().parents[1]
    config = run_folder.read(run, "run")
    config.pop(run_folder.ORIGIN, None)
    return NamedRun(run=run, config=config, checkpoint=path if is_checkpoint else None)


class CheckpointKind(StrEnum):
    """The kind of a checkpoint: a whole model, a policy's adapter, or a reward model's adapter with its head.

    The value is the name of the folder in the checkpoint.
    """

    weights = "model"
    policy = "policy"
    reward = "reward"


def find_checkpoint(source: NamedRun, say: Callable[[str], None]) -> Path:
    """The folder of the named checkpoint, or of the run's newest undamaged one.

    Newer checkpoints that are damaged are reported through `say` and skipped.

    Raises:
        UserError: the run has no checkpoint, or only damaged ones.
    """
    if source.checkpoint is not None:
        damage = checkpoint.find_damage(source.checkpoint)
        if damage is not None:
            raise UserError(
                "run", f"the checkpoint is damaged ({damage})", got=source.checkpoint, remedy="name another"
            )
        return source.checkpoint
    root = run_folder.checkpoints(source.run)
    folder = checkpoint.newest_whole(root, say)
    if folder is not None:
        return folder
    if checkpoint.finished(root):
        raise UserError("run", "every checkpoint of this run is damaged", got=source.run, remedy="name another run")
    has_status = (source.run / run_status.FILE).is_file()  # without the file a run counts as finished
    if has_status and run_status.read(source.run)[0] is Status.finished:
        problem, remedy = "there is no checkpoint in that run, which is finished", "name another run, or train it again"
    else:
        problem, remedy = "there is no checkpoint in that run yet", "let it reach checkpoint.every steps first"
    raise UserError("run", problem, got=source.run, remedy=remedy)


def kind_of_checkpoint(folder: Path) -> CheckpointKind:
    """The kind of the checkpoint in this folder."""
    for kind in CheckpointKind:
        if (folder / kind / ("config.json" if kind is CheckpointKind.weights else "adapter_config.json")).is_file():
            return kind
    problem = f"there is no {', '.join(CheckpointKind)} in that checkpoint"
    raise UserError("run", problem, got=folder, remedy="point it at a run of rlft")


def check_base(folder: Path, model: ModelConfig) -> None:
    """Refuses a base other than the one that this checkpoint was trained on."""
    from rlft.model.backbone import fingerprint

    trained_on = json.loads((folder / checkpoint.STATE).read_text()).get("base_fingerprint")
    if trained_on != fingerprint(model):
        raise UserError(
            "model.path",
            "is not the base this run was trained on",
            got=model.path,
            remedy="leave it as it was, or, if the base has moved, write model.path=<its new folder>",
        )


def check_own_model(folder: Path, model: ModelConfig) -> None:
    """Refuses a model other than the one that this checkpoint holds."""
    if Path(model.path).expanduser().resolve() != (folder / CheckpointKind.weights).resolve():
        problem = "is not the model that this run has trained"
        raise UserError("model.path", problem, got=model.path, remedy="leave it out")
