"""scripts/make_tiny_shapes.py makes a model that counts shapes, from its tokenizer to the README."""

from __future__ import annotations

from pathlib import Path

import make_tiny_model
import make_tiny_shapes
import pytest
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rlft.data.shapes import Shapes
from rlft.tokens.images import read_processor
from rlft.types import Split


@pytest.mark.slow
def test_a_model_is_taught_measured_and_saved_with_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_tiny_model, "PROBLEMS", 2)
    monkeypatch.setattr(make_tiny_shapes, "PICTURES", 8)
    monkeypatch.setattr(make_tiny_shapes, "BATCH", 2)
    out = tmp_path / "made"
    make_tiny_shapes.main(["--steps", "2", "--late-steps", "1", "--out", str(out)])
    model, tokenizer = AutoModelForImageTextToText.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    embedded = make_tiny_model.ASSETS / "tiny-shapes"
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_text() == (embedded / name).read_text(), name
    processor = read_processor(tokenizer, {"pretrained_model_name_or_path": out}, model.config)
    [picture, *_] = Shapes(most=9, size=1, held_out_size=1, seed=0).load(Split.train)
    assert processor.tensors(picture.images[0])["image_grid_thw"].tolist() == [[1, 6, 6]]
    readme = (out / "README.md").read_text()
    assert "make_tiny_shapes.py --seed 0 --steps 2 --late-steps 1 --lr 0.004" in readme
    assert "256 x 8 samples: right " in readme
