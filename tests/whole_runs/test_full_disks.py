"""A disk that is full, or fails, in the middle of a run: one line, nothing half written, and the run can go on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_folders import (
    SAMPLE,
    check_resumed,
    check_same,
    check_so_far,
    checkpoints,
    files_of,
    is_whole,
    tiny,
    whole_lines,
)
from run_processes import Ended, Nursery, environment

CAUSES = {
    "ENOSPC": "the disk is full (No space left on device)",
    "EDQUOT": "your disk quota is used up (Disk quota exceeded)",
    "EIO": "the disk failed (Input/output error)",
    "EROFS": "the file system can only be read (Read-only file system)",
    "EACCES": "writing is not permitted (Permission denied)",
    "ESTALE": "the file system is gone (Stale file handle)",
    "EFBIG": "no file may become that large here (File too large)",
}
SMALL = ("steps=2", "model.device=cpu", "lora.rank=2", "eval.every=0", "console=null")


def fails(name: str, call: int = 1, error: str = "ENOSPC") -> dict[str, Any]:
    return {"half": name, "call": call, "raises": error}


def only_line(done: Ended) -> str:
    """What a failed command has said, without notes."""
    [line] = [line for line in done.err.splitlines() if not line.startswith("note: ")]
    return line


def check_failed(done: Ended, folder: Path, named: str, cause: str) -> None:
    """One line, exit code 1, nothing half written, and the run, if there is one, says why it has stopped."""
    line = only_line(done)
    assert done.code == 1, line
    assert line.startswith(f"rlft: stopped: {cause}: {folder.name}")
    assert f" for {named} and has " in line
    assert [path.name for path in folder.rglob("*") if ".writing" in path.name or path.suffix == ".tmp"] == []
    assert all(map(is_whole, checkpoints(folder)))
    if (folder / "config.yaml").exists():
        assert line.endswith(f", then resume with: rlft resume {folder.name}")
        status = json.loads((folder / "status.json").read_text())
        assert (status["status"], f"rlft: stopped: {status['reason']}") == ("stopped", line)
    else:
        assert line.endswith(", then repeat the command")
        assert not folder.exists()


# In the order in which a run, going on from its newest checkpoint, comes to them; with what is named.
CASES: dict[str, tuple[tuple[str, ...], int, list[tuple[dict[str, Any], str]]]] = {
    "train": (tiny(), 2, [
        (fails(".status.json.writing"), "status.json"),
        (fails(".config.yaml.writing", error="EDQUOT"), "config.yaml"),
        (fails("eval.jsonl", error="EIO"), "eval.jsonl"),
        (fails("step_000001.jsonl.tmp"), "step_000001.jsonl"),
        (fails("metrics.jsonl", 2, "EROFS"), "metrics.jsonl"),
        (fails("adapter_model.safetensors", error="EDQUOT"), "step_000002"),
        (fails("eval.jsonl", 2, "ESTALE"), "eval.jsonl"),  # after step 2
        (fails("optimizer.safetensors", 2), "step_000004"),
        (fails("metrics.jsonl", 2, "EACCES"), "metrics.jsonl"),  # after step 4, the checkpoint of step 2 is there
        (fails("state.json", 1, "EIO"), "step_000004"),
        ({"file_size": 100_000, "raises": "EFBIG"}, "step_000004"),
    ]),
    "sft": (("sft", "+recipe=sft_arithmetic", *SMALL), 1, [(fails("optimizer.safetensors", 2), "step_000002")]),
    "rm": (("rm", "+recipe=rm_arithmetic", *SMALL), 1, [(fails("optimizer.safetensors", 2), "step_000002")]),
    "sample": (SAMPLE, 0, [
        (fails("samples.jsonl", 2), "samples.jsonl"), (fails(".progress.json.writing"), "progress.json"),
    ]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wherever_the_disk_fails_the_run_says_so_and_goes_on_to_the_same_end(
    case: str, rough: Nursery, undisturbed_of: Callable[..., Path], tmp_path: Path
) -> None:
    run, every, stages = CASES[case]
    folder, undisturbed = tmp_path / "run", undisturbed_of(*run)
    for event, named in stages:
        begin = (*run, *([f"checkpoint.every={every}"] if every else []), "hydra.run.dir=run")
        words = ("resume", "run") if (folder / "config.yaml").exists() else begin
        done = rough.run(*words, cwd=tmp_path, events=[event])
        check_failed(done, folder, named, CAUSES[event["raises"]])
        check_so_far(folder, undisturbed)
    if case == "sample":
        assert json.loads((folder / "progress.json").read_text())["step"] == 1, "whole steps are kept"
    check_resumed(rough, tmp_path, undisturbed)


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
@pytest.mark.parametrize(
    ("size", "larger", "named", "stand_in"),
    [
        ("100k", "3m", "step_000001", fails("optimizer.safetensors")),
        ("600k", "3m", "step_000002", fails("optimizer.safetensors") | {"call": 2}),
    ],
)
def test_a_small_disk_that_is_enlarged(
    rough: Nursery, undisturbed: Path, tmp_path: Path, size: str, larger: str, named: str, stand_in: dict[str, Any],
) -> None:  # fmt: skip
    """A real file system where one can be mounted; the same failure planted where not."""
    place = tmp_path / "disk"
    with small_disk(place, size) as mounted:
        words = (*tiny(), "checkpoint.every=1", "hydra.run.dir=run")
        done = rough.run(*words, cwd=place, events=[] if mounted else [stand_in])
        if mounted:
            subprocess.run(["mount", "-o", f"remount,size={larger}", str(place)], check=True)
        check_failed(done, place / "run", named, CAUSES["ENOSPC"])
        check_so_far(place / "run", undisturbed)
        if mounted:  # and again, at another place, on a disk that somebody else has filled
            (place / "ballast").write_bytes(bytes(shutil.disk_usage(place).free - 40_000))
            done = rough.run("resume", "run", cwd=place)
            assert (done.code, CAUSES["ENOSPC"] in only_line(done)) == (1, True), done.err
            (place / "ballast").unlink()
        rough.run("resume", "run", cwd=place, ends=0)
        check_same(place / "run", undisturbed)


# What is typed after `rlft`, which write fails, and what is named.
OTHERS = [
    ("eval run=run", ".step_*.jsonl.writing", ".jsonl has"),
    ("export run=run out=out", "model.safetensors", "for out and has"),
    ("export run=run out=out", "README.md", "for out and has"),
    ("export run=run out=out as=adapter", "adapter_model.safetensors", "for out and has"),
    ("report run", ".report.html.writing", "for report.html and has"),
    ("resume run/checkpoints/step_000003 hydra.run.dir=fork", "optimizer.safetensors", "for step_000003 and has"),
    ("resume run/checkpoints/step_000003 hydra.run.dir=fork", "metrics.jsonl", "for metrics.jsonl and has"),
    ("resume run/checkpoints/step_000003 hydra.run.dir=fork", ".config.yaml.writing", "for config.yaml and has"),
]


def test_other_commands_say_it_too_and_leave_nothing(rough: Nursery, undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    before = files_of(tmp_path / "run")
    for words, name, said in OTHERS:
        done = rough.run(*words.split(), cwd=tmp_path, events=[fails(name)])
        line = only_line(done)
        assert done.code == 1, (words, name, done.err)
        assert line.startswith(f"rlft: stopped: {CAUSES['ENOSPC']}: "), (words, name)
        assert said in line, (words, name)
        assert line.endswith(", then repeat the command")
        assert files_of(tmp_path / "run") == before, (words, name)
        left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("process_")]
        assert left == ["run"], (words, name)
        if words.startswith("eval"):
            assert "length/mean" in done.out, "what was measured is printed all the same"


@pytest.mark.slow
def test_a_sweep_says_it_of_its_job_and_keeps_its_table_whole(rough: Nursery, tmp_path: Path) -> None:
    words = (*tiny("steps=1", "eval.every=0"), "-m", "seed=1,2", "hydra.sweep.dir=swept")
    done = rough.run(*words, cwd=tmp_path, events=[fails("metrics.jsonl")])
    assert done.code == 1
    assert f"job 0 failed: {CAUSES['ENOSPC']}: swept/0 needs " in done.err
    assert "Traceback" not in done.err
    table = (tmp_path / "swept" / "sweep.csv").read_bytes()
    done = rough.run(*words, cwd=tmp_path, events=[fails(".sweep.csv.writing")])
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
