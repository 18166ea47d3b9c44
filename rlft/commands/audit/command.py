"""`rlft audit`: a table of what of a run or an exported adapter is confirmed, what cannot be, and what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlft.commands.audit.files import Audited, Findings, check_export, check_files, read_chain
from rlft.commands.launch import import_libraries, resolve_in
from rlft.commands.tables import print_rows
from rlft.commands.watch.runs import read_words
from rlft.config.compose import USUAL
from rlft.config.overrides import make_importable
from rlft.runs import run_folder, run_status
from rlft.runs.find import one_run, other_code, other_libraries
from rlft.runs.run_folder import CONFIG, ORIGIN
from rlft.runs.run_status import Status
from rlft.system import interrupt
from rlft.system.crash import escaped
from rlft.system.terminal import say
from rlft.types import UserError, require

KEYS = {"recompute": 16, "replay": 1}


def command(arguments: list[str]) -> int:
    """Prints the table, or the JSON; returns 1 if something differs, else 0."""
    names, values, as_json = read_words("audit", arguments, has_json=True)
    require(len(names) == 1, "audit", "takes one run", got=" ".join(names) or None, remedy="write rlft audit <run>")
    numbers = {**KEYS, **{key: _number(key, value) for key, value in values.items()}}
    findings, folder = Findings(), one_run(names[0], "run", say)
    interrupt.set_interrupt_message("nothing was changed")
    if (folder / CONFIG).exists():
        audit_run(folder, findings, numbers["recompute"], numbers["replay"])
    else:
        check_export(folder, read_chain(folder, findings), findings)
    if as_json:
        print(json.dumps({"differs": findings.differs, "rows": [asdict(row) for row in findings.rows]}, indent=1))
    else:
        print_rows(findings.rows)
    return 1 if findings.differs else 0


def _number(key: str, text: str) -> int:
    is_number = text.isascii() and text.isdigit()
    require(is_number, key, "must be a number of steps", got=text or None, remedy=f"try {key}={KEYS[key]}")
    return int(text)


def audit_run(folder: Path, findings: Findings, recompute: int, replay: int) -> None:
    """Verifies the files of a run, recomputes and replays that many of its steps."""
    is_running = run_status.read(folder)[0] is Status.running
    require(not is_running, "run", "is running", got=folder, remedy="wait until it has ended, or stop it first")
    config = run_folder.read(folder, "run")
    run = Audited(folder=folder, config=config, lines=read_chain(folder, findings), findings=findings)
    check_files(run)
    for what, changed in (("libraries", other_libraries), ("code", other_code)):
        if (sentence := changed(folder)) is not None:
            findings.leave_open(what, sentence)
    if not (recompute or replay):
        return
    make_importable(None)
    import_libraries(f"rlft audit: {folder}", ())
    plain = {key: value for key, value in config.items() if key != ORIGIN}
    plan, why_not_here = planned(folder, {**plain, "resume": str(folder)})
    if plan is None:
        findings.leave_open("inputs", f"data and base cannot be read here: {why_not_here}")
        return
    from rlft.commands.audit.recomputed import check_inputs, check_replay, check_steps

    if not check_inputs(run, plan):
        findings.leave_open("recomputed", "not with other data or another base")
        return
    unrepeatable = check_steps(run, plan, recompute) if recompute and plan.config.command == USUAL else set()
    if replay and why_not_here is not None:
        findings.leave_open("replay", f"the run does not run here: {why_not_here}")
    elif replay:
        check_replay(run, plan, replay, unrepeatable)


def planned(folder: Path, plain: Mapping[str, Any]) -> tuple[Any, str | None]:
    """(the run's plan, why it cannot run on this machine); without data or base there is no plan."""
    why = None
    for runs_here in (True, False):
        try:
            return resolve_in(folder, plain).plan(runs_here=runs_here), why
        except UserError as error:
            why = escaped(error)
    return None, why
