"""Starts the run, or the sweep, that the words after a verb describe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlft.commands.arguments import check_resume, make_importable
from rlft.commands.launch import check_steps, launch
from rlft.config.command import Verb
from rlft.config.compose import compose_run
from rlft.config.overrides import parse
from rlft.config.token_budget import AUTO
from rlft.plan.checks import check_early
from rlft.runs import references, run_folder


def command(verb: Verb, arguments: list[str]) -> None:
    """Runs the verb once, or as a sweep with -m."""
    parsed = parse(arguments, verb.name)
    make_importable(parsed.config_dir)
    parsed = check_resume(parsed)
    run = None if verb.compose is None else verb.compose(parsed)
    if run is None and parsed.asks:
        from rlft.commands.ask import ask

        ask(verb.name, parsed)
        return
    if run is None and parsed.sweep:
        from rlft.commands.sweep.command import sweep

        sweep(verb.name, parsed)
        return
    run = run or compose_run(parsed.overrides, parsed.config_dir, verb.name)
    begin(run.plain, run.folder)


def begin(plain: dict[str, Any], folder: Path) -> None:
    """Starts the run of this config in the folder, or resumes it, once the config alone has been checked."""
    folder, may_be_finished = Path(os.path.relpath(folder)), plain["resume"] == AUTO
    if may_be_finished:
        plain = {**plain, "resume": str(folder) if run_folder.config_file(folder).exists() else None}
    plain = references.resolved(plain)
    plain = run_folder.with_kept_values(plain, None if plain["resume"] is None else folder)
    check_early(plain, plain["verb"])
    if plain["resume"] is None:
        run_folder.check_free(folder)
    else:
        run_folder.check_same_config(folder, plain)
        if isinstance(plain.get("steps"), int):  # otherwise the number of steps follows from the data
            check_steps(folder, plain["steps"], str(plain.get("trainer", {}).get("schedule")))
    launch(plain, folder, may_be_finished=may_be_finished)
