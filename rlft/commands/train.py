"""`rlft train`: reinforcement learning of a policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlft.commands.next_steps import print_page
from rlft.config.command import Command, Headline, lazy
from rlft.config.model import EMBEDDED
from rlft.config.overrides import key_of
from rlft.config.schema import RunConfig
from rlft.runs.words import words_of
from rlft.system.terminal import Say, override, resuming

if TYPE_CHECKING:
    from rlft.loop.driver import Outcome
    from rlft.loop.engines import Engines
    from rlft.plan.train_plan import TrainPlan


def run(plan: TrainPlan, folder: Path, engines: Engines, say: Say) -> Outcome:
    from rlft.loop.session import open_session
    from rlft.train import train

    with open_session(plan, folder, engines, say, resuming(folder)) as session:
        return session.outcome_of(lambda: train(session).step)


def print_summary(plan: TrainPlan, folder: Path) -> None:
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


COMMAND = Command(
    name="train",
    usage="+recipe=<name> [<key>=<value>] ...",
    help="reinforcement learning; -m with several values sweeps",
    root=RunConfig,
    check=lazy("rlft.plan.rules:check_train"),
    make_plan=lazy("rlft.plan.train_plan:make_plan"),
    run=run,
    print_summary=print_summary,
    headline=Headline(label="reward", metric="reward/mean"),
    has_policy=True,
)
