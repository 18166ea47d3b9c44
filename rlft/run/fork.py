"""A fork: a new run that goes on from a checkpoint of another one.

Its folder gets the checkpoint, and what the other run had logged up to there, so that its curves are whole and `step`
counts on. config.yaml is written last: before it is there, a kill leaves no run; afterwards the fork is resumed like
any run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlft import run_status, runfolder
from rlft.logger.jsonl import ALARMS, EVALUATIONS, METRICS, ROLLOUTS, open_after, rollout_files
from rlft.run import paths
from rlft.trainer import checkpoint
from rlft.types import UserError
from rlft.work import command_line

FORKED_FROM = "forked_from"
MOVING_REFERENCES = ("copy", "ema")
"""References that are adapters in the checkpoint; `base`, `none` and a folder have no state."""

DEPENDS_ON = ("verb", "lora", "model", "critic.kind", "critic.init", "critic.normalize_values")
"""Keys, with those below them, that say what the tensors in a checkpoint are."""
INDEPENDENT = ("lora.dropout", "model.path", "model.device", "model.gradient_checkpointing",
               "model.attn_implementation")  # fmt: skip
"""Exceptions among them. Another base at model.path is refused by its fingerprint."""
OF_DATA = ("prompts", "max_completion_tokens")
"""Keys that change what is read of data, and so their fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """What a new run goes on from.

    Args:
        run: the folder of the run that is forked.
        checkpoint: one of its checkpoints, which is whole.
        before: the run's config, without its origin.
        origin: of the run, with the fingerprints of what it was made from.
    """

    run: Path
    checkpoint: Path
    before: Mapping[str, Any]
    origin: Mapping[str, Any]

    @property
    def step(self) -> int:
        return checkpoint.step_of(self.checkpoint)


def open_fork(run: Path, folder: Path) -> Fork:
    """The fork of a run from the checkpoint in this folder.

    Raises:
        UserError: the checkpoint is damaged.
    """
    damage = checkpoint.find_damage(folder)
    if damage is not None:
        raise UserError("resume", f"the checkpoint is damaged ({damage})", got=folder, remedy="name another")
    before = runfolder.read(run)
    origin = before.pop(runfolder.ORIGIN, None) or {}
    return Fork(run=run, checkpoint=folder, before=before, origin=origin)


def forking(folder: Path, *words: str) -> str:
    """The command that begins a new run from this checkpoint: with more steps where the forked run had no more."""
    step, steps = checkpoint.step_of(folder), runfolder.read(folder.parent.parent).get("steps")
    more = [] if steps and steps > step else [f"steps={2 * step}"]
    return command_line("rlft", "resume", folder, *more, *words)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (value in the forked run, value in the fork)} of the keys that differ."""
    first, second = runfolder.flatten(before), runfolder.flatten(now)
    keys = sorted((first.keys() | second.keys()) - {"resume"})
    values = {key: (first.get(key), second.get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1] and not paths.same_path(*pair)}


def check(fork: Fork, config: Mapping[str, Any], fingerprints: Mapping[str, str], num_steps: int) -> None:
    """Refuses a fork that the checkpoint does not fit, or that has no step left.

    Args:
        fork: what the new run goes on from.
        config: the new run's plain config.
        fingerprints: of its data, base and adapters.
        num_steps: how many steps it has in all, those before the fork included.

    Raises:
        UserError: naming every key that the checkpoint does not fit, or the input that changed.
    """
    changed = changes(fork.before, config)
    unfit = [f"{key}: {before} -> {now}" for key, (before, now) in changed.items() if _is_state(key, fork, config)]
    if unfit:
        problem = f"the checkpoint holds adapters, heads and averages made with other values ({'; '.join(unfit)})"
        raise UserError("resume", problem, got=fork.checkpoint, remedy="leave these keys as they were")

    def replaced(key: str) -> bool:
        section = key.partition(".")[0]
        if section == "model":
            return False
        if section in ("snapshot", "reward", "lora", "critic"):
            return key in changed
        return any(_is_below(name, (section, *OF_DATA)) for name in changed)

    runfolder.check_same_inputs(fork.origin, fingerprints, replaced)
    if num_steps <= fork.step:
        remedy = f"raise it, for instance steps={2 * fork.step}"
        raise UserError("steps", f"the new run begins after step {fork.step}", got=num_steps, remedy=remedy)


def _is_state(key: str, fork: Fork, config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of the forked run has no state, or another one, for this value of the key."""
    before, now = runfolder.flatten(fork.before), runfolder.flatten(config)
    values = (before.get(key), now.get(key))
    if key == "snapshot.reference":
        return any(value in MOVING_REFERENCES for value in values)
    if key == "snapshot.old":
        return "copy" in values
    if key == "reward_model.refresh_every":
        return bool(values[0]) != bool(values[1])
    if key.startswith("reward.") and key.endswith((".path", "._target_")):
        return bool(before.get("reward_model.refresh_every"))
    return _is_below(key, DEPENDS_ON) and key not in INDEPENDENT


def _is_below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def begin(fork: Fork, folder: Path, config: Mapping[str, Any], fingerprints: Mapping[str, str], num_steps: int) -> None:
    """Makes the new run's folder, which then goes on like a run that was interrupted after the fork's step.

    Raises:
        UserError: the folder holds a run already, or the checkpoint was removed meanwhile.
    """
    with runfolder.held(folder):
        runfolder.check_free(folder)
        changed = changes(fork.before, config)
        _copy_checkpoint(fork, folder, changed)
        _copy_logs(fork, folder)
        run_status.write_interrupted(folder, num_steps)
        record = {
            "run": os.path.relpath(fork.run, folder),
            "step": fork.step,
            "checkpoint": _fingerprint(fork.checkpoint),
            "changed": {key: f"{before} -> {now}" for key, (before, now) in changed.items()},
        }
        runfolder.write_config(folder, {**config, "resume": None}, fingerprints, {FORKED_FROM: record})


def _copy_checkpoint(fork: Fork, folder: Path, changed: Mapping[str, Any]) -> None:
    root = runfolder.checkpoints(folder)
    copied = root / fork.checkpoint.name
    if others := sorted(path for path in root.glob("*") if path != copied):
        problem = f"there is a {others[0].name} in its {root.name}"
        raise UserError("hydra.run.dir", problem, got=folder, remedy="choose a new folder")
    shutil.rmtree(copied, ignore_errors=True)  # of a fork into this folder that was killed
    try:
        shutil.copytree(fork.checkpoint, copied)
        damage = checkpoint.find_damage(copied)
    except (OSError, shutil.Error) as error:
        damage = str(error)
    if damage is not None:
        problem = f"the checkpoint could not be copied ({damage})"
        raise UserError("resume", problem, got=fork.checkpoint, remedy="name one that the run keeps")
    if any(key.startswith("algorithm.kl_") or key == "algorithm._target_" for key in changed):
        # A controller's coefficient would go on in place of the one that is asked for now.
        checkpoint.change_state(copied, {"algorithm": {}})


def _copy_logs(fork: Fork, folder: Path) -> None:
    """The lines of metrics, evaluations and alarms, and the rollouts, up to the fork's step."""
    for name in (METRICS, EVALUATIONS, ALARMS):
        if (fork.run / name).is_file():
            shutil.copyfile(fork.run / name, folder / name)
            open_after(folder / name, fork.step).close()
    (folder / ROLLOUTS).mkdir(exist_ok=True)
    for file in _rollouts(fork):
        shutil.copyfile(file, folder / ROLLOUTS / file.name)


def _rollouts(fork: Fork) -> Iterator[Path]:
    return (file for file, step in rollout_files(fork.run) if step <= fork.step and file.suffix != ".tmp")


def _fingerprint(folder: Path) -> str:
    """sha256 (hex) of a checkpoint's manifest, which has the checksums of all its files."""
    return hashlib.sha256((folder / checkpoint.MANIFEST).read_bytes()).hexdigest()
