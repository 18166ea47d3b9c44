"""Finds the run that is meant by a name: a folder, a folder with one run below it, or `latest`; and its checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.config.command import UnknownVerbError
from rlft.logger.jsonl import METRICS
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.run_folder import CONFIG, whole_config
from rlft.runs.run_status import FILE as STATUS
from rlft.runs.run_status import PROGRESS, Status
from rlft.system.terminal import Say
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.config.model import ModelConfig  # not at run time: refusals here come before torch is imported


LATEST = "latest"
RUNS = Path("runs")
WRITTEN_BY_RUNS = (CONFIG, STATUS, METRICS, PROGRESS)
"""Files that only the run itself writes, so that evaluating or reporting an older run does not make it the latest."""
CHECKPOINTS = "checkpoints"
INSIDE = (CHECKPOINTS, "rollouts", "evaluations")
"""Folders of a run that hold no other run."""
MAX_LISTED = 5


def run_folders(root: Path) -> Iterator[Path]:
    """Folders with a config.yaml, `root` itself and jobs of sweeps included."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in INSIDE and not name.startswith("."))
        if CONFIG in (*files, *subfolders):  # a folder of that name is a damaged run
            yield Path(folder)


def runs_below(folder: Path) -> list[Path]:
    """The runs in this folder and below it, those with the newest files last."""
    runs = [run for run in run_folders(folder) if _is_run(run)]
    return sorted(runs, key=lambda run: (_last_written(run), str(run)))


def one_run(name: str, key: str, say: Say) -> Path:
    """The folder of the named run or checkpoint; a path that is neither is returned unchanged, to be refused later.

    Args:
        name: the name as it was typed; `latest` may also begin a path, such as `latest/checkpoints/step_000040`.
        key: the key that names it, for errors: `run`, `resume`, a verb.
        say: prints which run was chosen, if the name does not show it.

    Raises:
        UserError: `latest` is named and there is no run, or the folder has several runs below it.
    """
    path = named_folder(name, key, say)
    if path.parent.name == CHECKPOINTS and path.parent.is_dir() and not path.exists():
        saved = [folder.name for folder in checkpoint.finished(path.parent)]
        remedy = f"name one of {', '.join(saved)}" if saved else "it has none; name another run"
        raise UserError(key, "the run has no such checkpoint", got=name, remedy=remedy)
    if not path.is_dir() or (path / CONFIG).is_file() or (path / checkpoint.STATE).is_file():
        return path
    runs = runs_below(path)
    if len(runs) == 1:
        say(f"{name}: {runs[0]}, the only run there")
        return runs[0]
    if runs:
        raise UserError(key, f"there are {len(runs)} runs in that folder", got=name, remedy=_choice(runs))
    return path


def named_folder(name: str, key: str, say: Say) -> Path:
    """The typed path with `latest` replaced by the latest run."""
    path = Path(name)
    if not path.parts or path.parts[0] != LATEST or Path(LATEST).exists():
        return path
    folders = sorted(run_folders(RUNS), key=_last_written, reverse=True)
    latest = next((folder for folder in folders if _is_run(folder)), None)
    if latest is None:
        remedy = "train one first (rlft train +recipe=grpo_arithmetic), or name a run's folder"
        raise UserError(key, f"there is no run below {RUNS.resolve()} yet", got=name, remedy=remedy)
    say(f"{LATEST}: {latest}")
    return latest.joinpath(*path.parts[1:])


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each key, or the whole key if two keys have the same last part.

    >>> short_names(["trainer.lr", "seed"]), short_names(["trainer.lr", "critic.lr"])
    (['lr', 'seed'], ['trainer.lr', 'critic.lr'])
    """
    last_parts = [key.rpartition(".")[2] for key in keys]
    return [last if last_parts.count(last) == 1 else key for last, key in zip(last_parts, keys, strict=True)]


def _is_run(folder: Path) -> bool:
    """Whether the folder's config.yaml is that of a run, even of a verb that no longer exists."""
    try:
        whole_config(folder)
    except UnknownVerbError:
        return True  # so that it is refused for its verb, and not skipped
    except (OSError, ValueError):
        return False
    return True


def _last_written(run: Path) -> float:
    """The newest modification time among the files that only the run itself writes, in nanoseconds."""
    times = []
    for name in WRITTEN_BY_RUNS:
        try:
            times.append((run / name).stat().st_mtime_ns)
        except OSError:
            continue
    return max(times, default=0)


def _choice(runs: Sequence[Path]) -> str:
    """A remedy that names the runs, the newest first."""
    newest = [str(run) for run in reversed(runs)]
    rest = f" and {len(newest) - MAX_LISTED} more, which rlft runs lists" if len(newest) > MAX_LISTED else ""
    return f"name one of them; the newest is {newest[0]}, before it came {', '.join(newest[1:MAX_LISTED])}{rest}"


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
