"""A pipeline's folder that is moved, and runs used from another working directory: every stage finds what it needs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlft import cli
from rlft.runs import run_folder
from rlft.runs.config_file import path_keys
from rlft.runs.find import find

SMALL = ("generation=transformers", "generation.max_tokens=24", "scoring.workers=0", "model.device=cpu")
OFTEN = ("checkpoint.every=1", "checkpoint.keep=9", "console=null")
LORA = ("lora.rank=2", "lora.alpha=4")
FIRST = "1-sft"


def run_in(folder: str, *words: str) -> int:
    return cli.run([*words, f"hydra.run.dir={folder}"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `work/pipe`: a pipeline of four stages, named by paths relative to `work`; data beside it."""
    root = tmp_path_factory.mktemp("built")
    work = root / "work"
    work.mkdir()
    lines = [{"prompt": f"What is {n} + 7?", "answer": str(n + 7)} for n in range(10, 30)]
    (work / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        learn = ("max_completion_tokens=64", "prompts.max_tokens=64", "eval.every=0", "model.device=cpu", *OFTEN, *LORA)
        shown = "demonstrations.path=embedded:arithmetic-demonstrations"
        assert run_in(f"pipe/{FIRST}", "sft", shown, "examples_per_step=2", "steps=1", *learn) == 0
        sampled = ("num_prompts=2", "n=4", "data.size=16", "data.held_out_size=4", "prompts_per_step=1", *SMALL)
        assert run_in("pipe/2-sample", "sample", f"adapter=pipe/{FIRST}", *sampled, "generation.temperature=2") == 0
        ranked = "preferences.path=pipe/ranked.jsonl"
        shutil.copyfile(Path(cli.__file__).parent / "assets" / "arithmetic-preferences.jsonl", "pipe/ranked.jsonl")
        from_sft = f"lora.path=pipe/{FIRST}"
        assert run_in("pipe/3-rm", "rm", ranked, from_sft, "rankings_per_step=2", "steps=1", *learn) == 0
        train = ("train", "data=jsonl", "data.path=data.jsonl", "prompts_per_step=2", "group_size=2", "steps=2")
        roles = (from_sft, f"snapshot.reference={work}/pipe/{FIRST}", "algorithm.kl_coef=0.1")
        rewards = ("reward=[exact_match,learned]", "reward.learned.path=pipe/3-rm", "trainer.schedule=constant")
        evaluated = ("eval.every=2", "eval.num_prompts=2", "eval.num_samples=1")
        assert run_in("pipe/4-train", *train, *roles, *rewards, *evaluated, *SMALL, *OFTEN, *LORA) == 0
    return root


@pytest.fixture
def moved(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The pipeline under another name in another place, its old place gone; the working directory is elsewhere, too."""
    shutil.copytree(built / "work" / "pipe", tmp_path / "elsewhere" / "renamed")
    shutil.copyfile(built / "work" / "data.jsonl", tmp_path / "elsewhere" / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    (built / "work").rename(built / "gone")
    yield Path("elsewhere/renamed")
    (built / "gone").rename(built / "work")


@pytest.mark.slow
def test_every_stage_of_a_moved_pipeline_works(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["resume", str(moved / "4-train"), "steps=3"]) == 0
    assert cli.run(["eval", f"run={moved / '4-train'}"]) == 0
    assert cli.run(["sample", f"run={moved / '4-train'}", "num_prompts=1", "n=2", "hydra.run.dir=sampled"]) == 0
    assert cli.run(["export", f"run={moved / '4-train'}", "out=adapter", "as=adapter"]) == 0
    assert cli.run(["resume", str(moved / "4-train" / "checkpoints" / "step_000002"), "hydra.run.dir=fork"]) == 0
    assert cli.run(["resume", str(moved / "3-rm"), "steps=2"]) == 0
    (moved / "2-sample" / "progress.json").unlink()
    assert cli.run(["resume", str(moved / "2-sample")]) == 0
    assert "error" not in capsys.readouterr().err
    for run in (moved / "4-train", moved / "3-rm", moved / "2-sample", Path("fork")):
        gone = [
            path
            for _, path in path_keys(find(run).config)
            if not path.startswith("embedded:") and not Path(path).exists()
        ]
        assert gone == []


@pytest.mark.slow
def test_a_moved_pipeline_moves_on(moved: Path) -> None:
    """What a resume writes into config.yaml is found again after another move."""
    assert cli.run(["resume", str(moved / "3-rm"), "steps=2"]) == 0
    moved.parent.rename("again")
    assert cli.run(["resume", "again/renamed/3-rm", "steps=3"]) == 0


def test_what_a_stage_was_made_from_is_still_compared(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = moved / FIRST / "checkpoints" / "step_000001" / "policy" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert cli.run(["resume", str(moved / "4-train"), "steps=3"]) == 2
    assert "the adapter in that folder changed since the run began" in capsys.readouterr().err


def test_runs_are_used_from_their_own_folder_and_from_beside_it(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(built / "work", tmp_path / "work")
    run = tmp_path / "work" / "pipe" / "4-train"
    monkeypatch.chdir(run)
    assert cli.run(["eval", "run=."]) == 0
    assert cli.run(["eval", "run=checkpoints/step_000001"]) == 0
    monkeypatch.chdir(tmp_path / "work" / "pipe" / FIRST)
    assert cli.run(["resume", "../4-train", "steps=3"]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    monkeypatch.chdir(run / "checkpoints" / "step_000003")
    assert cli.run(["export", "run=.", f"out={tmp_path / 'out'}", "as=adapter"]) == 0


def test_a_pipeline_that_is_repeated_after_it_was_moved_finds_its_stages_finished(
    moved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", "num_prompts=2", "n=4", "data.size=16", "data.held_out_size=4", "prompts_per_step=1", *SMALL]
    words += ["generation.temperature=2", "resume=auto", f"hydra.run.dir={moved / '2-sample'}"]
    for name in (str(moved), str(moved.resolve())):
        assert cli.run([*words, f"adapter={name}/{FIRST}"]) == 0
        assert "finished already, with the same config and inputs" in capsys.readouterr().err


def test_a_path_that_was_changed_by_hand_is_what_it_was_changed_to(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built / "work" / "pipe", tmp_path / "pipe")
    file = tmp_path / "pipe" / "4-train" / "config.yaml"
    file.write_text(file.read_text().replace("path: data.jsonl", "path: mine.jsonl"))
    config = run_folder.read(file.parent)
    assert config["data"]["path"] == "mine.jsonl"
    assert "paths" not in config["origin"]
