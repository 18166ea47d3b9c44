"""Sizes of what CUDA graphs hold: buckets of rows, and room for keys that grows as decodings are rehearsed."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rlft.generation.graphs import bucket, enlarged
from rlft.generation.memory import Decoding, Load
from rlft.generation.transformers import Transformers, Weights
from rlft.model.kernels.fixed_keys import FixedKeys


def test_a_bucket_is_the_smallest_that_holds_the_live_rows():
    sizes = sorted({bucket(live) for live in range(1, 1025)})
    assert sizes[:12] == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192]
    for live in range(1, 1025):
        assert bucket(live) == next(size for size in sizes if size >= live)
    assert all(bigger <= 2 * smaller for smaller, bigger in pairwise(sizes))


@pytest.mark.parametrize("decodings", [[(4, 8, 30)], [(4, 8, 30), (64, 1, 30)], [(64, 1, 30), (4, 8, 30), (2, 8, 20)]])
def test_the_plan_has_the_room_that_keys_get_as_decodings_are_rehearsed(decodings):
    """With the eighth by which room for prompts grows."""
    sizes = SimpleNamespace(
        packed=True, plain=False, itemsize=2, layer_width=1, vocabulary=64, key_size=8, linear=1, hidden=1, adapted=1,
        config=SimpleNamespace(num_hidden_layers=1),
    )  # fmt: skip
    asked = [Decoding(num_prompts=p, samples=n, longest=(1,) * length) for p, n, length in decodings]
    load = Load(decodings=tuple(asked), max_tokens=5, max_sequence_tokens=35, device="cuda")
    engine = Transformers(batch_size=8, graphs="auto", weights=Weights.apart)
    parts = engine.memory(sizes, load).parts
    keys, at_once = FixedKeys(), engine.batch_size
    for prompts, n, length in reversed(decodings):
        together = min(prompts, at_once // n)
        of_prompts = [(torch.ones(together * length, 1, 4), torch.ones(together * length, 1, 4))]
        keys.fit(bucket(together * n), 5, together, of_prompts, enlarged)
    held = sum(x.numel() for pair in (*keys.of_prompts, *keys.own) for x in pair)
    assert [part.bytes for part in parts if part.name == "keys and values for graphs"] == [2 * held]
    room = max(min(prompts, at_once // n) * length for prompts, n, length in decodings)
    assert keys.prompt_tokens == (room + room // 8 if len(decodings) == 3 else room)
