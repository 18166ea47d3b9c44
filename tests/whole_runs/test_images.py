"""Runs on prompts with images: stopped and resumed they are the same run, and files and audit name the images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import check_same, learned

from rlft import cli
from rlft.data.shapes import drawing
from rlft.logger.jsonl import rollout_file

WORDS = (
    "train", "+recipe=grpo_shapes", "data.size=40", "data.held_out_size=8", "prompts_per_step=4", "group_size=4",
    "eval.every=2", "eval.num_prompts=4", "eval.num_samples=2", "model.device=cpu", "scoring.workers=0",
    "logger=[jsonl]", "checkpoint.every=1", "checkpoint.keep=99", "minibatches=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "run"
    assert cli.run([*WORDS, "steps=4", f"hydra.run.dir={folder}"]) == 0
    assert learned(folder)
    return folder


def test_resumed_it_is_the_same_run(run: Path, tmp_path: Path) -> None:
    halted = tmp_path / "halted"
    assert cli.run([*WORDS, "steps=2", f"hydra.run.dir={halted}"]) == 0
    assert cli.run(["resume", str(halted), "steps=4"]) == 0
    check_same(halted, run)


def test_rollouts_name_their_images_and_an_audit_compares_them_with_the_data(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["audit", f"run={run}"]) == 0
    file = rollout_file(run, 3)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["images"] == [drawing(line["prompt_id"]).digest] for line in lines)
    capsys.readouterr()
    file.write_text("".join(json.dumps({**line, "images": ["0" * 16]}) + "\n" for line in lines))
    assert cli.run(["audit", f"run={run}"]) == 1
    assert "its images are not those of the data" in " ".join(capsys.readouterr().out.split())
