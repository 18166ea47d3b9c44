"""Pictures whose shapes are counted: a function of their names, with splits that share none."""

from collections import Counter
from io import BytesIO

import numpy as np
import pytest
from PIL import Image as pillow

from rlft.data.shapes import CELL, CELLS, Shapes, drawing, pixels_of
from rlft.types import IMAGE, Split, UserError


def task(**keys):
    return Shapes(**{"most": 9, "size": 60, "held_out_size": 30, "seed": 0, **keys})


def test_pictures_are_those_of_their_names():
    train = task().load(Split.train)
    assert {int(p.answer) for p in train} == set(range(1, 10))
    for prompt in train[:5]:
        assert prompt.images == (drawing(prompt.id),)
        assert prompt.messages[0]["content"].count(IMAGE) == 1
        with pillow.open(BytesIO(prompt.images[0].data)) as opened:
            assert np.array_equal(np.asarray(opened), pixels_of(prompt.id))


@pytest.mark.parametrize("number", range(1, 10))
def test_a_picture_has_as_many_cells_with_a_shape_as_its_name_says(number):
    pixels = pixels_of(f"{number}-abc").astype(int)
    background = Counter(map(tuple, pixels.reshape(-1, 3))).most_common()
    dark = next(color for color, _ in background if max(color) <= 60)
    cells = pixels.reshape(CELLS, CELL, CELLS, CELL, 3).swapaxes(1, 2).reshape(CELLS**2, -1, 3)
    assert sum((cell != dark).any() for cell in cells) == number


def test_without_pillow_it_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^data: the pillow library is not installed, got shapes; .*rlft\[vision\]"):
        task().load(Split.train)
