"""Names of runs: a run's folder, a folder with one run below it, or `latest`.

`latest` is the run below `runs/` that was started, resumed or trained last. A folder of that name in the working
directory takes precedence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlft.config.command import UnknownVerbError
from rlft.logger.jsonl import METRICS
from rlft.runs import checkpoint
from rlft.runs.run_folder import CONFIG, whole_config
from rlft.runs.run_status import FILE as STATUS
from rlft.runs.run_status import PROGRESS
from rlft.system.terminal import Say
from rlft.types import UserError

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
