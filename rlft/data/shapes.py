"""Pictures of circles, squares and triangles to be counted: procedural, seeded, with disjoint splits by hash."""

from __future__ import annotations

import hashlib
import importlib.util
import random
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from rlft.config.bounds import PositiveInt
from rlft.data.arithmetic import Drawn
from rlft.system.terminal import pip_install
from rlft.types import IMAGE, Image, Prompt, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CELL, CELLS = 16, 3
"""Pixels along the edge of a cell, in which there is at most one shape, and the cells along that of a picture."""

KINDS = ("circle", "square", "triangle")
QUESTION = f"{IMAGE}How many?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes(Drawn):
    """Pictures with 1 to `most` shapes, each with the question how many there are."""

    most: PositiveInt

    @property
    def words(self) -> tuple[str, str]:
        return "pictures", "less"

    def draw(self, rng: random.Random) -> tuple[str, str, int]:
        number = rng.randint(1, self.most)
        return f"{number}-{rng.getrandbits(40):010x}", QUESTION, number

    def prompt(self, name: str, question: str, answer: str) -> Prompt:
        return replace(Drawn.prompt(self, name, question, answer), images=(drawing(name),))

    def check(self) -> None:
        """Refuses keys for which there is no picture, and to draw without Pillow. Raises UserError."""
        cells = CELLS**2
        is_valid = 1 <= self.most <= cells
        require(is_valid, "data.most", f"must be 1 to {cells}", got=self.most, remedy=f"try data.most={cells}")
        is_installed, problem = importlib.util.find_spec("PIL"), "the pillow library is not installed"
        require(is_installed, "data", problem, got="shapes", remedy=pip_install("rlft[vision]"))


def drawing(name: str) -> Image:
    """The picture with this name, `<number of shapes>-<anything>`, as a PNG."""
    from PIL import Image as pillow

    file = BytesIO()
    pillow.fromarray(pixels_of(name)).save(file, "PNG", compress_level=1)
    return Image(digest=hashlib.sha256(name.encode()).hexdigest()[:16], data=file.getvalue())


def pixels_of(name: str) -> NDArray[np.uint8]:
    """The colours `[height, width, 3]` of the picture with this name, which depend on nothing else."""
    import numpy as np

    rng = random.Random(name)
    number, edge = int(name.partition("-")[0]), CELL * CELLS
    picture = np.full((edge, edge, 3), [rng.randint(0, 60) for _ in range(3)], dtype=np.uint8)
    for cell in rng.sample(range(CELLS**2), number):
        radius = rng.randint(3, 6)
        top, left = (CELL * place + rng.randint(0, CELL - 2 * radius - 1) for place in divmod(cell, CELLS))
        area = picture[top : top + 2 * radius + 1, left : left + 2 * radius + 1]
        area[_inside(rng.choice(KINDS), radius)] = [rng.randint(110, 255) for _ in range(3)]
    return picture


@cache
def _inside(kind: str, radius: int) -> NDArray[np.bool_]:
    """Which pixels of a square with this half of an edge belong to the shape in it."""
    import numpy as np

    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    inside = {"circle": x**2 + y**2 <= radius**2, "triangle": 2 * abs(x) <= y + radius}
    return inside.get(kind, np.ones_like(x, dtype=bool))
