"""`rlft resume`: continues a run from its newest checkpoint, or starts a new run from a checkpoint of another one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlft.commands.launch import begin, launch
from rlft.commands.sweep.space import is_study
from rlft.config import compose as configs
from rlft.config.overrides import only_overrides
from rlft.config.resolved import resolve
from rlft.runs import checkpoint, run_folder
from rlft.runs.find import LATEST, find, one_run, with_named_runs
from rlft.runs.fork import forking, open_fork
from rlft.system.terminal import override, say
from rlft.types import UserError, require


def command(arguments: list[str]) -> None:
    """Resumes a run with its own config and the given changes, or forks a checkpoint."""
    if not arguments or _is_option(arguments[0]):
        arguments = [LATEST, *arguments]
    name, remedy = arguments[0].removeprefix("run="), "write rlft resume runs/<name>/<time>, or no name for the latest"
    require(name, "resume", "names no run", remedy=remedy)
    if is_study(study_folder := Path(name)):
        from rlft.commands.sweep.command import resume

        resume(study_folder, arguments[1:])
        return
    folder = one_run(name, "resume", say)
    if (folder / checkpoint.STATE).is_file():
        fork(folder, arguments[1:])
        return
    plain = run_folder.read(folder)
    plain.pop(run_folder.ORIGIN, None)
    parsed = only_overrides(arguments[1:], plain["command"])
    if (new_folder := parsed.value("hydra.run.dir")) is not None:
        remedy = "leave it out"
        if saved := checkpoint.finished(run_folder.checkpoints(folder)):
            command = forking(saved[-1], override("hydra.run.dir", new_folder))
            remedy += f", or start a new run from a checkpoint: {command}"
        problem = "a resumed run continues in its own folder"
        raise UserError("hydra.run.dir", problem, got=new_folder, remedy=remedy)
    plain = configs.changed(plain, parsed.overrides, parsed.config_dir, plain["command"])
    plain["resume"] = str(folder)
    begin(plain, folder)


def _is_option(word: str) -> bool:
    """Whether the word is an override or an option, and names no run: a sweep's folder may be named `lr=1e-05`."""
    return re.match(r"-|(?!run=)[^=]+=", word) is not None and not Path(word).exists()


def fork(folder: Path, arguments: list[str]) -> None:
    """`rlft resume <checkpoint> [key=value ..]`: starts a new run from a checkpoint of another one."""
    source = open_fork(find(folder).run, folder)
    command = source.before["command"]
    parsed = only_overrides(arguments, command)
    resumed, problem = parsed.value("resume"), "has no meaning here: a new run starts from the checkpoint"
    require(resumed is None, "resume", problem, got=resumed, remedy="leave it out")
    changes = [o for o in parsed.overrides if not o.startswith(("hydra.run.dir=", "resume="))]
    plain = configs.changed(dict(source.before), changes, parsed.config_dir, command)
    plain["resume"] = None
    new_folder = Path(os.path.relpath(parsed.value("hydra.run.dir") or configs.new_folder(plain["name"])))
    plain = run_folder.with_kept_values(with_named_runs(plain), None)
    resolved = resolve({**plain, "resume": str(new_folder)})
    run_folder.check_free(new_folder)
    launch(resolved, new_folder, fork=source)
