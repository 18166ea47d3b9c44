"""The images of prompts in a report: found in the run's data by their digests, small, and within a limit."""

from __future__ import annotations

import base64
import hashlib
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow

from rlft.commands.watch.report_completions import MAX_EDGE, data_url, shown_images
from rlft.config.compose import compose
from rlft.data.shapes import Shapes, drawing, pixels_of
from rlft.types import Image, Split

SHAPES: dict[str, Any] = {"most": 9, "size": 12, "held_out_size": 4, "seed": 1}


def decoded(url: str) -> pillow.Image:
    start = "data:image/jpeg;base64,"
    assert url.startswith(start)
    return pillow.open(BytesIO(base64.b64decode(url.removeprefix(start))))


@pytest.fixture
def config() -> dict[str, Any]:
    return {"data": {"_target_": "rlft.data.shapes.Shapes", **SHAPES}}


def test_those_of_both_splits_are_shown_and_what_the_data_lack_is_not(config: dict[str, Any]) -> None:
    trained, held_out = (Shapes(**SHAPES).load(split)[-1] for split in (Split.train, Split.held_out))
    wanted = [trained.images[0].digest, "0" * 16, held_out.images[0].digest]
    shown = shown_images(config, [{"images": wanted}], 10**6)
    assert list(shown) == [wanted[0], wanted[2]]
    for prompt, url in zip((trained, held_out), shown.values(), strict=True):
        # JPEG rounds: the colours of a picture of nine cells are hit on average, and those of another are not.
        gap = np.abs(np.asarray(decoded(url), dtype=float) - pixels_of(prompt.id)).mean()
        other = np.abs(np.asarray(decoded(url), dtype=float) - pixels_of("9-other")).mean()
        assert gap < 6 < other


def test_they_take_no_more_bytes_than_they_may_and_the_first_come_first(config: dict[str, Any]) -> None:
    images = [prompt.images[0] for prompt in Shapes(**SHAPES).load(Split.train)]
    sizes = [len(data_url(image)) for image in images]
    wanted = [image.digest for image in images]
    assert list(shown_images(config, [{"images": wanted}], sum(sizes[:3])))[:3] == wanted[:3]
    assert shown_images(config, [{"images": wanted}], min(sizes) - 1) == {}
    assert sum(map(len, shown_images(config, [{"images": wanted}], 3000).values())) <= 3000


def test_a_large_image_is_made_small() -> None:
    file = BytesIO()
    pillow.new("RGBA", (1000, 500), (255, 0, 0, 255)).save(file, "PNG")
    assert decoded(data_url(Image(digest="", data=file.getvalue()))).size == (MAX_EDGE, MAX_EDGE // 2)


def test_data_that_are_gone_or_damaged_are_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good, rows = drawing("3-good"), tmp_path / "rows.jsonl"
    (tmp_path / "good.png").write_bytes(good.data or b"")
    row = {"answer": "3", "image": "good.png"}
    rows.write_text("".join(json.dumps({**row, "prompt": f"How many? {i}"}) + "\n" for i in range(20)))
    config = compose(["data=jsonl", f"data.path={rows}", "data.image_field=image"])
    digest = hashlib.sha256(good.data or b"").hexdigest()[:16]
    assert list(shown_images(config, [{"images": [digest]}], 10**6)) == [digest]
    (tmp_path / "good.png").unlink()
    assert shown_images(config, [{"images": [digest]}], 10**6) == {}
    assert "the report lacks images, since the run's data cannot be read" in capsys.readouterr().err
    rows.unlink()
    assert shown_images(config, [{"images": [digest]}], 10**6) == {}
    assert "the report lacks images, since the run's data cannot be read" in capsys.readouterr().err


def test_data_of_a_run_without_images_are_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown_images({}, [{"prompt": []}], 10**6) == {}
    assert capsys.readouterr().err == ""
