"""The metrics of a step: rewards, lengths, waste, memory and seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlft.environment.protocol import Cause
from rlft.system.memory import peak_resident_bytes
from rlft.types import Batch, Completion, FinishReason, Rollouts

BY_CAUSE = {
    Cause.malformed: "calls/malformed_fraction",
    Cause.raised: "calls/raised_fraction",
    Cause.time: "calls/time_fraction",
    Cause.died: "calls/died_fraction",
}
"""{why a call failed: its metric}; a call beyond the limit is not here, because it ends its conversation (BY_END)."""
BY_END = {
    FinishReason.stop: "finish/stop",
    FinishReason.length: "finish/length",
    FinishReason.turns: "finish/turns",
    FinishReason.calls: "finish/calls",
    FinishReason.time: "finish/time",
}
"""{why a completion ended: its metric}."""


class Clock:
    """Measures the seconds of each stage: `with clock("sample"): ..`. Calls `tell` with a stage's name at its start."""

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


def rollout_metrics(rollouts: Rollouts, batch: Batch, zero_gradient_B: Tensor) -> dict[str, float]:
    """The rewards, lengths and tokens of a step.

    policy/entropy is estimated from the sampled tokens' log-probs, at no cost, in nats per token; an algorithm that
    computes it exactly overwrites it.
    """
    groups, scores = rollouts.groups, rollouts.scores
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    lengths = [completion.num_sampled for completion in completions]
    metrics = {"reward/mean": scores.total.mean().item(), "reward/std": scores.total.std(correction=0).item()}
    metrics |= {f"reward/{name}": values.float().mean().item() for name, values in scores.by_reward.items()}
    metrics["length/mean"] = sum(lengths) / len(lengths)
    metrics["length/truncated_fraction"] = sum(c.finish_reason == "length" for c in completions) / len(completions)
    metrics["tokens/prompt"] = sum(len(group.prompt.token_ids) for group in groups)
    metrics["tokens/completion"] = sum(lengths)
    metrics |= turn_metrics(completions)
    metrics["sampled/completions"] = rollouts.num_sampled
    if rollouts.num_sampled:
        metrics["waste/resampled_fraction"] = 1 - len(completions) / rollouts.num_sampled
    metrics["waste/zero_advantage_fraction"] = zero_gradient_B.float().mean().item()
    if batch.returns is not None and batch.old_values is not None:
        metrics["value/explained_variance"] = explained_variance(batch.old_values, batch.returns, batch.loss_mask)
    metrics["policy/entropy"] = -(batch.sampled_logprobs.sum() / batch.loss_mask.sum()).item()
    return metrics


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Metrics of turns, tool calls, ends, and tokens that the policy only read; empty where no completion has turns."""
    turns = [turn for completion in completions for turn in completion.turns]
    if not turns and all(completion.mask is None for completion in completions):
        return {}
    calls = [call for turn in turns for call in turn.calls]
    ends = Counter(str(completion.finish_reason) for completion in completions)
    causes = Counter(call.cause for call in calls if call.cause)
    return {
        **{name: ends[reason] / len(completions) for reason, name in BY_END.items()},
        **{name: causes[cause] / max(1, len(calls)) for cause, name in BY_CAUSE.items()},
        "tokens/environment": sum(len(c.token_ids) - c.num_sampled for c in completions),
        "turns/branches": sum(len(c.branches) for c in completions) / len(completions),
        "turns/mean": sum(max(1, len(c.turns)) for c in completions) / len(completions),
        "turns/calls": len(calls) / len(completions),
        "turns/failed_calls_fraction": sum(call.failed for call in calls) / max(1, len(calls)),
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the masked tokens; 0 if the returns do not vary."""
    error, target = (returns - values)[mask].double(), returns[mask].double()
    variance = target.var(correction=0).item()
    return 1 - error.var(correction=0).item() / variance if variance > 0 else 0.0


def peak_memory_bytes() -> int:
    """The most bytes held so far: the CUDA allocator's peak if there is a GPU, else this process's resident set."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_resident_bytes()
