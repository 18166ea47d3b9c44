"""Ctrl-C and SIGTERM in verbs that train nothing: they end soon, with 130 and a line that says what is kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import files_of
from run_processes import Nursery, environment, happens, marked

SAMPLE = ("sample", "generation=transformers", "generation.max_tokens=24", "scoring.workers=0", "model.device=cpu")
SAMPLED = (*SAMPLE, "n=2", "num_prompts=6", "prompts_per_step=2", "data.size=16", "data.held_out_size=4")

# What is typed after `rlft`, where the signal comes, which one, and what the line says.
CASES = [
    ("eval run=run scoring.workers=1", "rlft.session:load_for_training", "interrupt", "nothing was written"),
    ("eval run=run scoring.workers=1", "rlft.session:Session.evaluate", "terminate", "nothing was written"),
    ("eval run=run", "rlft.trainer.checkpoint:_flush", "interrupt", "nothing was written"),
    ("export run=run out=out", "rlft.export_verb:merge", "interrupt", "nothing was exported"),
    ("export run=run out=out", "rlft.export_verb:_flush", "terminate", "nothing was exported"),
    ("report run", "rlft.report_verb:page", "interrupt", "no report was written"),
    ("report run", "rlft.trainer.checkpoint:_flush", "terminate", "no report was written"),
    ("chat run=run", "rlft.chat_verb:open_roles", "interrupt", "the conversation has ended"),
    ("plan +recipe=grpo_arithmetic", "rlft.plan_verb:plan_of", "interrupt", "nothing was begun"),
    ("runs .", "rlft.runs_verb:rows", "interrupt", "nothing was changed"),
    ("diff run run", "rlft.diff_verb:two_runs", "terminate", "nothing was changed"),
    ("watch run", "rlft.watch_verb:print_summary", "interrupt", "the view has ended, the run is left as it is"),
    ("resume run steps=9", "rlft.runfolder:check_resume", "interrupt", "the run is as it was"),
]


def test_a_verb_that_trains_nothing_ends_with_130_a_line_and_nothing_half_written(
    rough: Nursery, undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    before = files_of(tmp_path / "run")
    for words, at, signal, line in CASES:
        started = rough.start(*words.split(), cwd=tmp_path, events=[{"at": at, "call": 1, "do": signal}])
        done = started.wait()
        assert (done.code, done.err.splitlines()) == (130, [f"rlft: interrupted: {line}"]), (words, at, done.err)
        assert happens(lambda mark=started.mark: not marked(mark), within_s=10), "whoever it started ends with it"
        assert files_of(tmp_path / "run") == before, words
        left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("process_")]
        assert left == ["run"], (words, at)


def test_sampling_ends_at_once_keeps_whole_steps_and_goes_on(rough: Nursery, tmp_path: Path) -> None:
    assert rough.run(*SAMPLED, "hydra.run.dir=whole", cwd=tmp_path).code == 0
    event = {"at": "rlft.sampling_verb:sample", "call": 2, "do": "interrupt"}
    done = rough.run(*SAMPLED, "hydra.run.dir=cut", cwd=tmp_path, events=[event])
    whole = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    kept = (tmp_path / "cut" / "samples.jsonl").read_bytes()
    assert (done.code, whole.startswith(kept), len(kept) > 0) == (130, True, True)
    [said] = done.err.splitlines()
    number = kept.count(b'"prompt_id"')
    assert said.startswith(f"interrupted after step 1: {number} of 4 completions are kept in cut/")
    assert said.endswith("; go on with: rlft resume cut")
    assert rough.run("resume", "cut", cwd=tmp_path).code == 0
    assert (tmp_path / "cut" / "samples.jsonl").read_bytes() == whole


SWALLOWED = """
import os, signal, time
from rlft import interrupt
def press():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        pass  # as a library might, and a destructor does
"""
ENDS = {
    "a verb": "with interrupt.ends_promptly('nothing was written'):\n    press(); time.sleep(60)",
    "a run, twice": """
with interrupt.ends_promptly('nothing was written'), interrupt.Interrupt(lambda text: None) as pressed:
    os.kill(os.getpid(), signal.SIGINT)
    assert pressed.requested
    press(); time.sleep(60)""",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_a_signal_that_a_library_swallows_ends_the_process_all_the_same(code: str) -> None:
    start = time.monotonic()
    command = [sys.executable, "-c", SWALLOWED + code]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (130, "rlft: interrupted: nothing was written\n")
    assert time.monotonic() - start < 45, "neither of the minutes was slept"


def test_what_is_in_its_own_hands_is_not_ended() -> None:
    code = (
        SWALLOWED
        + """
with interrupt.ends_promptly(''), interrupt.handled_inside():
    press(); time.sleep(interrupt.GRACE_S + 0.5)
print('alive')"""
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
