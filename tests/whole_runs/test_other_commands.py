"""Commands that train nothing, when a signal comes or the disk is full: they end with a line, and leave nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from disturbed_runs import CAUSES, Event, without_notes
from run_folders import files_of
from run_processes import Nursery, happens, marked
from slow_cases import slow

Row = tuple[str, Event, int, str]
"""(what is typed after `rlft`, what happens, the exit code, a pattern of the only line on stderr)"""


def signalled(words: str, at: str, do: str, kept: str) -> Row:
    return words, {"at": at, "call": 1, "do": do}, 130, re.escape(f"rlft: interrupted: {kept}")


def full(words: str, file: str, named: str) -> Row:
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
    full("eval run=run", ".step_*.jsonl.writing", ".jsonl"),
    full("export run=run out=out", "model.safetensors", "for out and"),
    full(FORK, "metrics.jsonl", "for metrics.jsonl and"),
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
    full("export run=run out=out", "README.md", "for out and"),
    full("export run=run out=out as=adapter", "adapter_model.safetensors", "for out and"),
    full("report run", ".report.html.writing", "for report.html and"),
    full(FORK, "optimizer.safetensors", "for step_000003 and"),
    full(FORK, ".config.yaml.writing", "for config.yaml and"),
]  # fmt: skip


@pytest.mark.parametrize("rows", [QUICK, slow(OTHERS)], ids=["quick", "others"])
def test_it_ends_with_a_line_and_nothing_half_written(
    rows: list[Row], forks: Nursery, undisturbed: Path, tmp_path: Path
) -> None:
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
