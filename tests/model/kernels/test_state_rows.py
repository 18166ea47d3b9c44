"""Runs of a packed row: each token goes through a recurrent layer once, after all that it continues."""

from __future__ import annotations

import random

import torch

from rlft.model.packing import Runs, state_rows


def test_each_token_is_computed_once_behind_the_tokens_that_it_continues() -> None:
    generator = random.Random(0)
    for _ in range(100):
        lengths = [generator.randrange(1, 9) for _ in range(generator.randrange(1, 5))]
        owner = [unit for unit in range(len(lengths)) for _ in range(generator.randrange(4))]
        sizes = [*lengths, *(generator.randrange(9) for _ in owner)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        spans = list(zip(starts, sizes, strict=True))
        prompts, completions = spans[: len(lengths)], spans[len(lengths) :]
        rows = state_rows(prompts, completions, owner, torch.device("cpu"))
        columns = torch.cat([runs.index.flatten() for runs in rows.runs])
        assert columns[rows.place].tolist() == list(range(sum(sizes)))
        first = [runs for runs in rows.runs if runs.after is None]
        begins = [row[mask].tolist() for runs in first for row, mask in zip(*masked(runs), strict=True)]
        owners = {start: unit for (start, size), unit in zip(completions, owner, strict=True) if size}
        for runs in rows.runs:
            for row, mask, after in zip(*masked(runs), () if runs.after is None else runs.after, strict=False):
                start, length = prompts[owners[int(row[mask][0])]]
                assert begins[int(after)] == list(range(start, start + length))


def masked(runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
    index, mask = runs.index, runs.mask
    return index, torch.ones_like(index, dtype=torch.bool) if mask is None else mask
