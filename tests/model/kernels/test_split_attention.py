"""Attention in blocks: every pair that a packed row wants, once, and no other; forward and backward against a mask."""

import random
from collections import Counter
from itertools import product

import pytest
import torch

from rlft.model.kernels import split_attention
from rlft.model.kernels.split_attention import make_blocks, take

CPU = torch.device("cpu")


def pairs_of(block):
    """(query, key) places that the block lets see each other, by its masks."""
    rows, width, keys = block.shape
    everywhere = torch.arange(10_000)
    queries = take(everywhere, block.queries.index).view(rows, width)
    key_places = take(everywhere, block.keys.index).view(rows, keys)
    slots = range(rows * width) if block.queries.slots is None else block.queries.slots.tolist()
    for slot in slots:
        row, place = divmod(slot, width)
        for k in range(keys):
            bias = None if block.bias is None else block.bias[row, 0]
            hidden = bias is not None and bias[place if len(bias) > 1 else 0, k] == -torch.inf
            if not hidden and (not block.causal or k <= place):
                yield int(queries[row, place]), int(key_places[row, k])


def wanted(prompts, completions, owner, window, images=()):
    """The same from the definition."""
    for start, length in images:
        yield from ((start + i, start + j) for j in range(length) for i in range(j))
    for start, length in (*prompts, *completions):
        yield from ((start + i, start + j) for i in range(length) for j in range(i + 1) if i - j < window)
    for (start, length), unit in zip(completions, owner, strict=True):
        first, size = prompts[unit]
        yield from ((start + i, first + j) for i in range(length) for j in range(size) if size + i - j < window)


def laid_out(prompt_lengths, completion_lengths):
    prompts, completions, owner, offset = [], [], [], 0
    for unit, (length, several) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        prompts.append((offset, length))
        offset += length
        for size in several:
            completions.append((offset, size))
            owner.append(unit)
            offset += size
    return prompts, completions, owner


@pytest.mark.parametrize("small_block", [0, 2**16], ids=["buckets", "one_block"])
def test_every_wanted_pair_is_in_one_block_and_no_other(small_block, monkeypatch):
    """Also where images are read both ways, so that what is behind in them is seen."""
    monkeypatch.setattr(split_attention, "SMALL_BLOCK", small_block)
    rows = [(laid_out([12, 5, 9], [[3, 2], [], [4]]), [(1, 4), (6, 5), (12 + 3 + 2, 2)])]
    for seed in range(5):
        dice = random.Random(seed)
        lengths = [dice.randint(1, 9) for _ in range(4)]
        rows.append((laid_out(lengths, [[dice.randint(0, 8) for _ in range(dice.randint(0, 3))] for _ in lengths]), []))
    for window, (row, images) in product((None, 1, 2, 3, 4, 7, 11, 20), rows):
        monkeypatch.setattr(split_attention, "TILE", 3 if small_block and not images else 256)
        blocks = make_blocks(*row, CPU, window=window, images=images)
        found = Counter(pair for block in blocks for pair in pairs_of(block))
        assert found == Counter(wanted(*row, window or 100, images))


def test_long_spans_do_not_inflate_short_ones():
    # One completion of 2,000 tokens beside 60 of 20: in one block they would fill 61 x 2,000 places.
    row = laid_out([10], [[2000] + [20] * 60])
    causal = [block for block in make_blocks(*row, CPU) if block.causal]
    assert sum(block.shape[0] * block.shape[1] for block in causal) < 4000


def test_a_group_of_equal_lengths_is_read_without_a_copy():
    blocks_of_it = make_blocks(*laid_out([300], [[100] * 4]), CPU)
    assert [block.shape for block in blocks_of_it] == [(1, 300, 300), (4, 100, 100), (1, 400, 300)]
    x = torch.randn(700, 2)
    for block in blocks_of_it:
        assert block.queries.slots is None
        assert take(x, block.queries.index).data_ptr() == x[block.queries.index].data_ptr()
