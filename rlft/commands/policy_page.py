"""Prints the page at the end of a run that trained a policy without sampling: its curves, and next commands."""

from __future__ import annotations

from pathlib import Path

from rlft.config.schema import DpoConfig, SftConfig
from rlft.system.terminal import command_line, override, overrides, program


def print_policy_page(config: SftConfig | DpoConfig, folder: Path, *, has_task: bool) -> None:
    """Prints the page.

    Args:
        config: the run's config.
        folder: the run's folder.
        has_task: whether the run has held-out questions, on which `rlft eval` can evaluate it.
    """
    from rlft.logger.summary import print_summary

    command, lora, run = program(), config.lora, f"run={folder}"
    policy_overrides = [override("model.path", folder)]
    if lora is not None:
        policy_overrides = [override("model.path", config.model.path), override("lora.path", folder)]
        policy_overrides += overrides(lora.keys_of_shape)
    # A run without a task is evaluated on the embedded one.
    task = [] if has_task else ["data=arithmetic"]
    commands = [
        ("evaluate with more samples", [command, "eval", run, *task, "eval.num_samples=8"]),
        ("talk to it", [command, "chat", run]),
        ("go on with reinforcement learning", [command, "train", "+recipe=grpo_arithmetic", *policy_overrides]),
    ]
    print_summary(folder, [(purpose, command_line(*words)) for purpose, words in commands])
