"""Prints the page at the end of a run that trained a policy without sampling: its curves, and next commands."""

from __future__ import annotations

from pathlib import Path

from rlft.plan.run_plan import Plan
from rlft.system.terminal import command_line, override, overrides, program


def print_policy_summary(plan: Plan, folder: Path) -> None:
    """Prints the page of this run, whose plan is that of `rlft sft` or `dpo`."""
    from rlft.logger.summary import print_summary

    command, config, lora, run = program(), plan.config, plan.config.lora, f"run={folder}"
    policy_overrides = [override("model.path", folder)]
    if lora is not None:
        policy_overrides = [override("model.path", config.model.path), override("lora.path", folder)]
        policy_overrides += overrides(lora.keys_of_shape)
    # A run without a task is evaluated on the embedded one.
    task = ["data=arithmetic"] if plan.scored_prompts is None else []
    commands = [
        ("evaluate with more samples", [command, "eval", run, *task, "eval.num_samples=8"]),
        ("talk to it", [command, "chat", run]),
        ("go on with reinforcement learning", [command, "train", "+recipe=grpo_arithmetic", *policy_overrides]),
    ]
    print_summary(folder, [(purpose, command_line(*words)) for purpose, words in commands])
