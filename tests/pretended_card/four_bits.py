"""A base of 4-bit weights without bitsandbytes, whose bytes and dequantised copies are those of NF4 with double
quantisation: Dettmers et al. 2023 (QLoRA), sections 3 and 4. Its numbers are zeros.

Blocks of 64 weights share an absolute maximum in 8 bits, and 256 of these a float32. A product dequantises the whole
weight, forward and backward, and keeps nothing (`MatMul4Bit` of bitsandbytes/autograd/_functions.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from peft.tuners.lora import model as peft_model
from torch import Tensor, nn

from rlft.model import backbone
from rlft.plan import model_rules

BLOCK, BLOCKS = 64, 256


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear4Bit) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.dequantised(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.layer.dequantised(grads[0].dtype), None


class Linear4Bit(nn.Linear):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        number, device = layer.weight.numel(), layer.weight.device
        self.bias = layer.bias
        self.weight = nn.Parameter(torch.zeros(number // 2, 1, dtype=torch.uint8, device=device), requires_grad=False)
        self.compute_dtype = layer.weight.dtype
        self.weight.quant_state = SimpleNamespace(
            absmax=torch.zeros(number // BLOCK, dtype=torch.uint8, device=device),
            nested=torch.zeros(-(-number // (BLOCK * BLOCKS)), device=device),
            shape=layer.weight.shape,
            dtype=layer.weight.dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return dequantize_4bit(self.weight, self.weight.quant_state).to(dtype)


def dequantize_4bit(numbers: Tensor, state: Any) -> Tensor:
    return torch.zeros(state.shape, dtype=state.dtype, device=numbers.device).add_(state.absmax[0]).add_(numbers[0, 0])


@contextmanager
def stand_in() -> Iterator[None]:
    """Inside, `model.quantization=4bit` loads such a base, whose layers are those of bitsandbytes to rlft."""
    of_rlft = backbone.load_model
    bitsandbytes: Any = ModuleType("bitsandbytes")
    bitsandbytes.nn = SimpleNamespace(Linear4bit=Linear4Bit)
    bitsandbytes.functional = SimpleNamespace(dequantize_4bit=dequantize_4bit)

    def load(
        config: Any, source: Any, *, quantization_config: Any = None, device_map: Any = None, **options: Any
    ) -> Any:
        model = of_rlft(config, source, **options)
        if quantization_config is None:
            return model
        model.to(device_map[""])
        head = model.get_output_embeddings()
        for module in list(model.modules()):
            for name, layer in module.named_children():
                if type(layer) is nn.Linear and layer is not head:
                    setattr(module, name, Linear4Bit(layer))
        return model

    with (
        mock.patch.dict(sys.modules, bitsandbytes=bitsandbytes),
        mock.patch.object(peft_model, "is_bnb_available", return_value=False),
        mock.patch.object(peft_model, "is_bnb_4bit_available", return_value=False),
        mock.patch.object(backbone, "load_model", load),
        mock.patch.object(model_rules, "has_bitsandbytes", return_value=True),
        mock.patch.object(transformers, "BitsAndBytesConfig", dict, create=True),
    ):
        yield
