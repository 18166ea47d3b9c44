"""One number from a hidden state: the value head of a critic, the score head of a reward model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """`weight [1, H]` x hidden + `bias [1]`, both 0 at first, so that a new critic predicts 0 everywhere.

    It is at least float32 whatever the base's dtype is, because it is small and learns by small steps.
    """

    def __init__(self, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Numbers `[...]` from hidden states `[..., H]`."""
        return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)[..., 0]

    def weights(self) -> dict[str, Tensor]:
        """{name: detached copy}."""
        return {name: tensor.detach().clone() for name, tensor in self.named_parameters()}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(weights[name])
