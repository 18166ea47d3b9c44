"""`rlft train`, `sft`, `rm` and `dpo`: what each command is, the page at the end of its runs, and what to do next."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.config import command as known_commands
from rlft.config.command import Command, Headline, Step, lazy
from rlft.config.model import EMBEDDED
from rlft.config.overrides import key_of
from rlft.config.schema import DpoConfig, RmConfig, RunConfig, SftConfig
from rlft.runs import checkpoint, run_folder, run_status
from rlft.runs.lines import EVALUATIONS, read_lines, silent
from rlft.runs.words import words_of
from rlft.system.terminal import Say, command_line, override, overrides, program, resuming

if TYPE_CHECKING:
    from rlft.algorithm.objective import Objective
    from rlft.logger.interface import Logger
    from rlft.loop.driver import Outcome
    from rlft.loop.parts import Engines
    from rlft.plan.run_plan import Plan
    from rlft.plan.supervised_plan import PreferencePlan
    from rlft.plan.train_plan import TrainPlan


# -- what a config makes (`Resolved.parts`), and what is wrong with it -------------------------------------------------
def check_train(config: RunConfig, *, trains: bool = True) -> tuple[Objective, tuple[Logger, ...]]:
    """The algorithm and the loggers of a run, which is only evaluated unless it `trains`."""
    from rlft.logger.loggers import loggers_of
    from rlft.plan.rules import check_components, check_contents

    components = check_components(config, trains=trains), loggers_of(config.logger)
    check_contents(config)
    return components


def with_loggers(check: Step) -> Step:
    """A check that makes the loggers of the config as well."""

    def check_both(config: Any) -> tuple[Any, tuple[Logger, ...]]:
        from rlft.logger.loggers import loggers_of

        return check(config), loggers_of(config.logger)

    return check_both


# -- runs and their pages ----------------------------------------------------------------------------------------------
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


def train(plan: TrainPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    from rlft import train as loop
    from rlft.loop.session import open_session

    with open_session(plan, folder, engines, say, resuming(folder)) as session:
        return session.outcome_of(lambda: loop.train(session).step)


def print_train_page(plan: TrainPlan, folder: Path) -> None:
    """Prints the run's curves, and commands that work as printed on this machine."""
    config, run = plan.config, f"run={folder}"
    lr = config.trainer.lr
    commands = [("evaluate with more samples", ["eval", run, "eval.num_samples=8"])]
    if not plan.train_prompts.prompts[0].images:  # a chat has none
        commands.append(("talk to it", ["chat", run]))
    if config.trainer.schedule == "constant":  # other schedules end with the last step
        commands.append(("train on", ["resume", str(folder), f"steps={2 * config.steps}"]))
    if (words := words_of(plan.plain, "train")) is not None:
        fixed = [word for word in words if key_of(word) not in ("trainer.lr", "seed")]
        swept = [*fixed, f"trainer.lr={lr:g},{lr / 3:.2g}", "seed=0,1"]
        commands.append(("sweep its learning rate", ["train", "-m", *swept]))
    if config.model.path.startswith(EMBEDDED) and "path" not in config.data:  # model and data are those of the demo
        words = ["plan", "+recipe=grpo_gsm8k", "model.device=cuda", "device_memory=24GiB"]
        commands.append(("plan GSM8K on a GPU", words))
    else:
        out = override("out", Path("exports") / config.name)
        commands.append(("export it for other programs", ["export", run, out]))
    print_page(folder, commands)


def print_reward_model_page(plan: PreferencePlan, folder: Path) -> None:
    words = ["train", "+recipe=ppo_arithmetic", override("model.path", plan.config.model.path)]
    words += [*overrides(plan.config.lora.keys_of_shape), "reward=[exact_match,learned]"]
    words += [override("reward.learned.path", folder), "critic.init=reward"]
    print_page(folder, [("train a policy with it, its critic begun from it", words)])


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


TRAIN = Command(
    name="train",
    usage="+recipe=<name> [<key>=<value>] ...",
    help="reinforcement learning; -m with several values sweeps",
    root=RunConfig,
    check=check_train,
    make_plan=lazy("rlft.plan.train_plan:make_plan"),
    run=train,
    print_summary=print_train_page,
    headline=Headline(label="reward", metric="reward/mean"),
    has_policy=True,
)
_of_data = partial(Command, usage="+recipe=<name> [...]")
_of_rankings = partial(
    _of_data,
    check=with_loggers(lazy("rlft.plan.rules:check_preferences")),
    make_plan=lazy("rlft.plan.supervised_plan:plan_rankings"),
    run=lazy("rlft.loop.supervised:run_preferences"),
)
SFT = _of_data(
    name="sft",
    help="supervised fine-tuning on demonstrations",
    root=SftConfig,
    check=with_loggers(lazy("rlft.plan.rules:check_sft")),
    make_plan=lazy("rlft.plan.supervised_plan:plan_demonstrations"),
    run=lazy("rlft.loop.supervised:run_demonstrations"),
    print_summary=print_policy_page,
    has_policy=True,
)
RM = _of_rankings(
    name="rm", help="train a reward model on preferences", root=RmConfig, print_summary=print_reward_model_page
)
DPO = _of_rankings(
    name="dpo",
    help="fine-tune on preferences without a reward model",
    root=DpoConfig,
    print_summary=print_policy_page,
    has_policy=True,
)
