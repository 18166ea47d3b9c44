"""A fork: a new run that starts from a checkpoint of another one.

Its folder gets the checkpoint and the other run's logs up to that step, so that its curves are complete and `step`
continues. config.yaml is written last: a kill before that leaves no run; afterwards the fork is resumed like any run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft.config import command as commands
from rlft.config.keys import is_below, known
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.chain import CHAIN
from rlft.runs.lines import ALARMS, EVALUATIONS, METRICS, ROLLOUTS, open_after, rollout_files
from rlft.runs.run_folder import same_path
from rlft.system.disk import BLOCK, DiskError, writing
from rlft.system.files import digest_of_file, size_of
from rlft.system.terminal import command_line
from rlft.types import UserError

FORKED_FROM = "forked_from"
WRITTEN = ("checkpoints", ROLLOUTS, METRICS, EVALUATIONS, ALARMS, CHAIN, run_status.FILE, run_status.LOCK)
"""Files of a fork's folder that are written before its config.yaml."""

MOVING_REFERENCES = ("copy", "ema")
"""References whose adapter is saved in checkpoints; `base`, `none` and a folder have no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The checkpoint that a new run starts from."""

    run: Path
    checkpoint: Path  # the folder of one of its checkpoints, which is undamaged
    before: Mapping[str, Any]  # the forked run's config, without its origin
    origin: Mapping[str, Any]  # the forked run's origin, with the fingerprints of its inputs

    @property
    def step(self) -> int:
        return checkpoint.step_of(self.checkpoint)


def open_fork(run: Path, folder: Path) -> Fork:
    """The fork of a run from the checkpoint in this folder; refuses a damaged one."""
    damage = checkpoint.find_damage(folder)
    if damage is not None:
        raise UserError("resume", f"the checkpoint is damaged ({damage})", got=folder, remedy="name another")
    before = run_folder.read(run)
    origin = before.pop(run_folder.ORIGIN, None) or {}
    return Fork(run=run, checkpoint=folder, before=before, origin=origin)


def forking(folder: Path, *words: str) -> str:
    """The command that starts a new run from this checkpoint, with more steps if the forked run had none left."""
    step, steps = checkpoint.step_of(folder), run_folder.read(folder.parent.parent).get("steps")
    more_steps = [] if steps and steps > step else [f"steps={2 * step}"]
    return command_line("rlft", "resume", folder, *more_steps, *words)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (value in the forked run, value in the fork)} of keys that differ."""
    first, second = run_folder.flatten(before), run_folder.flatten(now)
    keys = sorted((first.keys() | second.keys()) - {"resume"})
    values = {key: (first.get(key), second.get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1] and not same_path(*pair)}


def check(fork: Fork, config: Mapping[str, Any], fingerprints: Mapping[str, str], num_steps: int) -> None:
    """Refuses a fork whose config or inputs do not fit the checkpoint, or that has no step left.

    num_steps: number of steps of the whole run, including those before the fork.
    """
    changed = changes(fork.before, config)
    unfit = [f"{key}: {before} -> {now}" for key, (before, now) in changed.items() if _is_state(key, fork, config)]
    if unfit:
        problem = f"the checkpoint holds adapters, heads and averages made with other values ({'; '.join(unfit)})"
        raise UserError("resume", problem, got=fork.checkpoint, remedy="leave these keys as they were")

    root = commands.named(config["command"]).root

    def replaced(key: str) -> bool:
        section = key.partition(".")[0]
        if section == "model":
            return False
        if section in ("snapshot", "reward", "lora", "critic"):
            return key in changed
        return any(is_below(name, (section,)) or known(root, name).of_data for name in changed)

    run_folder.check_same_inputs(fork.origin, fingerprints, replaced)
    if num_steps <= fork.step:
        remedy = f"raise it, for instance steps={2 * fork.step}"
        raise UserError("steps", f"the new run begins after step {fork.step}", got=num_steps, remedy=remedy)


def _is_state(key: str, fork: Fork, config: Mapping[str, Any]) -> bool:
    """Whether a new value of the key needs state that the forked run's checkpoint lacks, or holds in another form."""
    old_values, new_values = run_folder.flatten(fork.before), run_folder.flatten(config)
    values = (old_values.get(key), new_values.get(key))
    if key == "snapshot.reference":
        return any(value in MOVING_REFERENCES for value in values)
    if key == "snapshot.old":
        return "copy" in values
    if key == "reward_model.refresh_every":
        return bool(values[0]) != bool(values[1])
    if key.startswith("reward.") and key.endswith((".path", "._target_")):
        return bool(old_values.get("reward_model.refresh_every"))
    return bool(known(commands.named(config["command"]).root, key).in_state)


def begin(fork: Fork, folder: Path, config: Mapping[str, Any], fingerprints: Mapping[str, str], num_steps: int) -> None:
    """Makes the new run's folder, which then looks like that of a run interrupted after the fork's step."""
    with run_folder.held(folder):
        run_folder.check_free(folder)
        changed = changes(fork.before, config)
        root = run_folder.checkpoints(folder)
        copied = root / fork.checkpoint.name
        for other in sorted(path for path in root.glob("*") if path != copied):
            problem = f"there is a {other.name} in its {root.name}"
            raise UserError("hydra.run.dir", problem, got=folder, remedy="choose a new folder")
        record = {
            "run": os.path.relpath(fork.run, folder),
            "step": fork.step,
            # of the manifest, which holds the checksums of all the checkpoint's files
            "checkpoint": digest_of_file(fork.checkpoint / checkpoint.MANIFEST),
            "changed": {key: f"{before} -> {now}" for key, (before, now) in changed.items()},
        }
        with run_folder.removed_on_failure(folder, WRITTEN):
            _copy_checkpoint(fork, copied, changed)
            _copy_logs(fork, folder)
            run_status.write(folder, num_steps, run_status.Status.interrupted)
            run_folder.write_config(folder, {**config, "resume": None}, fingerprints, {FORKED_FROM: record})


def _copy_checkpoint(fork: Fork, copied: Path, changed: Mapping[str, Any]) -> None:
    shutil.rmtree(copied, ignore_errors=True)  # left by a fork into this folder that was killed
    try:
        with writing(copied, size_of(fork.checkpoint)):
            shutil.copytree(fork.checkpoint, copied)
        damage = checkpoint.find_damage(copied)
    except DiskError as error:
        if fork.checkpoint.is_dir():
            raise
        damage = str(error.__cause__)
    if damage is not None:
        problem = f"the checkpoint could not be copied ({damage})"
        raise UserError("resume", problem, got=fork.checkpoint, remedy="name one that the run keeps")
    if any(key.startswith("algorithm.kl_") or key == "algorithm._target_" for key in changed):
        # A controller's saved coefficient would replace the one in the new config.
        checkpoint.change_state(copied, {"algorithm": {}})


def _copy_logs(fork: Fork, folder: Path) -> None:
    """Copies the lines of metrics, evaluations, alarms and chain, and the rollouts, up to the fork's step."""
    for name in (METRICS, EVALUATIONS, ALARMS, CHAIN):
        if (fork.run / name).is_file():
            with writing(folder / name, (fork.run / name).stat().st_size):
                shutil.copyfile(fork.run / name, folder / name)
            open_after(folder / name, fork.step).close()
    files = [file for file, step in rollout_files(fork.run) if step <= fork.step and file.suffix != ".tmp"]
    with writing(folder / ROLLOUTS, sum(file.stat().st_size + BLOCK for file in files)):
        (folder / ROLLOUTS).mkdir(exist_ok=True)
        for file in files:
            shutil.copyfile(file, folder / ROLLOUTS / file.name)
