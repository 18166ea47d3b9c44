"""The pages that runs print at their end: the curves, and commands that go on from there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlft.config.model import EMBEDDED
from rlft.system.terminal import command_line, override, overrides, program

if TYPE_CHECKING:
    from rlft.plan.run_plan import Plan


def print_page(folder: Path, commands: list[tuple[str, list[str]]]) -> None:
    """Prints the page of this run, with (what it does, the words after `rlft`) of each command to suggest."""
    from rlft.logger.summary import print_summary

    print_summary(folder, [(purpose, command_line(program(), *words)) for purpose, words in commands])


def print_policy_page(plan: Plan, folder: Path) -> None:
    """Prints the page of a run of `rlft sft` or `dpo`, which train a policy without sampling."""
    config, lora, run = plan.config, plan.config.lora, f"run={folder}"
    policy_overrides = [override("model.path", folder)]
    if lora is not None:
        policy_overrides = [override("model.path", config.model.path), override("lora.path", folder)]
        policy_overrides += overrides(lora.keys_of_shape)
    learned = plan.plain.get("demonstrations") or plan.plain["preferences"]
    teaches_task = str(learned["path"]).startswith(EMBEDDED)  # and nothing else is known to have one
    task = ["data=arithmetic"] if plan.scored_prompts is None else []
    commands = [("talk to it", ["chat", run])]
    if teaches_task or not task:
        commands.insert(0, ("evaluate with more samples", ["eval", run, *task, "eval.num_samples=8"]))
    if teaches_task:
        words = ["train", "+recipe=grpo_arithmetic", *policy_overrides]
        commands.append(("go on with reinforcement learning", words))
    else:
        exported = Path("exports") / config.name
        commands.append(("export it for other programs", ["export", run, override("out", exported)]))
    print_page(folder, commands)
