"""What a step did, as numbers: rewards, lengths, waste, memory and seconds, under the names of DESIGN section 9."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlft.types import Batch, Group, Scores


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


def rollout_metrics(groups: Sequence[Group], scores: Scores, batch: Batch, inert_B: Tensor) -> dict[str, float]:
    """Rewards, lengths and tokens of a step.

    policy/entropy is estimated from the sampled tokens' log-probs (its expectation, at no cost), in nats a token; an
    algorithm that computes it exactly overwrites it.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    lengths = [len(completion.token_ids) for completion in completions]
    metrics = {"reward/mean": scores.total.mean().item(), "reward/std": scores.total.std(correction=0).item()}
    metrics |= {f"reward/{name}": values.float().mean().item() for name, values in scores.by_reward.items()}
    metrics["length/mean"] = sum(lengths) / len(lengths)
    metrics["length/truncated_fraction"] = sum(c.finish_reason == "length" for c in completions) / len(completions)
    metrics["tokens/prompt"] = sum(len(group.prompt.token_ids) for group in groups)
    metrics["tokens/completion"] = sum(lengths)
    metrics["waste/zero_advantage_fraction"] = inert_B.float().mean().item()
    metrics["policy/entropy"] = -(batch.sampled_logprobs.sum() / batch.loss_mask.sum()).item()
    return metrics


class UpdateMetrics:
    """Adds up `Loss.metrics` over micro-batches and averages over updates; names ending in `_max` take the maximum."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {"loss/total": 0.0, "loss/policy": 0.0}
        self.num_updates = 0

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

    def add_update(self, **values: float) -> None:
        """Numbers that exist once an update, keyed by metric name with `__` for `/`."""
        self.num_updates += 1
        for name, value in values.items():
            name = name.replace("__", "/")
            self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self) -> dict[str, float]:
        return {n: s if n.endswith("_max") else s / max(1, self.num_updates) for n, s in self.sums.items()}


def peak_memory_bytes() -> int:
    """The most memory held so far: the CUDA allocator's peak where there is one, else this process's resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
