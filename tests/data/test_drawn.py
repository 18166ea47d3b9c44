"""What is drawn depends on the keys and the seed alone, and stays the same from release to release."""

from __future__ import annotations

import hashlib

import pytest

from rlft.data.arithmetic import Arithmetic
from rlft.data.chains import Chains
from rlft.data.drawn import Drawn, split_of
from rlft.data.shapes import Shapes
from rlft.types import Split

SIZES = {"size": 100, "held_out_size": 20, "seed": 3}


@pytest.mark.parametrize(
    ("source", "digest"),
    [
        (Arithmetic(difficulty=2, operations=["+", "-"], **SIZES), "f1050c687b01b9a1"),
        (Chains(steps=5, largest=20, **SIZES), "ff8c56f295e395ef"),
        (Shapes(most=9, **SIZES), "80337ee8605b128c"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Drawn) else "",
)
def test_the_same_keys_draw_the_same_prompts(source: Drawn, digest: str) -> None:
    by_split = {split: source.load(split) for split in Split}
    assert [len(by_split[split]) for split in (Split.train, Split.held_out)] == [100, 20]
    assert all(split_of(p.id) is split for split, prompts in by_split.items() for p in prompts)
    text = "\n".join(f"{p.id} {p.messages[0]['content']} {p.answer}" for split in Split for p in by_split[split])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest
