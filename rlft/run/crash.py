"""The last resort for an error that nobody foresaw: its traceback in a file, and one line for the person.

An error inside a run is written to error.txt in the run's folder, any other into a folder for temporary files.
`RLFT_DEBUG=1` prints the traceback of whatever ends a command, on stderr, mistakes of the user included.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import rlft
from rlft.types import UserError

DEBUG = "RLFT_DEBUG"
FILE = "error.txt"
MAX_SHOWN_CHARS = 300
"""Of the error's own first line; the file holds all of it."""


class UnforeseenError(RuntimeError):
    """An error that nobody foresaw; the message says in one line what it was, and where its traceback is."""


@contextmanager
def recorded_in(folder: Path) -> Iterator[None]:
    """Inside, an error that nobody foresaw is written to error.txt in this folder, after those of earlier starts.

    Raises:
        UnforeseenError: in its place. Errors that explain themselves go on as they are.
    """
    try:
        yield
    except Exception as error:
        if explains_itself(error):
            raise
        raise UnforeseenError(report(error, folder / FILE)) from error


def explains_itself(error: BaseException) -> bool:
    """Whether the message already says cause and remedy: a UserError, or a RuntimeError of a class of ours."""
    return isinstance(error, UserError) or (
        isinstance(error, RuntimeError) and type(error).__module__.partition(".")[0] == "rlft"
    )


def report(error: BaseException, file: Path | None = None) -> str:
    """Writes the traceback and returns the line that says what happened, where the traceback is and what to do.

    file: None for a new one among the temporary files, where the traceback also goes if `file` cannot be written.
    """
    what = one_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    what = what if len(what) <= MAX_SHOWN_CHARS else f"{what[:MAX_SHOWN_CHARS]}..."
    place = _write(error, file)
    if place is None:
        traceback.print_exception(error)
        return f"{what}; its traceback is printed above, since no file could be written"
    return f"{what}; its traceback is in {place}; {_remedy(error)}"


def _remedy(error: BaseException) -> str:
    if isinstance(error, OSError):
        return "see to the file, disk or connection it names; if nothing is wrong there, report it with that file"
    return "rlft should not have failed like this: please report it with that file"


def _write(error: BaseException, file: Path | None) -> Path | None:
    """Where the traceback was appended; None if it could be written nowhere."""
    text = "".join([_circumstances(), *traceback.format_exception(error), "\n"])
    content = text.encode("utf-8", "backslashreplace")
    try:
        if file is not None:
            with file.open("ab") as stream:
                stream.write(content)
            return file
    except OSError:
        pass
    try:
        handle, name = tempfile.mkstemp(prefix="rlft_error_", suffix=".txt")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        return Path(name)
    except OSError:
        return None


def _circumstances() -> str:
    command = " ".join(["rlft", *sys.argv[1:]])
    versions = f"rlft {rlft.__version__}, Python {platform.python_version()}, {platform.platform()}"
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}  {command}\n{versions}\n"


def one_line(text: object) -> str:
    r"""The text with line breaks, which a value may have brought into it, written as \n.

    >>> one_line("a" + chr(10) + "b")
    'a\\nb'
    """
    return "\\n".join(str(text).splitlines())


def debugging() -> bool:
    """Whether tracebacks are to be printed."""
    return os.environ.get(DEBUG, "") not in ("", "0")
