"""What is said of finished runs, and of folders that cannot be written; the rest of launching is seen in whole runs."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands.launch import after_the_end
from rlft.config import command as commands

RUN = Path("run")
MORE, EVALUATE = "raise steps (rlft resume run steps=10)", "rlft eval run=run"


@each(
    ("command", "schedule", "remedy"),
    [
        ("train", "constant", f"{MORE}, or {EVALUATE}"),
        ("sft", "constant", f"{MORE}, or {EVALUATE}"),
        ("sft", "cosine", EVALUATE),  # every rate so far would have been another; without a checkpoint
        ("rm", "constant", MORE),  # a reward model has nothing to sample
        ("rm", "linear", "start another one"),
        ("sample", None, "start another one"),
    ],
)
def test_what_can_be_done_with_a_finished_run(command: str, schedule: str | None, remedy: str) -> None:
    assert after_the_end(commands.named(command), schedule, RUN, 5) == remedy


@pytest.mark.parametrize(
    ("place", "code", "line", "exit_code"),
    [
        (
            "pathlib.Path.rename",
            errno.EXDEV,
            "hydra.run.dir: cannot be written (Invalid cross-device link), got run;",
            2,
        ),
        ("pathlib.Path.touch", errno.EROFS, "hydra.run.dir: cannot be written (Read-only file system), got run;", 2),
        ("pathlib.Path.touch", errno.ENOSPC, "stopped: the disk is full (No space left on device): ", 1),
        ("os.fsync", errno.EIO, "stopped: the disk failed (Input/output error): ", 1),
    ],
)
def test_what_a_run_cannot_do_in_its_folder_is_known_before_it_begins(
    place: str, code: int, line: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refuse(*args: object, **keywords: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(place, refuse)
    assert cli.run(["train", "+recipe=grpo_arithmetic", "hydra.run.dir=run"]) == exit_code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"rlft: {line}")
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "run"])
