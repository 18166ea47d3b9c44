"""The arithmetic that the training part of a step needs, and how fast this machine multiplies matrices."""

from __future__ import annotations

import statistics
import time

from bench_work import Size, Work, default_dtype


def step_flops(size: Size, work: Work) -> float:
    """Floating-point operations of credit and update: one forward and backward, each prompt once for its group.

    A token costs, in multiples of 2 x the parameters it meets: base 1 forward and 1 for the gradient of its input
    (weights are frozen), LoRA 1 forward and 2 backward, the head 1 and 1 for completion tokens only. Attention between
    a query and a key costs 4 x head size x heads forward and twice that backward; the kernel's recomputation of scores
    in backward is not counted.
    """
    head = size.hidden // size.heads
    wide, narrow = size.heads * head, size.key_heads * head
    base, low = 0, 0
    for inside, outside in (
        (size.hidden, wide), (size.hidden, narrow), (size.hidden, narrow), (wide, size.hidden),
        (size.hidden, size.intermediate), (size.hidden, size.intermediate), (size.intermediate, size.hidden),
    ):  # fmt: skip
        base += inside * outside
        low += work.rank * (inside + outside)
    p, c, g = work.prompt_tokens, work.completion_tokens, work.group
    tokens = work.prompts * (p + g * c)
    linear = tokens * size.layers * (4 * base + 6 * low)
    scores = work.prompts * (p * (p + 1) / 2 + g * (c * p + c * (c + 1) / 2))
    attention = scores * size.layers * 4 * wide * 3
    return linear + attention + work.prompts * g * c * 4 * size.hidden * size.vocabulary


def product_rate(size: Size, work: Work, tokens: int) -> float:
    """FLOP/s of the step's own products `[tokens, hidden] x [hidden, intermediate]` and back, the median of many."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, default_dtype())
    x = torch.randn(tokens, size.hidden, device=device, dtype=dtype)
    y = torch.randn(tokens, size.intermediate, device=device, dtype=dtype)
    w = torch.randn(size.intermediate, size.hidden, device=device, dtype=dtype)
    flops = 2 * 2 * tokens * size.hidden * size.intermediate
    return flops / _median_seconds(lambda: (x @ w.t(), y @ w))


def peak_rate(side: int = 4096) -> float:
    """FLOP/s of a large square product."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(side, side, device=device, dtype=getattr(torch, default_dtype()))
    return 2 * side**3 / _median_seconds(lambda: a @ a)


def _median_seconds(run: object) -> float:
    import torch

    seconds = []
    assert callable(run)
    begin = time.perf_counter()
    while time.perf_counter() - begin < 2.0 or len(seconds) < 3:
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
