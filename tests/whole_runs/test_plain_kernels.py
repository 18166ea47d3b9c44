"""Whole runs with `model.kernels=plain`: the same run as with rlft's kernels, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlft import cli
from rlft.model.backbone import load_backbone
from rlft.model.kernels import selection

TINY = (
    "steps=1", "prompts_per_step=2", "group_size=3", "generation=transformers", "generation.max_tokens=12",
    "lora.rank=2", "data.size=16", "data.held_out_size=4", "eval.every=0", "model.device=cpu", "scoring.workers=0",
    "trainer.lr=1e-3", "epochs=2", "algorithm=ppo", "critic.kind=adapter",
    "algorithm.entropy_coef=0.01",
)  # fmt: skip
NOT_COMPARED = ("time/", "memory/", "waste/padding_fraction", "tokens/trained")


def run(folder: Path, *words: str) -> list[dict[str, float]]:
    assert cli.run(["train", *TINY, *words, f"hydra.run.dir={folder}"]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in lines]


def completions(folder: Path) -> list[list[int]]:
    files = sorted((folder / "rollouts").iterdir())
    return [json.loads(line)["token_ids"] for file in files for line in file.read_text().splitlines()]


def test_a_plain_run_is_the_same_run(tmp_path: Path) -> None:
    ours, theirs = run(tmp_path / "auto"), run(tmp_path / "plain", "model.kernels=plain")
    assert completions(tmp_path / "auto") == completions(tmp_path / "plain")
    for one, other in zip(ours, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_a_fall_back_is_told_in_the_table_and_in_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selection.transformers, "__version__", "5.99.0")
    load_backbone.cache_clear()
    try:
        run(tmp_path / "run")
    finally:
        load_backbone.cache_clear()
    shown = " ".join(capsys.readouterr().out.split())
    assert "transformers 5.99.0 is not among the tested releases (5.17 to 5.24)" in shown
    assert "model.kernels: plain instead of auto" in shown
