"""What has changed since a run was last running and is no reason to refuse it: libraries, own code, its config.yaml."""

from __future__ import annotations

from pathlib import Path

from rlft.config.schema import packages
from rlft.runs import run_folder
from rlft.runs.chain import CHAIN
from rlft.runs.config_file import files_of_code
from rlft.runs.fork import FORKED_FROM
from rlft.runs.lines import read_lines, silent
from rlft.system import digests
from rlft.system.machine import processor


def notes(run: Path) -> list[str]:
    """Sentences for whoever resumes, evaluates or exports the run in this folder."""
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
        if key in begun and not (file.expanduser().is_file() and digests.of_file(file.expanduser()) == begun[key])
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
    if not lines or lines[-1]["sha256"].get("config") in (None, digests.of_file(run_folder.config_file(run))):
        return None
    forked = (run_folder.read(run, "run")[run_folder.ORIGIN].get(FORKED_FROM) or {}).get("step", -1)
    if lines[-1]["step"] <= forked:
        return None
    changed = f"{run_folder.CONFIG} changed since step {lines[-1]['step']}"
    return f"{changed}: keys were edited in it, or the run was resumed with others and has done no step since"
