"""The page at the end of a run that has made a policy without sampling: its curves, and what can be done with it."""

from __future__ import annotations

from pathlib import Path

from rlft.config.schema import DpoConfig, SftConfig
from rlft.system.terminal import command_line, override, overrides, program


def print_policy_page(config: SftConfig | DpoConfig, folder: Path, *, has_task: bool) -> None:
    """Prints the page. has_task: whether the run has held-out questions, which `rlft eval` then asks."""
    from rlft.logger.summary import print_summary

    command, lora, run = program(), config.lora, f"run={folder}"
    go_on = [override("model.path", folder)]
    if lora is not None:
        go_on = [override("model.path", config.model.path), override("lora.path", folder)]
        go_on += overrides(lora.keys_of_shape)
    # A run without a task is evaluated on the embedded one.
    task = [] if has_task else ["data=arithmetic"]
    commands = [
        ("evaluate with more samples", [command, "eval", run, *task, "eval.num_samples=8"]),
        ("talk to it", [command, "chat", run]),
        ("go on with reinforcement learning", [command, "train", "+recipe=grpo_arithmetic", *go_on]),
    ]
    print_summary(folder, [(what, command_line(*words)) for what, words in commands])
