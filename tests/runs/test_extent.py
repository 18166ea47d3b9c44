"""A resume that would end before what the run has done is refused, says how far the run is, and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlft import cli

SMALL = ("generation=transformers", "generation.max_tokens=24", "scoring.workers=0", "model.device=cpu", "lora.rank=2")
OFTEN = ("trainer.schedule=constant", "checkpoint.every=1", "checkpoint.keep=9", "eval.every=0", "console=null")
TRAIN = ("train", *SMALL, *OFTEN, "prompts_per_step=2", "group_size=2", "data.size=16", "data.held_out_size=4")
LEARN = ("max_completion_tokens=64", "prompts.max_tokens=64", *OFTEN)
SFT = ("sft", *SMALL, *LEARN, "demonstrations.path=embedded:arithmetic-demonstrations", "examples_per_step=2")
RM = ("rm", "model.device=cpu", "lora.rank=2", *LEARN, "preferences.path=embedded:arithmetic-preferences")
SAMPLE = ("sample", *SMALL[:-1], "n=2", "data.size=16", "data.held_out_size=4", "prompts_per_step=2")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps of each command that trains, and one of `rlft sample` of four prompts."""
    folder = tmp_path_factory.mktemp("runs")
    for words in (TRAIN, SFT, (*RM, "rankings_per_step=2")):
        assert cli.run([*words, "steps=3", f"hydra.run.dir={folder / words[0]}"]) == 0
    assert cli.run([*SAMPLE, "num_prompts=4", f"hydra.run.dir={folder / 'sample'}"]) == 0
    return folder


@pytest.mark.parametrize("command", ["train", "sft", "rm"])
@pytest.mark.parametrize("steps", [1, 2])
def test_fewer_steps_than_the_run_has_done_are_refused_with_where_it_stands_and_what_is_possible(
    runs: Path, command: str, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs / command
    before = contents(folder)
    capsys.readouterr()
    assert cli.run(["resume", str(folder), f"steps={steps}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rlft: steps: the run has done 3 steps already, and none can be undone, got {steps}; ")
    shown = os.path.relpath(folder)
    assert f"raise it (rlft resume {shown} steps=6)" in said
    fork = f"start a new run from an earlier checkpoint (rlft resume {shown}/checkpoints/step_000001 steps=2)"
    assert (fork in said) == (steps == 2), "step 1 has no checkpoint before it"
    assert contents(folder) == before, "neither config.yaml nor status.json says otherwise now"


def test_they_are_refused_before_a_library_is_imported(runs: Path) -> None:
    code = f"import sys; from rlft import cli; print(cli.run(['resume', {str(runs / 'train')!r}, 'steps=1']), "
    done = subprocess.run(
        [sys.executable, "-c", f"{code} 'torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "2 False\n", done.stderr


def test_a_pipeline_that_asks_for_fewer_steps_than_there_are_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(runs / "sft")
    assert cli.run([*SFT, "steps=2", "resume=auto", f"hydra.run.dir={runs / 'sft'}"]) == 2
    assert "the run has done 3 steps already" in capsys.readouterr().err
    assert contents(runs / "sft") == before


def test_fewer_prompts_than_are_sampled_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(runs / "sample")
    assert cli.run(["resume", str(runs / "sample"), "num_prompts=2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rlft: num_prompts: the run has sampled 4 prompts already, got 2; ")
    assert f"raise it (rlft resume {os.path.relpath(runs / 'sample')} num_prompts=8)" in said
    assert contents(runs / "sample") == before


def test_more_prompts_go_on_as_if_they_had_been_asked_for_at_once(runs: Path, tmp_path: Path) -> None:
    for name, words in {"more": ["num_prompts=2"], "once": ["num_prompts=6"]}.items():
        assert cli.run([*SAMPLE, *words, f"hydra.run.dir={tmp_path / name}"]) == 0
    assert cli.run(["resume", str(tmp_path / "more"), "num_prompts=6"]) == 0
    more, once = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("more", "once"))
    assert more == once
    assert json.loads((tmp_path / "more" / "status.json").read_text())["steps"] == 3


def test_prompts_after_a_cut_step_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SAMPLE, "num_prompts=3", f"hydra.run.dir={tmp_path / 'cut'}"]) == 0
    before = contents(tmp_path / "cut")
    assert cli.run(["resume", str(tmp_path / "cut"), "num_prompts=6"]) == 2
    assert "num_prompts: the run ended with 3 prompts inside a step of 2" in capsys.readouterr().err
    assert contents(tmp_path / "cut") == before
