"""rlft's own verbs that make runs, one object each. Their functions are imported when they are called."""

from __future__ import annotations

from rlft.config.schema import DpoConfig, RmConfig, RunConfig, SampleConfig, SftConfig
from rlft.keys.verbs import Headline, Verb, late

USAGE = "+recipe=<name> [<key>=<value>] ..."

TRAIN = Verb(
    name="train",
    usage=USAGE,
    help="train; -m with several values sweeps; --help lists groups and recipes",
    root=RunConfig,
    check=late("rlft.checks.train:check_config"),
    make_plan=late("rlft.planning.train_plan:make_plan"),
    run=late("rlft.verbs.train:run"),
    closing=late("rlft.verbs.train:closing"),
    headline=Headline(label="reward", metric="reward/mean"),
    has_policy=True,
    free_keys=(
        "rollouts",
        "token_values",
        "pretrain.path",
        "environment.workers",
        "environment.port",
        "cluster.kind",
        "cluster.address",
        "cluster.engines",
        "cluster.gpus_per_engine",
        "cluster.ranks",
        "cluster.placement",
        "cluster.timeout",
        "cluster.max_engine_restarts",
        "cluster.scoring",
        "cluster.jobs",
        "cluster.shard_base",
        "snapshot.teacher_gpu_memory_utilization",
    ),
)

SFT = Verb(
    name="sft",
    usage="+recipe=<name> [...]",
    help="supervised fine-tuning on demonstrations",
    root=SftConfig,
    check=late("rlft.checks.sft:check_config"),
    make_plan=late("rlft.planning.sft_plan:make_plan"),
    run=late("rlft.verbs.sft:run"),
    closing=late("rlft.verbs.sft:closing"),
    has_policy=True,
    free_keys=("demonstrations.path",),
)

RM = Verb(
    name="rm",
    usage="+recipe=<name> [...]",
    help="a reward model from preferences",
    root=RmConfig,
    check=late("rlft.checks.rm:check_config"),
    make_plan=late("rlft.planning.rm_plan:make_plan"),
    run=late("rlft.verbs.rm:run"),
    closing=late("rlft.verbs.rm:closing"),
    lora_roles=("reward", "policy"),
    free_keys=("preferences.path", "replay.path"),
)

DPO = Verb(
    name="dpo",
    usage="+recipe=<name> [...]",
    help="a policy from preferences",
    root=DpoConfig,
    check=late("rlft.checks.dpo:check_config"),
    make_plan=late("rlft.planning.dpo_plan:make_plan"),
    run=late("rlft.verbs.dpo:run"),
    closing=late("rlft.verbs.dpo:closing"),
    has_policy=True,
    free_keys=("preferences.path",),
)

SAMPLE = Verb(
    name="sample",
    usage="[run=<run>] [...]",
    help="scored completions of a data set, to learn from or to look at",
    root=SampleConfig,
    check=late("rlft.checks.sample:check_config"),
    make_plan=late("rlft.planning.sample_plan:make_plan"),
    run=late("rlft.verbs.sample:run"),
    steps_done=late("rlft.verbs.sample:steps_done"),
    stopped=late("rlft.verbs.sample:stopped"),
    closing=late("rlft.verbs.sample:closing"),
    compose=late("rlft.run.like:composed_like_a_run"),
    headline=None,
    free_keys=("num_prompts", "environment.workers", "environment.port"),
)
