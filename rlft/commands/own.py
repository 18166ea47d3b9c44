"""rlft's own commands that make runs, one object each, and the pages that they print at the end of a run.

What needs torch is imported when it is called: `rlft --help` reads these objects.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlft.config import catalog
from rlft.config.command import Headline, Verb, late
from rlft.config.model import EMBEDDED
from rlft.config.schema import DpoConfig, RmConfig, RunConfig, SampleConfig, SftConfig
from rlft.system.terminal import Say, command_line, override, overrides, program, resuming

if TYPE_CHECKING:
    from rlft.loop.driver import Outcome
    from rlft.loop.engines import Engines
    from rlft.plan.preference_plan import PreferencePlan
    from rlft.plan.run_plan import Plan
    from rlft.plan.train_plan import TrainPlan

MAIN_JOB = "+recipe=grpo_gsm8k"


def train(plan: TrainPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    """Trains to the last step or an interruption."""
    from rlft.loop.session import open_session
    from rlft.train import train as loop

    with open_session(plan, folder, engines, say, resuming(folder)) as session:
        return session.outcome_of(lambda: loop(session).step)


def print_run_summary(plan: TrainPlan, folder: Path) -> None:
    """Prints the page of a run of `rlft train`: its curves, and commands that work as printed on this machine."""
    config, run = plan.config, f"run={folder}"
    lr = config.trainer.lr
    commands = [
        ("evaluate with more samples", ["eval", run, "eval.num_samples=8"]),
        ("talk to it", ["chat", run]),
    ]
    if config.trainer.schedule == "constant":  # other schedules end with the last step
        commands.append(("train on", ["resume", str(folder), f"steps={2 * config.steps}"]))
    if config.name in catalog.recipes("train"):
        words = [f"+recipe={config.name}", f"trainer.lr={lr:g},{lr / 3:.2g}", "seed=0,1"]
        commands.append(("sweep its recipe", ["train", "-m", *words]))
    words = ["plan", MAIN_JOB, "model.device=cuda", "device_memory=24GiB"]
    _print_summary(folder, [*commands, ("the main job: what it asks of a GPU", words)])


def print_policy_summary(plan: Plan, folder: Path) -> None:
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
    _print_summary(folder, commands)


def print_reward_summary(plan: PreferencePlan, folder: Path) -> None:
    """Prints the page of a run of `rlft rm`."""
    words = ["train", "+recipe=ppo_arithmetic", override("model.path", plan.config.model.path)]
    words += [*overrides(plan.config.lora.keys_of_shape), "reward=[exact_match,learned]"]
    words += [override("reward.learned.path", folder), "critic.init=reward"]
    _print_summary(folder, [("train a policy with it, its critic begun from it", words)])


def _print_summary(folder: Path, commands: list[tuple[str, list[str]]]) -> None:
    """Prints the page of this run, with (what it does, the words after `rlft`) of each command to suggest."""
    from rlft.logger.summary import print_summary

    print_summary(folder, [(purpose, command_line(program(), *words)) for purpose, words in commands])


TRAIN = Verb(
    name="train",
    usage="+recipe=<name> [<key>=<value>] ...",
    help="train; -m with several values sweeps; --help lists groups and recipes",
    root=RunConfig,
    check=late("rlft.plan.config_checks:check_train"),
    make_plan=late("rlft.plan.train_plan:make_plan"),
    run=train,
    print_summary=print_run_summary,
    headline=Headline(label="reward", metric="reward/mean"),
    has_policy=True,
)

SFT = Verb(
    name="sft",
    usage="+recipe=<name> [...]",
    help="supervised fine-tuning on demonstrations",
    root=SftConfig,
    check=late("rlft.plan.config_checks:check_sft"),
    make_plan=late("rlft.plan.sft_plan:make_plan"),
    run=late("rlft.commands.sft:run"),
    print_summary=print_policy_summary,
    has_policy=True,
)

RM = Verb(
    name="rm",
    usage="+recipe=<name> [...]",
    help="a reward model from preferences",
    root=RmConfig,
    check=late("rlft.plan.config_checks:check_preferences"),
    make_plan=late("rlft.plan.preference_plan:make_plan"),
    run=late("rlft.commands.preferences:run"),
    print_summary=print_reward_summary,
)

DPO = Verb(
    name="dpo",
    usage="+recipe=<name> [...]",
    help="a policy from preferences",
    root=DpoConfig,
    check=late("rlft.plan.config_checks:check_preferences"),
    make_plan=late("rlft.plan.preference_plan:make_plan"),
    run=late("rlft.commands.preferences:run"),
    print_summary=print_policy_summary,
    has_policy=True,
)

SAMPLE = Verb(
    name="sample",
    usage="[run=<run>] [...]",
    help="scored completions of a data set, to learn from or to look at",
    root=SampleConfig,
    check=late("rlft.plan.config_checks:check_sample"),
    make_plan=late("rlft.plan.sample_plan:make_plan"),
    run=late("rlft.commands.sample:run"),
    steps_done=late("rlft.commands.sample:steps_done"),
    stopped=late("rlft.commands.sample:stopped"),
    print_summary=late("rlft.commands.sample:print_run_summary"),
    compose=late("rlft.runs.find:composed_like_a_run"),
    headline=None,
)
