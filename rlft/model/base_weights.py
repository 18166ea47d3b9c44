"""A fingerprint of the base in memory, by which a load of an adapter that rewrites any of its weights is found."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

WORD = torch.int64.itemsize


class BaseWeights:
    """The base's parameters. PEFT wraps modules and replaces parameters, so they are found in the modules themselves.

    Args:
        model: the base, before any adapter is on it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module) for name, module in model.named_modules() if module._parameters]

    def fingerprint(self) -> dict[str, tuple[int, int]]:
        """{parameter: (its address, the sum of its bits)}, in one pass over the base at the speed of its memory."""
        return {
            f"{name}.{own}": (parameter.data_ptr(), bit_sum(parameter))
            for name, module in self._modules
            for own, parameter in module._parameters.items()
            if parameter is not None
        }


def bit_sum(tensor: Tensor) -> int:
    """The sum of the tensor's bits, read as 64-bit words, modulo 2^64: a change within one word always changes it."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD:
        data = data.clone()
    whole = len(data) // WORD * WORD
    words, rest = data[:whole].view(torch.int64), pad(data[whole:], (0, whole + WORD - len(data))).view(torch.int64)
    return int(words.sum() + rest.sum())
