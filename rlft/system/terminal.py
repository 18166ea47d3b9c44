"""Prints lines for the person at the terminal, also how far long work is, and formats commands for a shell."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TextIO, TypeVar

Item = TypeVar("Item")
Say = Callable[[str], None]

EVERY_S = 10.0  # seconds between two lines about the progress of long work; shorter work prints none
CHECKED = 256  # items between two readings of the clock


def say(text: str) -> None:
    """Prints a line on stderr for the person at the terminal, next to the loggers' output."""
    _print(for_a_shell(text), sys.stderr)


def show(text: str) -> None:
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


def with_progress(
    items: Iterable[Item],
    what: str,  # the text before the number, such as "data.path: reading big.jsonl"
    total: int | None,  # the sum of the items' sizes; None: it is not known, and they are rows
    size: Callable[[Item], int] = lambda item: 1,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """Yields the items, and prints every EVERY_S seconds how many are done and how long the rest will take."""
    start = last_shown = clock()
    done = 0
    for number, item in enumerate(items, 1):
        yield item
        done += size(item)
        if number % CHECKED == 0 and (now := clock()) - last_shown > EVERY_S:
            last_shown = now
            if total is None:
                say(f"{what}: row {number:,}")
                continue
            remaining_s = (now - start) * (total - done) / max(1, done)
            more = f"{remaining_s:.0f} s" if remaining_s < 120 else f"{remaining_s / 60:.0f} min"
            say(f"{what}: {100 * done / max(1, total):.0f} %, about {more} more")


def command_line(*words: object) -> str:
    """A command of these words that can be pasted into a shell.

    >>> command_line("rlft", "resume", "runs/first try/a"), command_line("rlft", "train", "seed=0,1")
    ("rlft resume 'runs/first try/a'", 'rlft train seed=0,1')
    """
    return shlex.join(map(str, words))


_WORD = re.compile(
    r"(?<![^\s(])(?:(?P<quoted>'[^']*'|\"[^\"]*\")|(?:~[a-z]|[+]{0,2}[a-z_][\w.@/-]*=)(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+)"
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def for_a_shell(text: str) -> str:
    """The text, in which overrides that zsh or bash would expand are quoted, so that they can be copied from it.

    >>> for_a_shell("try reward=[exact_match,format], or leave it out with ~reward.mine")
    "try 'reward=[exact_match,format]', or leave it out with '~reward.mine'"
    """

    def quoted(match: re.Match[str]) -> str:
        word = match[0].rstrip(".,;:?")
        if word.count(")") > word.count("("):
            word = word.rpartition(")")[0]
        if match["quoted"] or not re.search(r"^~|=~|[\[*?{(]", _QUOTED.sub("", word)):
            return match[0]
        in_quotes = f'"{word}"' if "'" in word and not set(word) & set('"$`') else shlex.quote(word)
        return in_quotes + match[0][len(word) :]

    return _WORD.sub(quoted, text)


_COMMAND = re.compile(
    r"""(?<![^\s('"])(?:[\w.~-]*/)*(?:rlft|uv|hf|(?:python[\d.]*\ -m\ )?pip|python[\d.]*)
    (?:\ [a-z]+(?=[,;:.)]?(?:\s|$))){0,2}(?:(?<![,;:.)])\ (?=\S*[=/<+~'"\d-])(?:'[^']*'|"[^"]*"|[^\s'"])+)*""",
    re.VERBOSE,
)
_UNBROKEN = "\ue000"  # a character of private use, which no text of rlft has


def unbroken(text: str) -> str:
    """The text, in which a wrapper of lines takes each command for one word, until `with_spaces`."""
    return _COMMAND.sub(lambda match: match[0].replace(" ", _UNBROKEN), text)


def with_spaces(text: str) -> str:
    """The text that was given to `unbroken`, as far as a line has it.

    >>> with_spaces(unbroken("resume it: rlft resume runs/a, once").split(" ")[2])
    'rlft resume runs/a,'
    """
    return text.replace(_UNBROKEN, " ")


def override(key: str, value: object) -> str:
    """`key=value`, with the value as YAML writes it, quoted if it has characters that mean something to Hydra.

    >>> override("lora.path", "runs/a/b"), override("lora.path", "sweeps/lr=1e-05,a"), override("lora", None)
    ('lora.path=runs/a/b', "lora.path='sweeps/lr=1e-05,a'", 'lora=null')
    >>> override("lora.target_modules", ["q_proj", "v_proj"])
    'lora.target_modules=[q_proj,v_proj]'
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{key}=[{','.join(map(_quoted, value))}]"
    return f"{key}={_quoted(value)}"


def overrides(values: Mapping[str, object]) -> list[str]:
    return [override(key, value) for key, value in values.items()]


def _quoted(value: object) -> str:
    """The value, quoted if Hydra would otherwise read it differently."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if re.fullmatch(r"[\w./:-]+", text) else quoted(text)


def quoted(text: str) -> str:
    """The text in quotes, as Hydra reads it: with a backslash before a quote, and two for one that stands before one.

    >>> print(quoted("Let's"), quoted("a" + chr(92)))
    'Let\\'s' 'a\\\\'
    """
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def resuming(folder: Path) -> str:
    """The command that resumes the run in this folder."""
    return command_line("rlft", "resume", folder)


def program() -> str:
    """The command to call rlft: `rlft` if it is on PATH, else the path of this environment's command."""
    import shutil

    command = Path(sys.prefix) / "bin" / "rlft"
    return "rlft" if shutil.which("rlft") or not command.exists() else os.path.relpath(command)


def pip_install(*requirements: str) -> str:
    """The command that installs these requirements into the environment of this process, as every hint gives it.

    It is `pip install ..` where a bare `pip` is this environment's, and names its Python otherwise. An environment
    that was made by uv has no pip.
    """
    import importlib.metadata
    import shutil

    scripts = Path(sys.prefix) / "bin"
    found = shutil.which("pip")
    if found is not None and Path(found).parent.resolve() == scripts.resolve():
        return command_line("pip", "install", *requirements)
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    # Not by looking for the module pip: setuptools would take its distutils back, which vLLM then misses.
    has_pip = any(importlib.metadata.distributions(name="pip"))
    if not has_pip and shutil.which("uv"):
        return command_line("uv", "pip", "install", "--python", python, *requirements)
    return command_line(python, "-m", "pip", "install", *requirements)


# -- rows of checks ----------------------------------------------------------------------------------------------------
class Status(StrEnum):
    """The verdict of a row.

    `slow` works, but wastes time or leaves something unused; `limit` is not wrong by itself, but has to be known;
    `skipped` could not be tried.
    """

    ok = "ok"
    slow = "slow"
    limit = "limit"
    wrong = "wrong"
    skipped = "skipped"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A row of the table."""

    name: str
    status: Status
    value: str  # what was measured, in words; in a skipped row, the reason
    remedy: str = ""  # what to do; empty if the row is ok
    numbers: Mapping[str, float] = field(default_factory=dict)  # {name: measured number}, with the unit in the name
