"""rlft's own verbs that make runs, one object each. Their functions are imported when they are called."""

from __future__ import annotations

from rlft.config.command import Headline, Verb, late
from rlft.config.schema import DpoConfig, RmConfig, RunConfig, SampleConfig, SftConfig

USAGE = "+recipe=<name> [<key>=<value>] ..."

TRAIN = Verb(
    name="train",
    usage=USAGE,
    help="train; -m with several values sweeps; --help lists groups and recipes",
    root=RunConfig,
    check=late("rlft.plan.config_checks:check_train"),
    make_plan=late("rlft.plan.train_plan:make_plan"),
    run=late("rlft.commands.train:run"),
    print_summary=late("rlft.commands.train:print_run_summary"),
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
    print_summary=late("rlft.commands.policy_page:print_policy_summary"),
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
    print_summary=late("rlft.commands.preferences:print_reward_summary"),
)

DPO = Verb(
    name="dpo",
    usage="+recipe=<name> [...]",
    help="a policy from preferences",
    root=DpoConfig,
    check=late("rlft.plan.config_checks:check_preferences"),
    make_plan=late("rlft.plan.preference_plan:make_plan"),
    run=late("rlft.commands.preferences:run"),
    print_summary=late("rlft.commands.policy_page:print_policy_summary"),
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
