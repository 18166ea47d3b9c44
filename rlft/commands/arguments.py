"""Reads the words after a verb, and checks the run to resume, or the run or model to use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlft.config.overrides import Arguments, check_no_options, parse
from rlft.config.resolved import AUTO
from rlft.runs import checkpoint, run_folder
from rlft.runs.find import NamedRun, find, one_run
from rlft.runs.fork import forking
from rlft.system.terminal import say
from rlft.types import UserError


def make_importable(config_dir: Path | None) -> None:
    """Puts the working directory and the user's config folder at the end of sys.path, so that their modules import.

    Reward workers inherit the path. The folders come last: a user's folder named `datasets` must not hide the library.
    """
    for folder in (Path.cwd(), config_dir):
        if folder is not None and str(folder.resolve()) not in sys.path:
            sys.path.append(str(folder.resolve()))


def check_resume(parsed: Arguments) -> Arguments:
    """Checks resume=<run>, which continues a run, or resume=auto, which continues or starts the run in hydra.run.dir.

    Returns the arguments with a name such as `latest` replaced by the run's folder.
    """
    resumed, folder = parsed.value("resume"), parsed.value("hydra.run.dir")
    if resumed is None:
        return parsed
    if resumed == AUTO:
        if parsed.sweep:
            remedy = "leave it out: the same command with its hydra.sweep.dir continues the sweep"
            raise UserError("resume", "is of one run, and this is a sweep", got=AUTO, remedy=remedy)
        if folder is None:
            problem = "starts or continues the run in hydra.run.dir, which is not given"
            raise UserError("resume", problem, got=AUTO, remedy="give hydra.run.dir=<folder>")
        return parsed
    run = one_run(resumed, "resume", say)
    if (run / checkpoint.STATE).is_file():
        remedy = f"start a new run from it: {forking(run)}"
        problem = "is a checkpoint; a run is resumed from its newest one"
        raise UserError("resume", problem, got=resumed, remedy=remedy)
    run_folder.read(run)
    if folder is not None and Path(folder).resolve() != run.resolve():
        problem = "a resumed run continues in its own folder, not in hydra.run.dir"
        raise UserError("resume", problem, got=resumed, remedy="leave hydra.run.dir out")
    if str(run) == resumed:
        return parsed
    overrides = tuple(f"resume={run}" if o.lstrip("+").startswith("resume=") else o for o in parsed.overrides)
    return replace(parsed, overrides=overrides)


def only_overrides(arguments: Sequence[str], verb: str = "train") -> Arguments:
    """Parses the words of a verb that neither sweeps nor prints its config; makes the user's modules importable."""
    parsed = parse(arguments, verb)
    check_no_options(parsed)
    make_importable(parsed.config_dir)
    return parsed


def of_a_run(arguments: list[str], words: Sequence[str] = ()) -> tuple[Arguments, NamedRun | None, list[str]]:
    """Parses the words of a verb that uses a run.

    Args:
        arguments: the words; the first one may be the run itself.
        words: keys of the verb itself, which do not change the config.

    Returns:
        The parsed words, the run that they name (None if they name none), and the overrides of its config.
    """
    if arguments and not arguments[0].startswith(("-", "+")) and "=" not in arguments[0]:
        arguments = [f"run={arguments[0]}", *arguments[1:]]
    parsed = only_overrides(arguments)
    not_config_keys = ("run", "checkpoint", *words)
    run_name = parsed.value("run") or parsed.value("checkpoint")
    if not run_name and any(o.partition("=")[0] in ("run", "checkpoint") for o in parsed.overrides):
        raise UserError("run", "is empty", remedy="write run=runs/<name>/<time>")
    changes = [o for o in parsed.overrides if o.partition("=")[0] not in not_config_keys]
    return parsed, find(one_run(run_name, "run", say)) if run_name else None, changes


def check_names_a_model(parsed: Arguments, otherwise: str) -> None:
    """Requires model.path= or +recipe= if no run is named, because the defaults alone are hardly ever intended."""
    if not any(parsed.value(key) for key in ("model.path", "recipe")):
        remedy = "give run=<run>, model.path=<model> or +recipe=<name>"
        raise UserError("run", f"is missing: {otherwise}", remedy=remedy)
