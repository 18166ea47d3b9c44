"""The arithmetic that the training part of a step needs, and how fast this machine multiplies matrices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlft.commands.doctor.work import Size, Workload
from rlft.model.activations import layer_sizes

MIN_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that its arithmetic depends on.

    Attributes:
        base: number of weights in the matrices of all layers.
        low: number of weights in an adapter on them.
        head: number of weights in the LM head.
        width: heads x head size, summed over the layers.
    """

    base: int
    low: int
    head: int
    width: int

    @classmethod
    def of_size(cls, size: Size, rank: int) -> Shape:
        head_size = size.hidden // size.heads
        query_width, key_width = size.heads * head_size, size.key_heads * head_size
        matrices = (
            (size.hidden, query_width), (size.hidden, key_width), (size.hidden, key_width), (query_width, size.hidden),
            (size.hidden, size.intermediate), (size.hidden, size.intermediate), (size.intermediate, size.hidden),
        )  # fmt: skip
        return cls(
            base=size.layers * sum(num_inputs * num_outputs for num_inputs, num_outputs in matrices),
            low=size.layers * sum(rank * (num_inputs + num_outputs) for num_inputs, num_outputs in matrices),
            head=size.hidden * size.vocabulary,
            width=size.layers * query_width,
        )

    @classmethod
    def of_model(cls, model: Any, lora: int) -> Shape:
        """The shape of a loaded transformers model; `lora` is the number of parameters of its adapter."""
        text_config, head = model.config.get_text_config(), model.get_output_embeddings()
        layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        return cls(
            base=sum(layer.in_features * layer.out_features for layer in layers),
            low=lora,
            head=text_config.hidden_size * text_config.vocab_size,
            width=sum(layer.queries for layer in layer_sizes(text_config)),
        )


def step_flops(shape: Shape, work: Workload) -> float:
    """Floating-point operations of credit and update: one forward and backward, with each prompt once per group.

    The cost of a token is a multiple of 2 x the number of parameters involved: for the base 1 forward and 1 for the
    gradient of its input (its weights are frozen), for LoRA 1 forward and 2 backward, for the head 1 forward and 1
    backward, for completion tokens only. Attention between a query and a key costs 4 x head size x heads forward and
    twice that backward; the kernel's recomputation of scores in backward is not counted.
    """
    p, c, g = work.prompt_tokens, work.completion_tokens, work.group
    tokens = work.prompts * (p + g * c)
    linear = tokens * (4 * shape.base + 6 * shape.low)
    scores = work.prompts * (p * (p + 1) / 2 + g * (c * p + c * (c + 1) / 2))
    return linear + scores * 4 * shape.width * 3 + work.prompts * g * c * 4 * shape.head


def product_rate(size: Size, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the products in a step, `[tokens, hidden] x [hidden, intermediate]` and back: the median of many."""
    x = torch.randn(tokens, size.hidden, device=device, dtype=dtype)
    y = torch.randn(tokens, size.intermediate, device=device, dtype=dtype)
    w = torch.randn(size.intermediate, size.hidden, device=device, dtype=dtype)
    flops = 2 * 2 * tokens * size.hidden * size.intermediate
    return flops / statistics.median(_seconds(lambda: (x @ w.t(), y @ w), device, 2.0))


def peak_rate(device: torch.device, dtype: torch.dtype, *, side: int = 4096, seconds: float = 2.0) -> float:
    """FLOP/s of a large square product: the fastest of those made within `seconds` seconds."""
    a = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / min(_seconds(lambda: a @ a, device, seconds))


def _seconds(run: Callable[[], object], device: torch.device, total_s: float) -> list[float]:
    """The seconds that each call of `run` takes, repeated for `total_s` seconds; the first call is not counted."""
    seconds: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < total_s or len(seconds) < MIN_REPEATS:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
