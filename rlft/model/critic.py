"""The critic: a value head, on an adapter of its own or on the policy's features, and the unit of its values.

Its head, one number from a hidden state, is also that of a reward model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlft.system.device import copied


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
        return copied(dict(self.named_parameters()))


CRITIC = "critic"
MEMORY = 0.99  # weight of the earlier returns in the running statistics, after the first 1 / (1 - MEMORY) steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnStatistics:
    """Running mean and variance of the returns, in units of reward: (x - mean) / std is what the head learns."""

    mean: float = 0.0
    variance: float = 1.0
    num_steps: int = 0

    @property
    def std(self) -> float:
        return max(self.variance, 1e-8) ** 0.5

    def seen(self, returns: Tensor, mask: Tensor) -> ReturnStatistics:
        """The statistics with the masked returns `[B, T]` of another step: a plain average at first, later moving."""
        values = returns[mask].cpu().double()
        if not len(values):
            return self
        share = max(1 / (self.num_steps + 1), 1 - MEMORY)
        mean, square = values.mean().item(), values.square().mean().item()
        old_square = self.variance + self.mean**2 if self.num_steps else 0.0
        new_mean = (1 - share) * self.mean + share * mean
        new_square = (1 - share) * old_square + share * square
        return replace(self, mean=new_mean, variance=max(new_square - new_mean**2, 0.0), num_steps=self.num_steps + 1)


class Critic:
    """A head with the statistics that normalise it. `role` is the adapter whose features it reads.

    Outside this class values are in units of reward: value = mean + std x head(features). When the statistics move, the
    head is rescaled so that no value changes (PopArt, arXiv 1602.07714); without normalisation mean = 0 and std = 1.
    """

    def __init__(self, role: str, head: ScalarHead, normalize: bool) -> None:
        self.role, self.head, self.normalize = role, head, normalize
        self.statistics = ReturnStatistics()

    def values(self, normalised: Tensor, mask: Tensor) -> Tensor:
        """The head's outputs `[B, T]` in units of reward, 0 outside the mask."""
        return (self.statistics.mean + self.statistics.std * normalised).where(mask, 0.0)

    @property
    def value_scale(self) -> float:
        """The number by which errors of values are divided in the loss."""
        return self.statistics.std if self.normalize else 1.0

    def observe(self, returns: Tensor, mask: Tensor) -> None:
        """Updates the statistics with a step's returns; no value changes."""
        if self.normalize:
            self._rescale(self.statistics.seen(returns, mask))

    def forget_statistics(self) -> None:
        """Resets the statistics, for a run that starts with this head; no value changes."""
        self._rescale(ReturnStatistics())

    @torch.no_grad()
    def _rescale(self, new: ReturnStatistics) -> None:
        old, self.statistics = self.statistics, new
        self.head.weight.mul_(old.std / new.std)
        self.head.bias.mul_(old.std).add_(old.mean - new.mean).div_(new.std)

    def state(self) -> dict[str, float]:
        return asdict(self.statistics)

    def restore_statistics(self, state: Mapping[str, Any]) -> None:
        self.statistics = ReturnStatistics(**state)
