"""A run's folder: its resolved config, in config.yaml, and whether a run may start or resume in it.

config.yaml keeps a path as it was typed, which may be relative to the working directory at that time. Its origin holds,
for every path that existed when the run started, the path relative to the run's folder. So the folder of a whole
pipeline can be moved or renamed, and a run can be used from any directory; fingerprints still show changed contents.

A key that is newer than the run has the value of what rlft did then. That value stands at the key, `Annotated[int,
Key(before=5)]`, in a typed section or in the class that a section's `_target_` names. Nothing else has to know that the
key is new. A class whose keys then meant something else has the static method `of_older(keys)`, which returns them as
they are written now."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import rlft
from rlft.config import command as commands
from rlft.config.command import UnknownCommandError
from rlft.config.instantiate import split_target
from rlft.config.keys import ABSENT, KEYWORDS, fields_of, flatten, is_below, is_path_key, keys_of, known, with_values
from rlft.config.schema import ANYWHERE, FASTEST, engine_classes, free_keys, packages
from rlft.config.trainer import kept_lanes
from rlft.runs import checkpoint, run_status
from rlft.runs.fingerprints import are_of_a_model, differing, models_in
from rlft.runs.run_status import FILE as STATUS, FORMAT, KEY, LOCK, NewerError, Status, check_format
from rlft.system import locks
from rlft.system.disk import DiskError, writing
from rlft.system.files import atomic_folder, digest_of_file, write_atomically
from rlft.system.hub import commit_of
from rlft.system.machine import installed_version
from rlft.system.terminal import command_line, override, resuming, say
from rlft.tokens.text import AUTO_DATE, today
from rlft.types import UserError, require

CONFIG = "config.yaml"
ORIGIN = "origin"
WHOLE = "whole"
"""The last key of the origin, and so of the file: a file that was cut short at the end of a line lacks it."""
MAX_NESTED = 1000  # the deepest nesting that is parsed with libyaml
_BEFORE_WORDS = re.compile(rb"^[ ?:-]+", re.MULTILINE)
"""The characters before a line's first word, each of which may begin a level of nesting."""


def whole_config(folder: Path) -> dict[str, Any]:
    """The plain config of a run, `command` and `origin` included, without the keys that mark the file as complete.

    Raises:
        OSError: the file cannot be read.
        UnknownCommandError: the run is of a command that does not exist, or no longer exists.
        NewerError: it was written by a newer rlft; the message says so.
        ValueError: it is damaged; the message says how.
    """
    content = (folder / CONFIG).read_bytes()
    try:
        config = _load(content)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError("it is no YAML") from None
    if not isinstance(config, dict):
        raise ValueError("it holds no keys")
    origin = config.get(ORIGIN)
    if not isinstance(origin, dict):
        raise ValueError(f"it is cut short, its {ORIGIN} is missing" if "command" in config else "it has no command")
    check_format(origin)
    if WHOLE not in origin or not content.endswith(b"\n"):
        raise ValueError(f"it is cut short, the end of its {ORIGIN} is missing")
    command = str(config.get("command"))
    try:
        commands.named(command)
    except UnknownCommandError as error:
        problem = f"{error.problem} (of the run in {folder})"
        raise UnknownCommandError(error.key, problem, got=command, remedy=error.remedy) from None
    return {**config, ORIGIN: {key: value for key, value in origin.items() if key not in (KEY, WHOLE)}}


def _load(content: bytes) -> Any:
    # libyaml takes 1 ms per config, Python 9 ms, but libyaml crashes on deep nesting.
    deepest = content.count(b"[") + content.count(b"{") + max(map(len, _BEFORE_WORDS.findall(content)), default=0)
    fast = yaml.__with_libyaml__ and deepest < MAX_NESTED
    return yaml.load(content, Loader=yaml.CSafeLoader if fast else yaml.SafeLoader)


def path_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, path) of every key that may name a local file or folder and is not empty; of a class, that of its file."""
    for key, value in flatten(config).items():
        if isinstance(value, str) and value and value not in KEYWORDS and is_path_key(key):
            yield key, value
    for key, file in files_of_code(config).items():
        yield key, str(file)


def files_of_code(config: Mapping[str, Any]) -> dict[str, Path]:
    """{key: file} of the classes and functions that are named in files of the user's own."""
    targets = {key: split_target(value) for key, value in flatten(config).items() if key.endswith("_target_")}
    return {key: Path(file) for key, (file, separator, _) in targets.items() if separator == ":"}


def recorded_paths(config: Mapping[str, Any], folder: Path) -> dict[str, dict[str, str]]:
    """{key: {value: the path in the config, relative: the path from the run's folder}} for every path that exists."""
    return {
        key: {"value": value, "relative": os.path.relpath(_absolute(value), folder.resolve())}
        for key, value in path_keys(config)
        if _absolute(value).exists()
    }


def with_located_paths(config: Mapping[str, Any], recorded: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with every path that `recorded_paths` has recorded valid from the current working directory."""
    values, located = flatten(config), dict[str, str]()
    for key, path in path_keys(config):
        entry = recorded.get(key)
        if isinstance(entry, Mapping) and entry.get("value") == path:  # otherwise it was edited by hand
            located[key] = values[key].replace(path, _located(path, folder, str(entry.get("relative"))), 1)
    return with_values(config, located)


def same_path(first: Any, second: Any) -> bool:
    """Whether both values are paths of the same existing file or folder."""
    if not may_have_moved(first, second):
        return False
    absolute = _absolute(first), _absolute(second)
    return absolute[0] == absolute[1] and absolute[0].exists()


def may_have_moved(first: Any, second: Any) -> bool:
    """Whether both values may be paths of the same thing, moved; its fingerprint tells whether they are."""
    return isinstance(first, str) and isinstance(second, str) and not {first, second} & set(KEYWORDS)


def _located(value: str, folder: Path, relative: str) -> str:
    """The typed path if it is still valid or nothing has moved with the run; else the path of what has moved."""
    relocated = (folder.resolve() / relative).resolve()
    if not relocated.exists() or relocated == _absolute(value):
        return value
    below = relocated.is_relative_to(Path.cwd().resolve())
    return os.path.relpath(relocated) if below else str(relocated)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


# -- keys that are newer than a run ------------------------------------------------------------------------------------
OPEN = ("data", "reward", "logger", "algorithm", "demonstrations", "preferences", "loss", "environment")
"""Sections whose classes are named by `_target_`, in the section itself or in sections of it."""
NOT_TRACKERS = {"console": "rlft.logger.console.Console", "jsonl": "rlft.logger.jsonl.Jsonl"}
"""{earlier choice in the group logger: its class} of what is no tracker."""


def completed(recorded: Mapping[str, Any], root: type) -> dict[str, Any]:
    """The recorded config of a command with this root, with the values of the keys that it lacks.

    A key without such a value stays absent, and is refused when the config is typed. A section is added if all of its
    keys have one.
    """
    config = _completed(_with_console(recorded, root), root)
    config |= {name: _with_components(config[name]) for name in OPEN if name in config}
    if isinstance(generation := config.get("generation"), Mapping):
        generation = _with_adapted_layers(generation, recorded["generation"], whole=config.get("lora", {}) is None)
        own = {name: (generation.get(name, {}), of) for name, of in engine_classes({}).items()}
        engines = {name: _section(getattr(of, "of_older", dict)(keys), of) for name, (keys, of) in own.items()}
        config["generation"] = {**generation, **{name: keys for name, keys in engines.items() if keys is not ABSENT}}
    return config


def _with_console(recorded: Mapping[str, Any], root: type) -> Mapping[str, Any]:
    """The recorded config with trackers alone as loggers: the terminal was one, too, and so were the run's files."""
    if "console" in recorded or "console" not in keys_of(root):
        return recorded
    loggers = recorded.get("logger") or {}
    shown = [keys for keys in loggers.values() if keys["_target_"] == NOT_TRACKERS["console"]]
    console = {name: value for keys in shown for name, value in keys.items() if name != "_target_"} or None
    trackers = {name: keys for name, keys in loggers.items() if keys["_target_"] not in NOT_TRACKERS.values()}
    return {**recorded, "logger": trackers, "console": console}


def _with_adapted_layers(
    generation: Mapping[str, Any], recorded: Mapping[str, Any], *, whole: bool
) -> Mapping[str, Any]:
    """The section as it is written now: before there were drafts, `merged_bfloat16` left the LM head and layers without
    an adapter as they are, and nothing corrected its roundings. For a `whole` model, without adapters, it did nothing.
    """
    keys = generation.get(ANYWHERE, {})
    if "drafts" in recorded or keys.get("weights") != "merged_bfloat16":
        return generation
    return {**generation, ANYWHERE: {**keys, "weights": "merged" if whole else "adapted_bfloat16"}}


def _completed(recorded: Mapping[str, Any], cls: type) -> dict[str, Any]:
    values = dict(recorded)
    for field in fields_of(cls):
        value = values.get(field.name, field.key.before)
        if field.section is not None and isinstance(inner := values.get(field.name, {}), Mapping):
            section_now = _section(inner, field.section)
            value = value if section_now is ABSENT else section_now
        if value is not ABSENT:
            values[field.name] = value
    return values


def _section(recorded: Mapping[str, Any], cls: type) -> Any:
    """The completed section; ABSENT if the config has none of its keys, and they cannot all be completed."""
    values = _completed(recorded, cls)
    return values if recorded or len(values) == len(dataclasses.fields(cls)) > 0 else ABSENT


def _with_components(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_components(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    inner = {name: _with_components(below) for name, below in value.items()}
    cls = _own_class(value.get("_target_"))
    return inner if cls is None else _completed(getattr(cls, "of_older", dict)(inner), cls)


def _own_class(target: Any) -> type | None:
    """The dataclass of rlft that the target names; what is outside the tree is not imported to read a config."""
    if not isinstance(target, str) or not target.startswith("rlft."):
        return None
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except ImportError:  # a class that is gone is refused when the run is used
        return None
    return cls if isinstance(cls, type) and dataclasses.is_dataclass(cls) else None


WRITTEN = (CONFIG, STATUS, "metrics.jsonl", "eval.jsonl", "alarms.jsonl", "chain.jsonl", "progress.json",
           "samples.jsonl")  # fmt: skip
"""Files that runs write."""
PATHS = "paths"  # the key of the origin under which the config's paths relative to the run's folder are
CODE = "code"  # the folder of copies of the user's own files, and the key of the origin with their digests
PACKAGES = ("torch", "transformers", "peft", "hydra-core", "datasets", "math-verify")


def config_file(folder: Path) -> Path:
    return folder / CONFIG


def checkpoints(folder: Path) -> Path:
    return folder / "checkpoints"


def steps_done(folder: Path) -> int:
    """The step of the newest undamaged checkpoint; 0 if there is none at all. Raises UserError: all are damaged."""
    damages: list[str] = []  # the run itself prints them when it resumes
    try:
        newest = checkpoint.newest_to_resume(checkpoints(folder), damages.append)
    except UserError:
        for damage in damages:
            say(damage)
        raise
    return 0 if newest is None else checkpoint.step_of(newest)


def claim(folder: Path, config: Mapping[str, Any], fingerprints: Mapping[str, str], num_steps: int) -> None:
    """Claims a new folder for a run: writes status.json, then config.yaml, so that every run has a status.

    Raises UserError: it already holds a run. Raises DiskError: it cannot be written; nothing is left in it.
    """
    check_free(folder)
    with removed_on_failure(folder, (STATUS, CODE)):
        run_status.write(folder, num_steps, Status.interrupted)
        write_config(folder, config, fingerprints)


@contextlib.contextmanager
def removed_on_failure(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Removes these files from a run's folder after a failure inside, and the folder if nothing else is in it."""
    try:
        yield
    except BaseException:
        for path in (folder / name for name in names):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise


def check_free(folder: Path) -> None:
    """Refuses a folder that already holds a run, or that could not be created.

    `check_writable` also tries to write there, once nothing else is wrong.
    """
    check_can_be_made(folder, "hydra.run.dir")
    if config_file(folder).exists():
        remedy = f"continue it with `{resuming(folder)}`, or choose another folder"
        raise UserError("hydra.run.dir", "there is a run in that folder", got=folder, remedy=remedy)


def check_can_be_made(folder: Path, key: str) -> None:
    """Refuses a folder that is none, or could not be created or written. key: that names it."""
    above = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    code = errno.ENOTDIR if not above.is_dir() else 0 if os.access(above, os.W_OK | os.X_OK) else errno.EACCES
    if code:
        problem = f"cannot be written ({os.strerror(code)})"
        raise UserError(key, problem, got=folder, remedy="choose another folder")


def check_writable(folder: Path, key: str = "hydra.run.dir") -> None:
    """Refuses a run folder that cannot be created, written to, flushed or renamed in.

    It also refuses a file with the name of a folder that runs write, and the reverse.
    """
    for name in WRITTEN:
        problem = f"its {name} is a folder instead of a file"
        require(not (folder / name).is_dir(), key, problem, got=folder, remedy="remove that folder")
    for name in ("checkpoints", "rollouts"):
        problem = f"its {name} is a file instead of a folder"
        require(not (folder / name).is_file(), key, problem, got=folder, remedy="remove that file")
    probe = folder / ".rlft_write_probe"
    try:
        # A kill here leaves the probe, which the next check replaces.
        with atomic_folder(probe, folder / ".rlft_write_probe.writing", replaces=True) as written, writing(written):
            (written / "file").touch()
    except DiskError as error:
        if not error.is_of_the_name:
            raise
        problem = f"cannot be written ({os.strerror(error.code)})"
        raise UserError(key, problem, got=folder, remedy="choose another folder") from None
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def write_config(
    folder: Path, config: Mapping[str, Any], fingerprints: Mapping[str, str], more: Mapping[str, Any] | None = None
) -> None:
    """Writes config.yaml, which makes the folder a run, with its origin: commit, versions, fingerprints and `more`."""
    origin = {
        "rlft": rlft.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **versions([*PACKAGES, *packages(config.get("generation", {}))]),
        **fingerprints,
        **(more or {}),
    }
    code = files_of_code(config)
    if code:
        origin[CODE] = {key: digest_of_file(file.expanduser()) for key, file in code.items()}
    for key, file in code.items():
        copied = copy_of_code(folder, file, origin[CODE][key])
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.expanduser(), copied)
    _write(folder, {**config, ORIGIN: origin})


def copy_of_code(folder: Path, file: Path, digest: str) -> Path:
    """Where a run's folder has its copy of a file with a reward or another class of the user's own."""
    return folder / CODE / digest[:12] / file.name


def read(folder: Path, key: str = "resume") -> dict[str, Any]:
    """The plain config of a run, `origin` included, with paths valid from the working directory.

    Keys that are newer than the run have the values of what rlft did before them.
    """
    try:
        config = whole_config(folder)
    except (FileNotFoundError, NotADirectoryError):
        is_there = folder.is_dir()
        problem = f"there is no run in that folder ({CONFIG} is missing)" if is_there else "there is no such folder"
        raise UserError(key, problem, got=folder, remedy="point it at a folder under runs/") from None
    except OSError as error:
        problem = f"{CONFIG} in that folder cannot be read ({error.strerror})"
        raise UserError(key, problem, got=folder, remedy="make it a file that you may read") from None
    except NewerError as error:
        raise UserError(key, f"{CONFIG} in that folder {error}", got=folder, remedy="update rlft") from None
    except ValueError as error:
        remedy = "restore the file from a copy, or name another run; its checkpoints hold adapters that PEFT reads"
        raise UserError(key, f"{CONFIG} in that folder is damaged ({error})", got=folder, remedy=remedy) from None
    recorded = config[ORIGIN].pop(PATHS, {})
    config = completed(config, commands.named(config["command"]).root)
    return with_located_paths(config, recorded if isinstance(recorded, dict) else {}, folder)


def with_kept_values(config: Mapping[str, Any], resumed: Path | None) -> dict[str, Any]:
    """The config with values in place of `model.date: auto`, `cluster.lanes: auto`, and `model.revision: null` of a hub
    id, which a resumed run keeps: what is pushed later is another base. So are an engine's weights that were chosen."""
    before = None if resumed is None else read(resumed)
    kept = dict(config)
    if isinstance(model := config.get("model"), Mapping):
        then = None if before is None else before["model"]
        if model.get("date", AUTO_DATE) == AUTO_DATE:
            model = {**model, "date": today() if then is None else then.get("date", AUTO_DATE)}
        if "revision" in model and model["revision"] is None:
            model = {**model, "revision": commit_of(str(model.get("path"))) if then is None else then.get("revision")}
        kept["model"] = model
    if before is not None and isinstance(generation := config.get("generation"), Mapping):
        then = before.get("generation", {})
        kept["generation"] = {name: _kept_weights(keys, then.get(name)) for name, keys in generation.items()}
    if isinstance(cluster := config.get("cluster"), Mapping):
        kept["cluster"] = kept_lanes(cluster, None if before is None else before.get("cluster", {}))
    return kept


def _kept_weights(keys: Any, then: Any) -> Any:
    if not (isinstance(keys, Mapping) and isinstance(then, Mapping) and "weights" in then):
        return keys
    is_older = (keys.get("weights"), then["weights"]) == ("merged_bfloat16", "adapted_bfloat16")
    return {**keys, "weights": then["weights"]} if is_older or keys.get("weights") in ("auto", FASTEST) else keys


@contextlib.contextmanager
def held(folder: Path, what: str = "run") -> Iterator[None]:
    """Locks the folder against other processes. The kernel releases the lock with the process, even by `kill -9`.

    what: is in the folder, for messages.
    """
    with writing(folder / LOCK):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with writing(folder / LOCK):
            lock = locks.take(handle, tries=locks.TRIES)
        if lock is locks.Taken.no:
            problem, remedy = f"another process is running this {what}", "wait for it, or stop it first"
            raise UserError("resume", problem, got=folder, remedy=remedy)
        if lock is locks.Taken.unsupported:
            say(f"note: the file system of {folder} has no locks: nothing keeps a second process out of this {what}")
        yield
    finally:
        os.close(handle)


def go_on(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes keys that a resume has changed, such as `steps`, into config.yaml, so that the next resume keeps them."""
    saved = read(folder)
    changed = {**saved, **config, "resume": saved["resume"]}
    if changed != saved:
        _write(folder, changed)


TEACHER = "snapshot.teacher"
TEACHER_FINGERPRINTS = (f"{TEACHER}_fingerprint", "teacher_fingerprint")
"""Names of the fingerprint of a teacher that is an adapter, and of one that is a separate model."""
NAMED_INPUTS = {  # {input: (its name in words, its key, what to do)}; other inputs have the name of their section
    "data": ("training data", "data.path", "put the data back as they were, or start a new run"),
    "held_out": ("held-out data", "data.path", "put the data back as they were, or start a new run"),
    "curriculum": ("file of pass rates", "curriculum.path", "put it back as it was, or start a new run"),
    "pretrain": ("pretraining text", "pretrain.path", "put the text back as it was, or start a new run"),
    "replay": ("replayed preferences", "replay.path", "put them back as they were, or start a new run"),
    "teacher": ("teacher", "snapshot.teacher", "point snapshot.teacher at the same model, wherever it is now"),
    "base": ("base", "model.path", "put it back as it was, or point model.path at the same base"),
}


def named_input(what: str) -> tuple[str, str, str]:
    """(name in words, key, what to do) for the input of a fingerprint.

    >>> named_input("held_out_preferences")[:2]
    ('held-out preferences', 'preferences.path')
    """
    if what.startswith("reward."):
        return "reward model", what, "put it back as it was, or start a new run"
    words = what.replace("held_out_", "held-out "), f"{what.removeprefix('held_out_')}.path"
    return NAMED_INPUTS.get(what, (*words, "put them back as they were, or start a new run"))


def check_same_inputs(
    origin: Mapping[str, Any], fingerprints: Mapping[str, str], replaced: Callable[[str], bool] = lambda key: False
) -> None:
    """Refuses data, a base or adapters that changed since a run of this origin started; names the first one's key.

    replaced: whether the config has changed so that another input at this key is intended.
    """
    models = models_in(fingerprints)
    for what in models:  # first: other tokens of the same data may be due to another tokenizer
        noun, key, remedy = named_input(what)
        if (changed := differing(origin, fingerprints, what)) and not replaced(key):
            problem = f"the {noun} changed since the run began: its {changed.then}"
            raise UserError(key, problem, got=changed.now, remedy=remedy)
    others = [name for name in fingerprints if not are_of_a_model(name, models)]
    for name in sorted(others, key=_is_of_an_adapter):
        before, now = origin.get(name), fingerprints[name]
        noun, key, remedy = named_input(name.removesuffix("_fingerprint"))
        if _is_of_an_adapter(name):
            noun, key = "adapter in that folder", name.removesuffix("_fingerprint")
            remedy = "put it back as it was, or start a new run"
        # Held-out data have no fingerprint if eval.every=0.
        if before and now and before != now and not replaced(key):
            problem = f"the {noun} changed since the run began (fingerprint {before[:12]} then)"
            raise UserError(key, problem, got=now[:12], remedy=remedy)
    first, current = (
        [fingerprints_of[name] for name in TEACHER_FINGERPRINTS if fingerprints_of.get(name)]
        for fingerprints_of in (origin, fingerprints)
    )
    # A model has replaced an adapter, or the reverse.
    if first and current and first != current and not replaced(TEACHER):
        problem = f"the teacher is one of another kind (fingerprint {first[0][:12]} when the run began)"
        raise UserError(TEACHER, problem, got=current[0][:12], remedy="name the same teacher, wherever it is now")


def _is_of_an_adapter(name: str) -> bool:
    """An adapter's fingerprint has the key that names its folder."""
    return "." in name or name == "adapter_fingerprint"


def may_change(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a resume may change this key of a plain config: the key is free, or its engine says so.

    `steps` decides where a schedule ends, so that it is free only with a constant one.
    """
    if key == "steps" and (config.get("trainer") or {}).get("schedule") != "constant":
        return False
    of_engines = free_keys(config.get("generation") or {})
    return bool(known(commands.named(config["command"]).root, key).free) or is_below(key, of_engines)


def decides_results(key: str, config: Mapping[str, Any]) -> bool:
    """Whether runs that differ in this key of their plain configs are of different experiments, whatever their seeds.

    A resume may name the same file by another path, so that paths are compared although they may change.
    """
    free = may_change(key, config) and not is_path_key(key)
    return not free and known(commands.named(config["command"]).root, key).measured is not False and key != "seed"


def check_same_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses a config that differs from that of the run in this folder, in a key that may not change."""
    saved = read(folder)
    saved.pop(ORIGIN, None)
    before, now = flatten(saved), flatten(config)
    keys = [
        key
        for key in sorted(before.keys() | now.keys())
        if before.get(key, ABSENT) != now.get(key, ABSENT)
        and not same_path(before.get(key), now.get(key))
        and not (key == TEACHER and may_have_moved(before.get(key), now.get(key)))
        and not may_change(key, saved)
    ]
    changed = [f"{key}: {before.get(key, 'absent')} -> {now.get(key, 'absent')}" for key in keys]
    problem = f"the config differs from the run's ({'; '.join(changed)})"
    remedy = f"leave these keys as they were (`{resuming(folder)}` does), or start a new run"
    saved_steps = checkpoint.finished(checkpoints(folder))
    if saved_steps and keys and set(keys) <= {"steps", "epochs"}:  # with which another schedule than constant ends
        words = [override(key, now[key]) for key in keys]
        remedy += f" from its newest checkpoint: {command_line('rlft', 'resume', saved_steps[-1], *words)}"
    require(not keys, "resume", problem, got=folder, remedy=remedy)


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes config.yaml, with its paths relative to the folder in the origin."""
    plain = {key: value for key, value in config.items() if key != ORIGIN}
    recorded = recorded_paths(plain, folder)
    origin = {KEY: FORMAT, **config.get(ORIGIN, {}), **({PATHS: recorded} if recorded else {}), WHOLE: True}
    text = yaml.safe_dump({**plain, ORIGIN: origin}, sort_keys=False, allow_unicode=True)
    write_atomically(config_file(folder), text)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """{package: version} of those that are installed."""
    return {name: version for name in packages if (version := installed_version(name)) is not None}


def commit() -> str:
    """The commit of the checkout that rlft runs from; "released" for an installed package."""
    top = Path(rlft.__file__).parents[1]
    if not (top / ".git").exists():
        return "released"
    command = ["git", "-C", str(top), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
