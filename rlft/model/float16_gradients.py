"""Gradients inside a float16 network, which are SCALE times as large there as outside of it.

A loss is a mean over tens of thousands of tokens, so a token's gradient is about 1e-5, and those of hidden states are
smaller by another factor of 100: below 6e-5 float16 has fewer digits, and below 6e-8 none. Where gradients enter the
network, at its float32 outputs, they are therefore multiplied by a power of two, and where they reach an adapter's
float32 weights they are divided by it, which rounds nothing. bfloat16 has the range of float32 and needs no scale. With
this scale neither end is near: a token of 100,000 has a gradient of 0.01, and a weight's overflows at 64, which the
optimizer refuses (`trainer.update.NonFiniteGradientError`).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

SCALE = 2.0**10


def scale_up(*outputs: Tensor | None) -> None:
    """Multiplies the gradients with which a backward enters the network at these outputs."""
    for output in outputs:
        if output is not None and output.requires_grad:
            output.register_hook(lambda gradient: gradient * SCALE)


def scale_down(parameter: Parameter) -> None:
    """Divides the gradients that reach this parameter from now on."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook without it
    parameter.register_hook(lambda gradient: gradient / SCALE)
    parameter.requires_grad_(requires_grad)
