"""What a step did, as numbers: rewards, lengths, waste, memory and seconds, under the names of DESIGN section 9."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlft.memory import status_bytes
from rlft.types import Batch, Rollouts


class Clock:
    """Seconds by stage: `with clock("sample"): ..`. `tell` hears which stage begins."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.start = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.tell(stage)
        start = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{stage}": s for stage, s in self.seconds.items()} | {"time/step": time.monotonic() - self.start}


def rollout_metrics(rollouts: Rollouts, batch: Batch, inert_B: Tensor) -> dict[str, float]:
    """Rewards, lengths and tokens of a step.

    policy/entropy is estimated from the sampled tokens' log-probs (its expectation, at no cost), in nats a token; an
    algorithm that computes it exactly overwrites it.
    """
    groups, scores = rollouts.groups, rollouts.scores
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    lengths = [len(completion.token_ids) for completion in completions]
    metrics = {"reward/mean": scores.total.mean().item(), "reward/std": scores.total.std(correction=0).item()}
    metrics |= {f"reward/{name}": values.float().mean().item() for name, values in scores.by_reward.items()}
    metrics["length/mean"] = sum(lengths) / len(lengths)
    metrics["length/truncated_fraction"] = sum(c.finish_reason == "length" for c in completions) / len(completions)
    metrics["tokens/prompt"] = sum(len(group.prompt.token_ids) for group in groups)
    metrics["tokens/completion"] = sum(lengths)
    metrics["sampled/completions"] = rollouts.num_sampled
    if rollouts.num_sampled:
        metrics["waste/resampled_fraction"] = 1 - len(completions) / rollouts.num_sampled
    metrics["waste/zero_advantage_fraction"] = inert_B.float().mean().item()
    if batch.returns is not None and batch.old_values is not None:
        metrics["value/explained_variance"] = explained_variance(batch.old_values, batch.returns, batch.loss_mask)
    metrics["policy/entropy"] = -(batch.sampled_logprobs.sum() / batch.loss_mask.sum()).item()
    return metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the masked tokens; 0 where the returns do not vary."""
    error, target = (returns - values)[mask].double(), returns[mask].double()
    variance = target.var(correction=0).item()
    return 1 - error.var(correction=0).item() / variance if variance > 0 else 0.0


class UpdateMetrics:
    """Adds up `Loss.metrics` over micro-batches and averages over updates; names ending in `_max` take the maximum.

    kl/old_last is the kl/old of the last update alone: how far the step has moved the policy.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {"loss/total": 0.0, "loss/policy": 0.0}
        self.num_updates = self.trained = self.network = 0
        self._old_before = 0.0
        self._old_last = 0.0

    def add(self, metrics: Mapping[str, Tensor], share: float) -> None:
        """share: of the optimizer batch's completion tokens, those in rows that are forwarded at all.

        What a metric says of tokens (entropy, KL, clip fractions) is of those; losses are of the whole batch.
        """
        for name, value in metrics.items():
            before, number = self.sums.get(name, 0.0), value.item()
            if name.endswith("_max"):
                self.sums[name] = number if math.isnan(number) else max(before, number)
            else:
                self.sums[name] = before + (number if name.startswith("loss/") else number / share)

    def add_tokens(self, real: int, network: int) -> None:
        """Tokens that the network had to see for a micro-batch, and those that entered it, padding included."""
        self.trained += real
        self.network += network

    def add_update(self, values: Mapping[str, float]) -> None:
        """Ends an update with the numbers that exist once in it."""
        self.num_updates += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        total = self.sums.get("kl/old", 0.0)
        self._old_last, self._old_before = total - self._old_before, total

    def mean(self) -> dict[str, float]:
        means = {n: s if n.endswith("_max") else s / max(1, self.num_updates) for n, s in self.sums.items()}
        padding = (self.network - self.trained) / max(1, self.network)
        return means | {
            "kl/old_last": self._old_last,
            "tokens/trained": self.trained,
            "waste/padding_fraction": padding,
        }


def peak_memory_bytes() -> int:
    """The most memory held so far: the CUDA allocator's peak where there is one, else this process's resident set.

    From /proc where there is one: what getrusage says begins with the resident set of the process that started us.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if (told := status_bytes("VmHWM")) is not None:
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
