"""Tensors in buckets: which elements are in which."""

from __future__ import annotations

import torch

from rlft.system.device import buckets


def test_buckets_have_all_elements_in_their_order_one_dtype_and_a_limit() -> None:
    """20 bytes: five numbers in 32 bits, two in 64, ten in 16."""
    sizes = ((3, torch.float32), (9, torch.float32), (1, torch.float64), (0, torch.float64), (4, torch.float64),
             (6, torch.float16))  # fmt: skip
    assert buckets([torch.zeros(n, dtype=dtype) for n, dtype in sizes], 20) == [
        [(0, 0, 3), (1, 0, 2)], [(1, 2, 7)], [(1, 7, 9)],
        [(2, 0, 1), (4, 0, 1)], [(4, 1, 3)], [(4, 3, 4)],
        [(5, 0, 6)],
    ]  # fmt: skip
