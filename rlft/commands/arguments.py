"""Reads the words after a command, checks the run to resume, and lets Hydra answer --help, --cfg and the like."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlft.config import compose as configs
from rlft.config.overrides import Arguments, check_no_options, parse
from rlft.config.resolved import AUTO
from rlft.config.suggest import check_own_keys
from rlft.runs import checkpoint, run_folder
from rlft.runs.find import one_run
from rlft.runs.fork import forking
from rlft.system.terminal import say
from rlft.types import UserError, require


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
        remedy = "leave it out: the same command with its hydra.sweep.dir continues the sweep"
        require(not parsed.sweep, "resume", "is of one run, and this is a sweep", got=AUTO, remedy=remedy)
        problem = "starts or continues the run in hydra.run.dir, which is not given"
        require(folder is not None, "resume", problem, got=AUTO, remedy="give hydra.run.dir=<folder>")
        return parsed
    run = one_run(resumed, "resume", say)
    if (run / checkpoint.STATE).is_file():
        remedy = f"start a new run from it: {forking(run)}"
        raise UserError("resume", "is a checkpoint; a run is resumed from its newest one", got=resumed, remedy=remedy)
    run_folder.read(run)
    is_its_own = folder is None or Path(folder).resolve() == run.resolve()
    problem = "a resumed run continues in its own folder, not in hydra.run.dir"
    require(is_its_own, "resume", problem, got=resumed, remedy="leave hydra.run.dir out")
    if str(run) == resumed:
        return parsed
    overrides = tuple(f"resume={run}" if o.lstrip("+").startswith("resume=") else o for o in parsed.overrides)
    return replace(parsed, overrides=overrides)


def only_overrides(arguments: Sequence[str], command: str = "train", own: Sequence[str] = ()) -> Arguments:
    """Parses the words of a command that neither sweeps nor prints its config; makes the user's modules importable.

    `own` are keys of the command itself beside those of the config, which has the keys of a run of `command`.
    """
    parsed = parse(arguments, command)
    check_no_options(parsed)
    check_own_keys(parsed.overrides, own, command)
    make_importable(parsed.config_dir)
    return parsed


def ask(command: str, parsed: Arguments) -> None:
    """Lets Hydra answer these words of a command."""
    import hydra

    configs.extend_hydra()
    first, *others = configs.primary_folders(command)
    search = [configs.search_path(others)] if others else []
    root = logging.getLogger()  # which Hydra configures
    argv, handlers, level = sys.argv, root.handlers[:], root.level
    sys.argv = [f"rlft {command}", *parsed.options, *configs.named_choices(parsed.overrides, command), *search]
    try:
        hydra.main(config_path=str(first), config_name=command, version_base="1.3")(lambda composed: None)()
    except Exception as error:
        raise configs.refusal(error, command) or error from None
    except SystemExit as end:  # Hydra exits after --help
        if end.code:
            raise
    finally:
        sys.argv = argv
        root.handlers[:] = handlers
        root.setLevel(level)
