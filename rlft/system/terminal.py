"""Prints lines for the person at the terminal, and formats commands that can be pasted into a shell."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

Say = Callable[[str], None]


def say(text: str) -> None:
    """Prints a line on stderr for the person at the terminal, beside the loggers' output."""
    _print(text, sys.stderr)


def show(text: str) -> None:
    """Prints a line on stdout."""
    _print(text, sys.stdout)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:  # a run survives the reader of its output: `| head`, a pager that was left
        discard(stream)


def discard(stream: TextIO) -> None:
    """Discards further output of this stream, because its pipe has no reader any more."""
    with suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def command_line(*words: object) -> str:
    """A command of these words that can be pasted into a shell.

    >>> command_line("rlft", "resume", "runs/first try/a"), command_line("rlft", "train", "seed=0,1")
    ("rlft resume 'runs/first try/a'", 'rlft train seed=0,1')
    """
    return shlex.join(map(str, words))


def override(key: str, value: object) -> str:
    """`key=value`, with the value quoted if it has characters that mean something to Hydra.

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
    """The value, quoted if Hydra would otherwise read it differently."""
    text = str(value)
    if re.fullmatch(r"[\w./:-]+", text):
        return text
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def resuming(folder: Path) -> str:
    """The command that resumes the run in this folder."""
    return command_line("rlft", "resume", folder)


def program() -> str:
    """The command to call rlft: `rlft` if it is on PATH, else the path of this environment's command."""
    import shutil

    command = Path(sys.prefix) / "bin" / "rlft"
    return "rlft" if shutil.which("rlft") or not command.exists() else os.path.relpath(command)
