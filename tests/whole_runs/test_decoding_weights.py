"""A run whose weights for decoding were measured keeps them, also where another processor resumes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from run_folders import chain, metrics

from rlft import cli
from rlft.config.schema import WEIGHTS
from rlft.generation import transformers
from rlft.generation.transformers import Weights
from rlft.system import machine

WORDS = ["+recipe=grpo_arithmetic", "generation=transformers", f"{WEIGHTS}=fastest", "resume=auto",
         "prompts_per_step=4", "group_size=16", "data.size=16", "data.held_out_size=8", "eval.every=0",
         "generation.max_tokens=12", "checkpoint.every=1", "trainer.schedule=constant"]  # fmt: skip


@pytest.mark.parametrize("weights", [Weights.merged_bfloat16, Weights.merged_int8])
def test_a_resume_keeps_the_weights_and_says_that_the_processor_is_another(
    weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers, "_fastest", lambda: weights)
    assert cli.run(["train", *WORDS, "steps=3", "hydra.run.dir=whole"]) == 0
    printed = capsys.readouterr()
    assert "token_truncate" in printed.out + printed.err
    assert cli.run(["train", *WORDS, "steps=2", "hydra.run.dir=resumed"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(transformers, "_fastest", lambda: Weights.merged)
    (tmp_path / "cpuinfo").write_text("model name\t: Another 9000\n")
    here = machine.processor()
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert cli.run(["train", *WORDS, "steps=3", "hydra.run.dir=resumed"]) == 0
    said = capsys.readouterr().err
    assert f"note: the processor is {machine.processor()}, and was {here}: numbers may have other last bits" in said
    for name in ("whole", "resumed"):
        config = yaml.safe_load(Path(name, "config.yaml").read_text())
        assert config["generation"]["transformers"]["weights"] == weights
    assert metrics(Path("resumed")) == metrics(Path("whole"))
    tensors = [[{**line, "machine": None} for line in chain(Path(name))] for name in ("whole", "resumed")]
    assert tensors[0] == tensors[1]


def test_an_older_run_with_rounded_weights_resumes_with_what_they_were(tmp_path: Path, monkeypatch: Any) -> None:
    """Without the LM head among them, and without a correction of the mismatch."""
    monkeypatch.chdir(tmp_path)
    words, runs = [word for word in WORDS if WEIGHTS not in word], {"whole": 3, "resumed": 2, "again": 2}
    for name, steps in runs.items():
        asked = [*words, f"{WEIGHTS}=adapted_bfloat16", f"steps={steps}", f"hydra.run.dir={name}"]
        assert cli.run(["train", *asked]) == 0
    for name in ("resumed", "again"):
        file = Path(name, "config.yaml")
        config = yaml.safe_load(file.read_text())
        del config["generation"]["drafts"], config["generation"]["draft_rows"]
        config["generation"]["transformers"]["weights"] = "merged_bfloat16"
        file.write_text(yaml.safe_dump(config, sort_keys=False))
    assert cli.run(["resume", "resumed", "steps=3"]) == 0
    again = [*words, f"{WEIGHTS}=merged_bfloat16", "steps=3", "hydra.run.dir=again"]
    assert cli.run(["train", *again]) == 0
    for name in ("resumed", "again"):
        assert metrics(Path(name)) == metrics(Path("whole"))
        assert chain(Path(name)) == chain(Path("whole"))
