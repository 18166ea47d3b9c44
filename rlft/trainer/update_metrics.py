"""The metrics of a step's updates, put together from those of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from rlft.algorithm.objective import WEIGHT, WEIGHT_SQUARED


class UpdateMetrics:
    """Adds up `Loss.metrics` over micro-batches and averages over updates; names ending in `_max` take the maximum.

    kl/old_last is the kl/old of the last update alone: how far the step has moved the policy.
    sampler/effective_sample_size is (sum w)^2 / (n sum w^2) over tokens, with the importance weights w before any cut.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {"loss/total": 0.0, "loss/policy": 0.0}
        self.num_updates = self.trained = self.network = 0
        self._old_before = 0.0
        self._old_last = 0.0

    def add(self, metrics: Mapping[str, Tensor] | Mapping[str, float], share: float) -> None:
        """Adds the metrics of a micro-batch.

        Args:
            metrics: metrics of its loss.
            share: share of the minibatch's completion tokens that are in rows which are forwarded at all. Metrics of
                tokens (entropy, KL, clip fractions) are means over these tokens; losses are those of the whole batch.
        """
        for name, value in metrics.items():
            so_far, number = self.sums.get(name, 0.0), float(value)
            if name.endswith("_max"):
                self.sums[name] = number if math.isnan(number) else max(so_far, number)
            else:
                self.sums[name] = so_far + (number if name.startswith("loss/") else number / share)

    def add_tokens(self, real: int, network: int) -> None:
        """Counts the tokens that the network had to see for a micro-batch, and those that entered it, with padding."""
        self.trained += real
        self.network += network

    def add_update(self, values: Mapping[str, float]) -> None:
        """Ends an update, and adds metrics that exist once for an update."""
        self.num_updates += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        total = self.sums.get("kl/old", 0.0)
        self._old_last, self._old_before = total - self._old_before, total

    def mean(self) -> dict[str, float]:
        means = {n: s if n.endswith("_max") else s / max(1, self.num_updates) for n, s in self.sums.items()}
        if WEIGHT in means:
            weight, squared = means.pop(WEIGHT), means.pop(WEIGHT_SQUARED)
            means["sampler/effective_sample_size"] = weight**2 / squared if squared > 0 else 0.0
        padding = (self.network - self.trained) / max(1, self.network)
        return means | {
            "kl/old_last": self._old_last,
            "tokens/trained": self.trained,
            "waste/padding_fraction": padding,
        }
