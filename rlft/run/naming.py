"""Runs as people name them: a run's folder, a folder that runs lie below, or `latest`.

`latest` is the run below `runs/` that was worked in last: started, resumed or trained. A folder of that name in the
working directory goes first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlft.logger.jsonl import METRICS
from rlft.run_status import FILE as STATUS
from rlft.runfolder import CONFIG, whole_config
from rlft.trainer import checkpoint
from rlft.types import UserError

LATEST = "latest"
RUNS = Path("runs")
WRITTEN_BY_RUNS = (CONFIG, STATUS, METRICS, "progress.json")
"""Files that only the run itself writes: an evaluation or a report of an older run doesn't make it the latest."""
INSIDE = ("checkpoints", "rollouts", "evaluations")
"""Folders of a run that hold no other run."""
MAX_LISTED = 5

Say = Callable[[str], None]


def run_folders(root: Path) -> Iterator[Path]:
    """Folders below `root`, or itself, that hold a config.yaml; jobs of sweeps included."""
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in INSIDE and not name.startswith("."))
        if CONFIG in (*files, *below):  # a folder in its place is damage
            yield Path(folder)


def runs_below(folder: Path) -> list[Path]:
    """The runs in this folder and below it, in the order in which they were last worked in."""
    runs = [run for run in run_folders(folder) if _is_run(run)]
    return sorted(runs, key=lambda run: (_last_worked_in(run), str(run)))


def one_run(name: str, key: str, say: Say) -> Path:
    """The folder that a verb of one run takes: of the run, or a checkpoint, or what is no run and will be refused.

    Args:
        name: as it was typed; `latest` may also begin a path, such as `latest/checkpoints/step_000040`.
        key: what the name was given as, for errors: `run`, `resume`, a verb.
        say: is told which run was taken, where the name doesn't say it.

    Raises:
        UserError: `latest` without any run, or a folder with several runs below it.
    """
    path = named_folder(name, key, say)
    if not path.is_dir() or (path / CONFIG).is_file() or (path / checkpoint.STATE).is_file():
        return path
    runs = runs_below(path)
    if len(runs) == 1:
        say(f"{name}: {runs[0]}, the one run there")
        return runs[0]
    if runs:
        raise UserError(key, f"there are {len(runs)} runs in that folder", got=name, remedy=_choice(runs))
    return path


def named_folder(name: str, key: str, say: Say) -> Path:
    """The path that was typed, with `latest` replaced by the run that it stands for."""
    path = Path(name)
    if not path.parts or path.parts[0] != LATEST or Path(LATEST).exists():
        return path
    folders = sorted(run_folders(RUNS), key=_last_worked_in, reverse=True)
    latest = next((folder for folder in folders if _is_run(folder)), None)
    if latest is None:
        remedy = "train one first (rlft train +recipe=grpo_arithmetic), or name a run's folder"
        raise UserError(key, f"there is no run below {RUNS.resolve()} yet", got=name, remedy=remedy)
    say(f"{LATEST}: {latest}")
    return latest.joinpath(*path.parts[1:])


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each key, and all of it where two end alike.

    >>> short_names(["trainer.lr", "seed"]), short_names(["trainer.lr", "critic.lr"])
    (['lr', 'seed'], ['trainer.lr', 'critic.lr'])
    """
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for end, key in zip(ends, keys, strict=True)]


def _is_run(folder: Path) -> bool:
    """Whether the config.yaml there is one of a run."""
    try:
        whole_config(folder)
    except (OSError, ValueError):
        return False
    return True


def _last_worked_in(run: Path) -> float:
    times = []
    for name in WRITTEN_BY_RUNS:
        try:
            times.append((run / name).stat().st_mtime_ns)
        except OSError:
            continue
    return max(times, default=0)


def _choice(runs: Sequence[Path]) -> str:
    """Names the runs, the newest first."""
    newest = [str(run) for run in reversed(runs)]
    more = f" and {len(newest) - MAX_LISTED} more, which rlft runs lists" if len(newest) > MAX_LISTED else ""
    return f"name one of them; the newest is {newest[0]}, before it came {', '.join(newest[1:MAX_LISTED])}{more}"
