"""pass@k: the probability that at least one of k samples is correct, estimated from at least k samples."""

from __future__ import annotations

import math


def pass_sizes(k: int) -> list[int]:
    """The powers of two below k, and k itself."""
    return sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k})


def pass_at(size: int, num_samples: int, num_right: int) -> float:
    """Unbiased estimate of pass@size, 1 - C(n - c, size) / C(n, size) for c of n samples correct (arXiv 2107.03374).

    >>> pass_at(1, 4, 1), pass_at(4, 4, 1), round(pass_at(2, 4, 1), 3)
    (0.25, 1.0, 0.5)
    """
    return 1 - math.comb(num_samples - num_right, size) / math.comb(num_samples, size)
