"""Reports an unexpected error: its traceback goes to a file, and the user sees one line.

`RLFT_DEBUG=1` also prints the traceback of every error that ends a command on stderr, mistakes of the user included.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import rlft
from rlft.types import UserError

DEBUG = "RLFT_DEBUG"
FILE = "error.txt"
MAX_SHOWN_CHARS = 300  # of the error's own message in that line; the file holds all of it


class UnforeseenError(RuntimeError):
    """An unexpected error; the message says in one line what it was, and where its traceback is."""


@contextmanager
def recorded_in(folder: Path) -> Iterator[None]:
    """Writes an unexpected error inside to error.txt in this folder and raises UnforeseenError in its place."""
    try:
        yield
    except Exception as error:
        if explains_itself(error):
            raise
        raise UnforeseenError(report(error, folder / FILE)) from error


def explains_itself(error: BaseException) -> bool:
    """Whether the message already has cause and remedy: a UserError, or a RuntimeError of one of rlft's classes."""
    return isinstance(error, UserError) or (
        isinstance(error, RuntimeError) and type(error).__module__.partition(".")[0] == "rlft"
    )


def report(error: BaseException, file: Path | None = None) -> str:
    """Writes the traceback, and returns a line that says what happened, where the traceback is and what to do.

    Without `file`, or if it cannot be written, the traceback goes to a new temporary file.
    """
    message = described(error)
    traceback_file = _write(error, file)
    if traceback_file is None:
        traceback.print_exception(error)
        return f"{message}; its traceback is printed above, since no file could be written"
    return f"{message}; its traceback is in {traceback_file}; {_remedy(error)}"


def _remedy(error: BaseException) -> str:
    if isinstance(error, OSError):
        return "check the file, disk or connection that it names; if nothing is wrong there, report it with that file"
    return "rlft should not have failed like this: please report it with that file"


def _write(error: BaseException, file: Path | None) -> Path | None:
    """Appends the traceback and returns the file's path; None if no file could be written."""
    versions = f"rlft {rlft.__version__}, Python {platform.python_version()}, {platform.platform()}"
    head = f"{datetime.now():%Y-%m-%d %H:%M:%S}  {' '.join(['rlft', *sys.argv[1:]])}\n{versions}\n"
    text = "".join([head, *traceback.format_exception(error), "\n"])
    content = text.encode("utf-8", "backslashreplace")
    new_one = partial(tempfile.NamedTemporaryFile, prefix="rlft_error_", suffix=".txt", delete=False)
    for opened in (new_one,) if file is None else (partial(file.open, "ab"), new_one):
        with suppress(OSError), opened() as stream:
            stream.write(content)
            return Path(stream.name)
    return None


def described(error: BaseException) -> str:
    """The class of an error and what it says, in one line, as `shortened`."""
    try:
        text = escaped(error).encode("utf-8", "backslashreplace").decode()
    except Exception:  # a library's class may not even be able to say what it is
        text = ""
    return shortened(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def shortened(text: str) -> str:
    """The text in one line, cut after MAX_SHOWN_CHARS characters."""
    line = escaped(text)
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[:MAX_SHOWN_CHARS]}..."


def escaped(text: object) -> str:
    r"""The text with line breaks, which may come from a value, written as \n.

    >>> escaped("a" + chr(10) + "b")
    'a\\nb'
    """
    return "\\n".join(str(text).splitlines())


def debugging() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0")
