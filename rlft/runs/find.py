"""Finds the run that is meant by a name: a folder, a folder with one run below it, or `latest`; and its checkpoint.

Keys of adapters and models name runs, too: `lora.path=runs/sft/<time>` means the policy of its newest checkpoint, so
that the stages of a pipeline name each other by their run folders. A run's config records the folder that the name
meant when the run started: a resume uses the same adapter, even if the other run has continued."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.config import command as commands
from rlft.config.command import UnknownCommandError
from rlft.config.keys import KEYWORDS, flatten, keys_of, with_values
from rlft.config.schema import packages
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.chain import CHAIN
from rlft.runs.fork import FORKED_FROM
from rlft.runs.lines import METRICS, read_lines, silent
from rlft.runs.run_folder import CONFIG, checkpoints, files_of_code, whole_config
from rlft.runs.run_status import FILE as STATUS, PROGRESS, Status
from rlft.system.files import digest_of_file
from rlft.system.machine import processor
from rlft.system.terminal import Say, say
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.config.compose import Composed
    from rlft.config.model import ModelConfig  # not at run time: refusals here come before torch is imported
    from rlft.config.overrides import Arguments


LATEST = "latest"
RUNS = Path("runs")
WRITTEN_BY_RUNS = (CONFIG, STATUS, METRICS, PROGRESS)
"""Files that only the run itself writes, so that evaluating or reporting an older run does not make it the latest."""
CHECKPOINTS = "checkpoints"
INSIDE = (CHECKPOINTS, "rollouts", "evaluations")  # folders of a run that hold no other run
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

    `latest` may also begin a path, such as `latest/checkpoints/step_000040`. `key` names the run, for errors; `say`
    prints which run was chosen, if the name does not show it.
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
        newest = [str(run) for run in reversed(runs)]
        rest = f" and {len(newest) - MAX_LISTED} more, which rlft runs lists" if len(newest) > MAX_LISTED else ""
        remedy = f"name one of them; the newest is {newest[0]}, before it came {', '.join(newest[1:MAX_LISTED])}{rest}"
        raise UserError(key, f"there are {len(runs)} runs in that folder", got=name, remedy=remedy)
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


def setting_name(values: Mapping[str, object]) -> str:
    """What runs with these values of their keys are called among others, fractions with four digits.

    >>> setting_name({"trainer.lr": "3e-5", "lora.rank": 8, "algorithm": "grpo"})
    'trainer.lr=3e-05, lora.rank=8, algorithm=grpo'
    """

    def shown(value: object) -> str:
        text = str(value)
        try:
            return text if re.fullmatch("[a-z]*|-?[0-9]+", text, re.IGNORECASE) else f"{float(text):.4g}"
        except ValueError:
            return text

    return ", ".join(f"{key}={shown(value)}" for key, value in values.items())


def _is_run(folder: Path) -> bool:
    """Whether the folder's config.yaml is that of a run, even of a command that no longer exists."""
    try:
        whole_config(folder)
    except UnknownCommandError:
        return True  # so that it is refused for its command, and not skipped
    except (OSError, ValueError):
        return False
    return True


def _last_written(run: Path) -> float:
    """The newest modification time among the files that only the run itself writes, in nanoseconds."""
    times = []
    for name in WRITTEN_BY_RUNS:
        with contextlib.suppress(OSError):
            times.append((run / name).stat().st_mtime_ns)
    return max(times, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run that a user has named."""

    run: Path
    config: dict[str, Any]
    checkpoint: Path | None  # the folder of the named checkpoint; None for the newest


def find(path: Path) -> NamedRun:
    """The run in this folder, or the run of the checkpoint in this folder."""
    is_checkpoint = (path / checkpoint.STATE).is_file()
    run = path if not is_checkpoint else path.parents[1] if len(path.parents) > 1 else path.absolute().parents[1]
    config = run_folder.read(run, "run")
    config.pop(run_folder.ORIGIN, None)
    return NamedRun(run=run, config=config, checkpoint=path if is_checkpoint else None)


class CheckpointKind(StrEnum):
    """What a checkpoint holds, by folder: a whole model, a policy's adapter, or a reward model's, with its head."""

    weights = "model"
    policy = "policy"
    reward = "reward"


def find_checkpoint(source: NamedRun, say: Callable[[str], None]) -> Path:
    """The folder of the named checkpoint, or of the run's newest undamaged one.

    Newer checkpoints that are damaged are reported through `say` and skipped, as is what has changed since the run.
    """
    for note in changes_since(source.run):
        say(f"note: {note}")
    if source.checkpoint is not None:
        damage = checkpoint.find_damage(source.checkpoint)
        if damage is not None:
            problem = f"the checkpoint is damaged ({damage})"
            raise UserError("run", problem, got=source.checkpoint, remedy="name another")
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
    for kind in CheckpointKind:
        if (folder / kind / ("config.json" if kind is CheckpointKind.weights else "adapter_config.json")).is_file():
            return kind
    problem = f"there is no {', '.join(CheckpointKind)} in that checkpoint"
    raise UserError("run", problem, got=folder, remedy="point it at a run of rlft")


def check_own_model(folder: Path, model: ModelConfig) -> None:
    if Path(model.path).expanduser().resolve() != (folder / CheckpointKind.weights).resolve():
        problem = "is not the model that this run has trained"
        raise UserError("model.path", problem, got=model.path, remedy="leave it out")


def with_named_runs(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every run or checkpoint that a key names replaced by the folder of the role in it."""
    values = flatten(plain)
    return with_values(plain, {key: folder_of(values[key], roles, key) for key, roles in adapter_references(plain)})


def adapter_references(plain: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """(key, acceptable roles in order of preference) for every key that may name a run and is not empty."""
    root, values = commands.named(plain.get("command", "train")).root, flatten(plain)
    adapters: list[tuple[str, Sequence[str]]] = [(key, of.roles) for key, of in keys_of(root).items() if of.roles]
    adapters += [(f"reward.{name}.path", ("reward", f"reward_{name}")) for name in plain.get("reward", {})]
    for key, roles in adapters:
        if isinstance(value := values.get(key), str) and value:
            yield key, roles


def _may_name_a_run(folder: Path) -> bool:
    """Whether this is `latest`, or a folder that is neither an adapter nor a model, so that runs may be below it."""
    if str(folder) in KEYWORDS:
        return False
    if not folder.is_dir():
        return folder.parts[:1] == (LATEST,)
    return not any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def folder_of(path: str, roles: Sequence[str], key: str) -> str:
    """The folder of the first of these roles in a checkpoint or in a run's newest undamaged one; else the path."""
    folder = Path(path).expanduser()
    if _may_name_a_run(folder):
        folder = one_run(str(folder), key, say)
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        newest = checkpoint.newest_whole(checkpoints(folder), say)
        if newest is None:
            remedy = "let it reach one first, or name an adapter folder"
            raise UserError(key, "that run has no checkpoint", got=path, remedy=remedy)
        folder = newest
    elif not (folder / checkpoint.STATE).is_file() or not (folder / checkpoint.MANIFEST).is_file():
        return path
    for role in roles:
        if (folder / role).is_dir():
            return str(folder / role)
    folders = ", ".join(sorted(f.name for f in folder.iterdir() if f.is_dir())) or "none"
    problem = f"that checkpoint has no {' or '.join(roles)}, only {folders}"
    raise UserError(key, problem, got=folder, remedy="name the run of another kind, or the folder itself")


SHARED_WITH_RUNS = ("model", "prompts", "generation", "data", "reward", "environment", "scoring", "freshness",
                    "token_budget")  # fmt: skip


def like_run(plain: Mapping[str, Any], source: NamedRun) -> dict[str, Any]:
    """The config with the run's model, data, rewards and sampling, and its policy as the sampler."""
    shared = {key: source.config[key] for key in SHARED_WITH_RUNS if key in source.config}
    shared.setdefault("data", {})  # a run without a task has no prompts: the user must name some
    policy = str(source.checkpoint or source.run)
    if source.config.get("lora", {}) is None:  # the policy is the model itself
        return {**plain, **shared, "model": {**source.config["model"], "path": policy}}
    return {**plain, **shared, "adapter": policy}


def composed_like_a_run(parsed: Arguments) -> Composed | None:
    """The config of `rlft sample run=<run>`; None if no run is named."""
    from rlft.config import compose as configs
    from rlft.config.overrides import check_no_options

    run_name = parsed.value("run")
    if run_name is None:
        return None
    check_no_options(parsed)
    source = find(one_run(run_name, "run", say))
    for note in changes_since(source.run):
        say(f"note: {note}")
    folder_overrides = [o for o in parsed.overrides if o.startswith(("hydra.", "resume=", "name="))]
    run = configs.compose_run(folder_overrides, parsed.config_dir, "sample")
    changes = [o for o in parsed.overrides if not o.startswith(("hydra.", "run="))]
    plain = configs.changed(like_run(run.plain, source), changes, parsed.config_dir, "sample")
    return configs.Composed(plain=plain, folder=run.folder)


# -- what has changed since a run was last running: libraries, own code, its config.yaml -------------------------------
def changes_since(run: Path) -> list[str]:
    """Sentences for whoever resumes, evaluates or exports the run in this folder: what is no reason to refuse it."""
    return [note for note in (other_libraries(run), other_code(run), _other_config(run)) if note is not None]


def other_libraries(run: Path) -> str | None:
    """The libraries that are not those with which the run began, in a sentence; builds of one version are equal."""
    config = run_folder.read(run, "run")
    origin = config[run_folder.ORIGIN]
    now = run_folder.versions([*run_folder.PACKAGES, *packages(config.get("generation") or {})])
    pairs = {name: (str(origin[name]).split("+")[0], now[name].split("+")[0]) for name in now if name in origin}
    changed = [f"{name} {before} -> {after}" for name, (before, after) in pairs.items() if before != after]
    return f"libraries changed since the run began: {', '.join(changed)}" if changed else None


def other_code(run: Path) -> str | None:
    """The files of rewards and other classes that are not as they were, in a sentence."""
    config = run_folder.read(run, "run")
    begun, files = config[run_folder.ORIGIN].get(run_folder.CODE, {}), files_of_code(config)
    changed = {
        str(file): run_folder.copy_of_code(run, file, begun[key])
        for key, file in files.items()
        if key in begun and not (file.expanduser().is_file() and digest_of_file(file.expanduser()) == begun[key])
    }
    listed = ", ".join(f"{file} (as it was: {copied})" for file, copied in changed.items())
    return f"code of your own changed since the run began, and is used as it is now: {listed}" if changed else None


def other_processor(run: Path) -> str | None:
    """That another processor than this, and no GPU, made the run's last step, in a sentence for whoever resumes it."""
    made = (read_lines(run / CHAIN, silent) or [{}])[-1].get("machine", {})
    if made.get("device") != "cpu" or made["processor"] == processor():
        return None
    return f"the processor is {processor()}, and was {made['processor']}: numbers may have other last bits from here on"


def _other_config(run: Path) -> str | None:
    """That config.yaml is not the file with which the run's last step was made."""
    lines = read_lines(run / CHAIN, silent)
    if not lines or lines[-1]["sha256"].get("config") in (None, digest_of_file(run_folder.config_file(run))):
        return None
    forked = (run_folder.read(run, "run")[run_folder.ORIGIN].get(FORKED_FROM) or {}).get("step", -1)
    if lines[-1]["step"] <= forked:
        return None
    changed = f"{run_folder.CONFIG} changed since step {lines[-1]['step']}"
    return f"{changed}: keys were edited in it, or the run was resumed with others and has done no step since"
