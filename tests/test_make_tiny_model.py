"""scripts/make_tiny_model.py makes a model, from its tokenizer to the README with what it measured."""

from __future__ import annotations

from pathlib import Path

import make_tiny_model
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.slow
def test_a_model_is_taught_measured_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_tiny_model, "PROBLEMS", 2)
    out = tmp_path / "made"
    words = ["--size", "student", "--steps", "101", "--mixture-steps", "1", "--batch", "2"]
    make_tiny_model.main([*words, "--out", str(out)])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.hidden_size == make_tiny_model.SIZES["student"].hidden
    assert len(tokenizer) == len(make_tiny_model.make_tokenizer())
    readme = (out / "README.md").read_text()
    assert "make_tiny_model.py --size student --seed 0 --steps 101 --mixture-steps 1 --batch 2 " in readme
    assert "2 x 8 samples" in readme
