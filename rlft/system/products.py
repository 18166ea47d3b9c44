"""Products of a few rows with weights that were rounded for them: to bfloat16, or to int8 with a scale for each output.

With int8 each row has a scale of its own, and is the sum of two rows of integers, the second 254 times as fine: one
alone moves log-probs of SmolLM2-135M by 0.2 nats in the mean, since a few of its numbers are large. Sums of integers
are exact, so that what a row becomes does not depend on the rows next to it. Where a processor cuts such sums off
(without its own instructions oneDNN adds two products in 16 bits), and on a GPU, they are multiplied in float32.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, NamedTuple

from rlft.system.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor, device as Device, dtype as DType

FINER = 254  # by which the second integers of a row are smaller than the first: from -127 to 127 they are half of one
GAIN = 0.8  # a less exact dtype is chosen if it takes at most this share of the time


class Weight(NamedTuple):
    """W' as products read it."""

    values: Tensor  # `[in, out]`; integers where there is a scale
    scale: Tensor | None = None  # of each output `[out]`

    @classmethod
    def of(cls, exact: Tensor, dtype: DType) -> Weight:
        """From W' `[in, out]`, rounded to this dtype."""
        if dtype != torch.int8:
            return cls(exact.to(dtype))
        scale = _scale(exact, 0)
        held = torch.int8 if adds_exactly(exact.device) else torch.float32
        return cls((exact / scale).round_().to(held), scale[0])

    @property
    def dtype(self) -> DType:
        """What it was rounded to."""
        return self.values.dtype if self.scale is None else torch.int8

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W' + b `[.., out]` from x `[.., in]`, in the dtype of x."""
        if self.scale is None:
            y = (x.to(self.values.dtype) @ self.values).to(x.dtype)
        else:
            flat = x.reshape(-1, x.shape[-1])
            scale = _scale(flat, 1)
            rest = flat / scale
            coarse = rest.round()
            rows = torch.cat([coarse, rest.sub_(coarse).mul_(FINER).round_()]).to(self.values.dtype)
            sums = integer_product(rows, self.values) if rows.dtype == torch.int8 else rows @ self.values
            y = sums[: len(flat)] * scale
            y = y.add_(sums[len(flat) :] * (scale / FINER)).mul_(self.scale).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    def differs(self, other: Weight) -> Tensor:
        """Bool `[]`; it is not waited for."""
        wrong = (self.values != other.values).any()
        return wrong if self.scale is None or other.scale is None else wrong | (self.scale != other.scale).any()


def integer_product(first: Tensor, second: Tensor) -> Tensor:
    """The product of two matrices of int8, in int32."""
    return torch._int_mm(first, second)  # pyright: ignore[reportPrivateImportUsage]


def _scale(exact: Tensor, dim: int) -> Tensor:
    """What the numbers along this axis are divided by so that they are at most 127."""
    return exact.abs().amax(dim, keepdim=True).div_(127).clamp_(min=torch.finfo(exact.dtype).tiny)


@functools.cache
def adds_exactly(device: Device) -> bool:
    """Whether sums of products of integers in 8 bits are exact on this device: it has to show it with the largest."""
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return device.type == "cpu" and bool((integer_product(largest, -largest) == -64 * 127**2).all())


@no_grad
def seconds(dtype: str) -> float:
    """Processor time of a product of 64 rows with 1024 x 1024 weights that are rounded to this dtype, in one thread."""
    from torch.utils.benchmark import Timer

    exact = torch.randn(1024, 1024, generator=torch.Generator())  # not of the numbers that a run draws
    names = {"weight": Weight.of(exact, getattr(torch, dtype)), "x": exact[:64]}
    return Timer("weight.times(x)", globals=names, timer=time.process_time).blocked_autorange(min_run_time=0.05).median


@functools.cache
def fastest_dtype() -> str:
    """The dtype of weights that this processor decodes fastest with; int8 has to be exact."""
    chosen = "float32"
    for dtype in ("bfloat16", "int8"):
        is_right = dtype != "int8" or adds_exactly(torch.device("cpu"))
        chosen = dtype if is_right and seconds(dtype) < GAIN * seconds(chosen) else chosen
    return chosen
