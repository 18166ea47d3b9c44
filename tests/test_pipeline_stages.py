"""`resume=auto`: a stage of a pipeline begins, goes on, is left alone when finished, and refuses another origin."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlft import cli

SMALL = ("generation=transformers", "generation.max_tokens=24", "scoring.workers=0", "model.device=cpu")
TEACH = (
    "sft", "demonstrations.path=embedded:arithmetic-demonstrations", "steps=2", "examples_per_step=4",
    "max_completion_tokens=64", "prompts.max_tokens=64", "eval.every=0", "console=null", "lora.rank=4",
    "trainer.lr=1e-3", *SMALL,
)  # fmt: skip
SAMPLE = ("sample", "num_prompts=4", "n=2", "data.size=16", "data.held_out_size=8", *SMALL)


def stage(folder: Path, *words: str) -> int:
    return cli.run([*words, "resume=auto", f"hydra.run.dir={folder}"])


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A taught adapter, and what it said."""
    folder = tmp_path_factory.mktemp("pipeline")
    assert stage(folder / "1-sft", *TEACH) == 0
    assert stage(folder / "2-sample", *SAMPLE, f"adapter={folder / '1-sft'}") == 0
    return folder


@pytest.fixture
def copied(pipeline: Path, tmp_path: Path) -> Path:
    """The pipeline in a place of the test's own, where its stages still name each other as they did."""
    shutil.move(pipeline, tmp_path / "aside")
    shutil.copytree(tmp_path / "aside", pipeline)
    yield pipeline
    shutil.rmtree(pipeline)
    shutil.move(tmp_path / "aside", pipeline)


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.slow
def test_finished_stages_are_left_as_they_are(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(pipeline)
    assert stage(pipeline / "1-sft", *TEACH) == 0
    assert stage(pipeline / "2-sample", *SAMPLE, f"adapter={pipeline / '1-sft'}") == 0
    assert capsys.readouterr().err.count("finished already, with the same config and inputs") == 2
    assert files(pipeline) == before


def test_a_stage_goes_on_where_it_was(copied: Path) -> None:
    folder, words = copied / "2-sample", [*SAMPLE, f"adapter={copied / '1-sft'}"]
    whole = (folder / "samples.jsonl").read_bytes()
    (folder / "progress.json").unlink()  # as if it had been stopped before its first step was written down
    assert stage(folder, *words) == 0
    assert (folder / "samples.jsonl").read_bytes() == whole


@pytest.mark.slow
def test_a_stage_made_from_something_else_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "1-sft")
    assert stage(copied / "1-sft", *TEACH, "seed=1") == 0
    before = files(copied / "2-sample")
    assert stage(copied / "2-sample", *SAMPLE, f"adapter={copied / '1-sft'}") == 2
    assert "adapter: the adapter in that folder changed since the run began" in capsys.readouterr().err
    assert files(copied / "2-sample") == before


def test_a_stage_asked_for_something_else_is_refused(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage(pipeline / "1-sft", *TEACH, "trainer.beta1=0.5") == 2
    assert "trainer.beta1: 0.9 -> 0.5" in capsys.readouterr().err
