"""A file system that is full, enlarged and filled again; a sweep's, and that of the terminal's output.

test_kills.py has every write of a run, test_other_commands.py those of other commands.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disturbed_runs import CAUSES, full, without_notes
from run_folders import check_same, check_so_far, tiny, whole_lines
from run_processes import Nursery, environment


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[bool]:
    """Whether a file system of that size could be mounted at this place, which takes root."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_small_disk_that_is_enlarged(forks: Nursery, undisturbed: Path, tmp_path: Path) -> None:
    """A real file system where one can be mounted; the same failure planted where not."""
    place, hit = tmp_path / "disk", full("step_000002", "optimizer.safetensors", 2)
    with small_disk(place, "600k") as mounted:
        words = (*tiny(), "checkpoint.every=1", "hydra.run.dir=run")
        done = forks.run(*words, cwd=place, events=[] if mounted else hit.events)
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=3m", str(place)], check=True)
        hit.ends(done, place / "run")
        check_so_far(place / "run", undisturbed)
        if mounted:  # and again, at another place, on a disk that somebody else has filled
            (place / "ballast").write_bytes(bytes(shutil.disk_usage(place).free - 40_000))
            done = forks.run("resume", "run", cwd=place)
            [line] = without_notes(done)
            assert (done.code, CAUSES["ENOSPC"] in line) == (1, True), done.err
            (place / "ballast").unlink()
        forks.run("resume", "run", cwd=place, ends=0)
        check_same(place / "run", undisturbed)


@pytest.mark.slow
def test_a_sweep_says_it_of_its_job_and_keeps_its_table_whole(forks: Nursery, tmp_path: Path) -> None:
    words = (*tiny("steps=1", "eval.every=0"), "-m", "seed=1,2", "hydra.sweep.dir=swept")
    done = forks.run(*words, cwd=tmp_path, events=full("", "metrics.jsonl").events)
    assert done.code == 1
    assert f"job 0 failed: {CAUSES['ENOSPC']}: swept/0 needs " in done.err
    assert "Traceback" not in done.err
    table = (tmp_path / "swept" / "sweep.csv").read_bytes()
    done = forks.run(*words, cwd=tmp_path, events=full("", ".sweep.csv.writing").events)
    assert (done.code, "swept needs " in done.err) == (1, True), done.err
    assert (tmp_path / "swept" / "sweep.csv").read_bytes() == table
    assert len(whole_lines(tmp_path / "swept" / "0" / "metrics.jsonl")) == 1, "what failed first has gone on"


@pytest.mark.parametrize("words", ["recipes", "--version"])  # more than is written at once, and less
def test_output_on_a_full_disk_is_an_error_in_one_line(words: str) -> None:
    command = [sys.executable, "-m", "rlft.cli", words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment({}))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert done.stderr.startswith("rlft: stopped: the disk is full (No space left on device)")
