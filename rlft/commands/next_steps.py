"""The commands that are suggested at the end of a run or of a sweep, and the pages that runs print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlft.config import command as known_commands
from rlft.config.model import EMBEDDED
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.lines import EVALUATIONS, read_lines, silent
from rlft.system.terminal import command_line, override, overrides, program

if TYPE_CHECKING:
    from rlft.plan.run_plan import Plan


Suggested = list[tuple[str, list[str]]]  # (what it does, the words after `rlft`) of each command


def more_steps(folder: Path, schedule: str | None, num_steps: int) -> Suggested:
    """How to train the finished run in this folder further. schedule: of its learning rate, if it has one."""
    if schedule == "constant":
        return [("raise steps", ["resume", str(folder), f"steps={2 * num_steps}"])]
    saved = checkpoint.finished(run_folder.checkpoints(folder)) if schedule is not None else []
    fork = [["resume", str(newest), f"steps={2 * num_steps}"] for newest in saved[-1:]]
    return [("start a new run from its newest checkpoint", words) for words in fork]


def after_a_sweep(folder: Path) -> Suggested:
    """What to do with the best run of a sweep, in this folder."""
    plain, steps = run_folder.read(folder), run_status.num_steps(folder)
    found = more_steps(folder, (plain.get("trainer") or {}).get("schedule"), steps or int(plain.get("steps") or 0))
    evaluated = read_lines(folder / EVALUATIONS, silent)[-1:]
    has_images = any(example.get("images") for line in evaluated for example in line.get("examples", ()))
    if known_commands.named(plain["command"]).has_policy and not has_images:  # a chat has none
        found.append(("talk to it", ["chat", f"run={folder}"]))
    return found


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
        commands.append(("train it further by reinforcement learning", words))
    else:
        exported = Path("exports") / config.name
        commands.append(("export it for other programs", ["export", run, override("out", exported)]))
    print_page(folder, commands)
