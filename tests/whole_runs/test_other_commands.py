"""Commands that train nothing, and disks, when a signal comes or a disk is full: a line, and nothing half written."""

import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from disturbed_runs import CAUSES, Event, full, without_notes
from run_folders import check_same, check_so_far, files_of, tiny, whole_lines
from run_processes import environment, happens, marked
from slow_cases import slow

Row = tuple[str, Event, int, str]
"""(what is typed after `rlft`, what happens, the exit code, a pattern of the only line on stderr)"""


def signalled(words, at, do, kept):
    return words, {"at": at, "call": 1, "do": do}, 130, re.escape(f"rlft: interrupted: {kept}")


def written(words, file, named):
    """The write of a file fails."""
    cause = re.escape(f"rlft: stopped: {CAUSES['ENOSPC']}: ")
    return words, {"half": file, "call": 1, "raises": "ENOSPC"}, 1, f"{cause}.*{named} has .*, then repeat the command"


FORK = "resume run/checkpoints/step_000003 hydra.run.dir=fork"
QUICK = [
    signalled(
        "eval run=run scoring.workers=1", "rlft.loop.session:Session.evaluate", "terminate", "nothing was written"
    ),
    signalled("export run=run out=out", "rlft.system.files:flush", "warn", "nothing was exported"),
    signalled("chat run=run", "rlft.commands.chat:open_roles", "hang up", "the conversation has ended"),
    written("eval run=run", ".step_*.jsonl.writing", ".jsonl"),
    written("export run=run out=out", "model.safetensors", "for out and"),
    written(FORK, "metrics.jsonl", "for metrics.jsonl and"),
]
OTHERS = [
    signalled("eval run=run", "rlft.loop.parts:load_for_training", "interrupt", "nothing was written"),
    signalled("eval run=run", "rlft.system.files:flush", "interrupt", "nothing was written"),
    signalled("export run=run out=out", "rlft.commands.export.weights:merge", "interrupt", "nothing was exported"),
    signalled("report run", "rlft.commands.watch.report:page", "interrupt", "no report was written"),
    signalled("report run", "rlft.system.files:flush", "warn again", "no report was written"),
    signalled("plan +recipe=grpo_arithmetic", "rlft.plan.prediction:predict", "interrupt", "nothing was begun"),
    signalled("runs .", "rlft.commands.watch.runs:rows", "hang up", "nothing was changed"),
    signalled("diff run run", "rlft.commands.watch.diff:compare_metrics", "terminate", "nothing was changed"),
    signalled(
        "watch run", "rlft.commands.watch.watch:print_summary", "interrupt",
        "the view has ended, the run is left as it is",
    ),
    signalled(
        "resume run steps=9", "rlft.runs.run_folder:check_same_inputs", "interrupt", "the run is as it was"
    ),
    written("export run=run out=out", "README.md", "for out and"),
    written("export run=run out=out as=adapter", "adapter_model.safetensors", "for out and"),
    written("report run", ".report.html.writing", "for report.html and"),
    written(FORK, "optimizer.safetensors", "for step_000003 and"),
    written(FORK, ".config.yaml.writing", "for config.yaml and"),
]  # fmt: skip


@pytest.mark.parametrize("rows", [QUICK, slow(OTHERS)], ids=["quick", "others"])
def test_it_ends_with_a_line_and_nothing_half_written(rows, forks, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    before = files_of(tmp_path / "run")
    for words, event, code, pattern in rows:
        started = forks.start(*words.split(), cwd=tmp_path, events=[event])
        done = started.wait()
        [line] = without_notes(done)
        assert (done.code, bool(re.fullmatch(pattern, line))) == (code, True), (words, event, done.err)
        assert happens(lambda mark=started.mark: not marked(mark), within_s=60), "whoever it started ends with it"
        assert files_of(tmp_path / "run") == before, words
        left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("process_")]
        assert left == ["run"], (words, event)
        if (words.split()[0], code) == ("eval", 1):
            assert "length/mean" in done.out, "what was measured is printed all the same"


# -- a file system that is full, enlarged and filled again; a sweep's, and that of the output --------------------------
@contextmanager
def small_disk(place, size):
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
@pytest.mark.parametrize(("size", "step", "call"), [("100k", "step_000001", 1), ("600k", "step_000002", 2)])
def test_a_small_disk_that_is_enlarged(forks, undisturbed, tmp_path, size, step, call):
    """A real file system where one can be mounted; the same failure planted where not."""
    place, hit = tmp_path / "disk", full(step, "optimizer.safetensors", call)
    with small_disk(place, size) as mounted:
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
def test_a_sweep_says_it_of_its_job_and_keeps_its_table_whole(forks, tmp_path):
    words = (*tiny("steps=1", "eval.every=0"), "-m", "seed=1,2", "hydra.sweep.dir=swept")
    done = forks.run(*words, cwd=tmp_path, events=full("", "metrics.jsonl").events, ends=1)
    assert f"job 0 failed: {CAUSES['ENOSPC']}: swept/0 needs " in done.err
    assert "Traceback" not in done.err
    table = (tmp_path / "swept" / "sweep.csv").read_bytes()
    done = forks.run(*words, cwd=tmp_path, events=full("", ".sweep.csv.writing").events)
    assert (done.code, "swept needs " in done.err) == (1, True), done.err
    assert (tmp_path / "swept" / "sweep.csv").read_bytes() == table
    assert len(whole_lines(tmp_path / "swept" / "0" / "metrics.jsonl")) == 1, "what failed first has gone on"


@pytest.mark.parametrize("words", ["recipes", "--version"])  # more than is written at once, and less
def test_output_on_a_full_disk_is_an_error_in_one_line(words):
    command = [sys.executable, "-m", "rlft.cli", words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment({}))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert done.stderr.startswith("rlft: stopped: the disk is full (No space left on device)")
