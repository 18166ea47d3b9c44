"""Exports a run as a model, and again where the run's newest checkpoint is not the one that the model was made from.

    scripts/fresh_export.py RUN FOLDER COMMAND ..

COMMAND is rlft, in one word or several. What a model was made from stands in FOLDER.made_from, a digest of the newest
checkpoint's manifest, which has one of each of its files.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rlft.runs.checkpoint import MANIFEST, finished
from rlft.runs.run_folder import checkpoints


def fresh_export(run: Path, folder: Path, rlft: Callable[..., object]) -> None:
    """The folder holds the model of the run's newest checkpoint afterwards.

    rlft: runs a command with these words, and raises where it fails.
    """
    made_from, found = folder.with_name(f"{folder.name}.made_from"), digest(run)
    if folder.is_dir() and made_from.is_file() and made_from.read_text() == found:
        return
    shutil.rmtree(folder, ignore_errors=True)
    made_from.unlink(missing_ok=True)
    rlft("export", f"run={run}", f"out={folder}")
    made_from.parent.mkdir(parents=True, exist_ok=True)
    made_from.write_text(found)


def digest(run: Path) -> str:
    """Of the manifest of the run's newest checkpoint; empty where there is none."""
    newest = finished(checkpoints(run))[-1:]
    return "".join(hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest() for folder in newest)


if __name__ == "__main__":
    of, to, *command = sys.argv[1:]
    try:
        fresh_export(Path(of), Path(to), lambda *words: subprocess.run([*command, *words], check=True))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
