"""The arithmetic that the training part of a step needs, and how fast this machine multiplies matrices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlft.doctor.work import Size, Work

MIN_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that its arithmetic depends on, numbers of weights over all layers.

    Args:
        base: of the layers' matrices.
        low: of an adapter on them.
        head: of the LM head.
        width: heads x head size, summed over the layers.
    """

    base: int
    low: int
    head: int
    width: int

    @classmethod
    def of_size(cls, size: Size, rank: int) -> Shape:
        head = size.hidden // size.heads
        wide, narrow = size.heads * head, size.key_heads * head
        matrices = (
            (size.hidden, wide), (size.hidden, narrow), (size.hidden, narrow), (wide, size.hidden),
            (size.hidden, size.intermediate), (size.hidden, size.intermediate), (size.intermediate, size.hidden),
        )  # fmt: skip
        return cls(
            base=size.layers * sum(inside * outside for inside, outside in matrices),
            low=size.layers * sum(rank * (inside + outside) for inside, outside in matrices),
            head=size.hidden * size.vocabulary,
            width=size.layers * wide,
        )

    @classmethod
    def of_model(cls, model: Any, lora: int) -> Shape:
        """Of a loaded model of transformers; `lora` is the adapter's number of parameters."""
        text, head = model.config.get_text_config(), model.get_output_embeddings()
        inside = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            base=sum(layer.in_features * layer.out_features for layer in inside),
            low=lora,
            head=text.hidden_size * text.vocab_size,
            width=text.num_hidden_layers * text.num_attention_heads * head_size,
        )


def step_flops(shape: Shape, work: Work) -> float:
    """Floating-point operations of credit and update: one forward and backward, each prompt once for its group.

    A token costs, in multiples of 2 x the parameters it meets: base 1 forward and 1 for the gradient of its input
    (weights are frozen), LoRA 1 forward and 2 backward, the head 1 and 1 for completion tokens only. Attention between
    a query and a key costs 4 x head size x heads forward and twice that backward; the kernel's recomputation of scores
    in backward is not counted.
    """
    p, c, g = work.prompt_tokens, work.completion_tokens, work.group
    tokens = work.prompts * (p + g * c)
    linear = tokens * (4 * shape.base + 6 * shape.low)
    scores = work.prompts * (p * (p + 1) / 2 + g * (c * p + c * (c + 1) / 2))
    return linear + scores * 4 * shape.width * 3 + work.prompts * g * c * 4 * shape.head


def product_rate(size: Size, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a step's own products `[tokens, hidden] x [hidden, intermediate]` and back, the median of many."""
    x = torch.randn(tokens, size.hidden, device=device, dtype=dtype)
    y = torch.randn(tokens, size.intermediate, device=device, dtype=dtype)
    w = torch.randn(size.intermediate, size.hidden, device=device, dtype=dtype)
    flops = 2 * 2 * tokens * size.hidden * size.intermediate
    return flops / statistics.median(_seconds(lambda: (x @ w.t(), y @ w), device, 2.0))


def peak_rate(device: torch.device, dtype: torch.dtype, *, side: int = 4096, seconds: float = 2.0) -> float:
    """FLOP/s of a large square product, the fastest within so many seconds."""
    a = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / min(_seconds(lambda: a @ a, device, seconds))


def _seconds(run: Callable[[], object], device: torch.device, enough: float) -> list[float]:
    """The seconds of each of its repetitions but the first, for as long as `enough` seconds."""
    seconds: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < enough or len(seconds) < MIN_REPEATS:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
