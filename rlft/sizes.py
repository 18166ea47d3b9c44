"""The start-up table: every size of a run and what it multiplies to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import Parameter

from rlft.plan import Plan
from rlft.reward.spec import specs

Row = tuple[str, str, str]
"""(what, value, explanation)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the tables say of a model, loaded or planned. forward: packed or padded, and why it is."""

    base: int
    trainable: int
    dtype: str
    device: str
    forward: str
    reason: str

    def model_row(self, path: str, what: str = "frozen parameters") -> Row:
        return "model", path, f"{self.base:,} {what}, {self.dtype} on {self.device}"

    def forward_row(self) -> Row:
        return "forward", self.forward, self.reason.removeprefix("padded rows: ")


def facts_of(model: nn.Module, learning: Iterable[tuple[str, Parameter]], backbone: Any, forward: Any) -> Facts:
    """Of a model that is loaded, with what learns in it."""
    return Facts(
        base=sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name),
        trainable=sum(p.numel() for _, p in learning),
        dtype=str(backbone.model.dtype).removeprefix("torch."),
        device=str(backbone.device),
        forward="packed" if forward.packed else "padded",
        reason=forward.reason,
    )


def size_rows(plan: Plan, facts: Facts) -> list[Row]:
    """Every size of `rlft train` that people ask about."""
    run = plan.config
    completions = run.completions_per_step
    held_out = 0 if plan.held_out is None else min(run.eval.num_prompts, len(plan.held_out.prompts))
    epochs = run.steps * run.prompts_per_step / len(plan.train_prompts.prompts)
    rewards = ", ".join(f"{name} x {reward['weight']:g}" for name, reward in run.reward.items())
    return [
        facts.model_row(run.model.path),
        ("algorithm", run.algorithm["_target_"].rpartition(".")[2], f"rewards: {rewards}"),
        (
            "trainable",
            f"{facts.trainable:,}",
            f"{run.lora.kind} rank {run.lora.rank}, {facts.trainable / facts.base:.2%} of the base",
        ),
        ("roles", ", ".join(role_names(plan)), roles_text(plan)),
        ("engine", plan.engine, plan.engine_reason),
        facts.forward_row(),
        (
            "prompts",
            f"{len(plan.train_prompts.prompts):,}",
            f"train; {held_out:,} held out for evaluation x {run.eval.num_samples} samples",
        ),
        (
            "completions a step",
            f"{completions:,}",
            f"{run.prompts_per_step} prompts x group of {run.group_size}, up to {run.generation.max_tokens} tokens",
        ),
        (
            "updates a step",
            str(run.updates_per_step),
            f"{run.epochs} epoch(s) x {run.minibatches} minibatch(es) of {completions // run.minibatches} completions",
        ),
        ("token budget", f"{run.token_budget:,}", "tokens in one forward-backward; changes memory, not the gradient"),
        (
            "total",
            f"{run.steps * completions:,} completions",
            f"{run.steps} steps, {run.steps * run.updates_per_step} updates, {epochs:.1f} epochs of the data",
        ),
    ]


def role_names(plan: Plan) -> list[str]:
    """What is on the base, or beside it, in this run."""
    snapshot, critic = plan.config.snapshot, plan.config.critic
    there = {"policy": True, "old": snapshot.old == "copy", "reference": snapshot.reference != "none"}
    there |= {
        "critic": critic.kind != "none",
        "reward": any(s.runs_in_trainer for s in specs(plan.config.reward).values()),
    }
    return [role for role, is_there in there.items() if is_there]


def roles_text(plan: Plan) -> str:
    """Which policy is old, what is the reference, what gives values."""
    snapshot, critic = plan.config.snapshot, plan.config.critic
    old = "old = current (one update a step, no extra pass)"
    if snapshot.old == "sampled":
        old = "old = the engine's log-probs"
    elif snapshot.old == "copy":
        old = "old = an adapter of its own, copied at each publish"
    elif snapshot.old == "recompute" or plan.needs_old:
        old = "old = recomputed before the updates"
    text = old
    if snapshot.reference != "none":
        text += f"; reference = {snapshot.reference}"
        text += f", refreshed every {snapshot.refresh_every} steps" if snapshot.refresh_every else ""
        text += f", decay {snapshot.ema_decay:g} a step" if snapshot.ema_decay is not None else ""
    if critic.kind != "none":
        text += f"; critic = {'adapter' if critic.kind == 'adapter' else 'head on the policy'} from {critic.init}"
    return text
