"""What a verb is to the launcher: a plan before weights are loaded, the work itself, and how it ended."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Say = Callable[[str], None]


class Plan(Protocol):
    """What is known of a run before a weight is loaded, of whichever verb."""

    @property
    def config(self) -> Any: ...

    @property
    def plain(self) -> Any: ...

    @property
    def fingerprints(self) -> Any: ...

    @property
    def num_steps(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How many steps a run has done, of how many, and whether it shall end before its last one."""

    step: int
    interrupted: bool


def stopped_at_once(folder: Path) -> str:
    """What is said of a run that was stopped inside a step."""
    return f"stopped at once; go on from the newest checkpoint with: {resuming(folder)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a verb does. make_plan: plain config -> Plan, or a UserError. check: as much of it as reads no files.

    do: (plan, folder, engines, say) -> Outcome. closing: what is printed when a run has all its steps: (plan, folder).
    steps_done: (folder, plan) -> how many steps the run in a folder has saved, or a UserError if the plan ends before.
    stopped: (folder) -> what is said, and kept, when the run is stopped inside a step.
    """

    make_plan: Callable[[dict[str, Any]], Any]
    check: Callable[[dict[str, Any]], object]
    do: Callable[[Any, Path, Any, Say], Outcome]
    steps_done: Callable[[Path, Any], int]
    stopped: Callable[[Path], str] = stopped_at_once
    closing: Callable[[Any, Path], None]


def say(text: str) -> None:
    """A line for the person at the terminal, beside whatever the loggers print."""
    print(text, file=sys.stderr, flush=True)


def command_line(*words: object) -> str:
    """The words as they can be pasted into a shell.

    >>> command_line("rlft", "resume", "runs/first try/a"), command_line("rlft", "train", "seed=0,1")
    ("rlft resume 'runs/first try/a'", 'rlft train seed=0,1')
    """
    return shlex.join(map(str, words))


def override(key: str, value: object) -> str:
    """`key=value`, the value quoted for Hydra where it has signs that Hydra reads in its own way.

    >>> override("lora.path", "runs/a/b"), override("lora.path", "sweeps/lr=1e-05,a")
    ('lora.path=runs/a/b', "lora.path='sweeps/lr=1e-05,a'")
    >>> override("lora.target_modules", ["q_proj", "v_proj"])
    'lora.target_modules=[q_proj,v_proj]'
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{key}=[{','.join(map(_quoted, value))}]"
    return f"{key}={_quoted(value)}"


def overrides(values: Mapping[str, object]) -> list[str]:
    """An override for each key."""
    return [override(key, value) for key, value in values.items()]


def _quoted(value: object) -> str:
    """The value as Hydra reads it back."""
    text = str(value)
    if re.fullmatch(r"[\w./:-]+", text):
        return text
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def resuming(folder: Path) -> str:
    """The command that goes on with the run in this folder."""
    return command_line("rlft", "resume", folder)


def program() -> str:
    """How the user can call rlft again from here: `rlft` where it is on PATH, else this environment's command."""
    import shutil

    command = Path(sys.prefix) / "bin" / "rlft"
    return "rlft" if shutil.which("rlft") or not command.exists() else os.path.relpath(command)
