"""A key that rlft doesn't have leads to the one that was meant, also from the names of other libraries."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from in_one_test import each
from slow_cases import slow

from rlft import cli
from rlft.commands.serve import ServeConfig
from rlft.config import command as commands
from rlft.config.recipe_file import DATA_SUFFIXES
from rlft.config.suggest import (
    OWN_KEYS,
    SECTIONS,
    known_keys,
    peer_names,
    refused_setting,
    refused_settings,
    suggestions,
)


def targets(name):
    """(command or None for all, target as it is written) of a name of another library."""
    written = peer_names()[name]
    by_command = written.items() if isinstance(written, dict) else [(None, written)]
    for command, of_command in by_command:
        for target in [of_command] if isinstance(of_command, str) else of_command:
            yield command, target


def key_of(target):
    return re.split("; | ! |=", target)[0]


def test_the_table_is_large():
    assert len(peer_names()) > 250


@each("name", peer_names())
def test_every_target_is_a_key_of_a_command_and_is_suggested_to_those_alone_that_have_it(name):
    for command, target in targets(name):
        assert any(key_of(target) in known_keys(v) for v in ([command] if command else commands.OWN)), target
    if all(name in known_keys(command) for command in commands.OWN):
        return
    for command in commands.OWN:
        meant = suggestions(name, command)
        assert all(one.key in known_keys(command) or "<name>" in one.key for one in meant)
        allowed = {key_of(target) for v, target in targets(name) if v in (None, command)}
        assert {one.key for one in meant} <= allowed


@each("name", [name for name in peer_names() if name not in known_keys("train")])
def test_the_command_line_names_the_key_that_a_peers_name_means(name, capsys):
    meant = suggestions(name, "train")
    code = cli.run(["train", f"--{name}", "1"])
    told = capsys.readouterr().err
    assert code == 2
    if meant:
        assert f"did you mean {meant[0].key}=" in told
    else:
        assert not any(key_of(target) in known_keys("train") for v, target in targets(name) if v in (None, "train"))


# What is not in the table of refusals (tests/test_refusals.py), and not the first suggestion of a peer's name alone.
SAID = [
    ("train lr=1e-5", "lr", "did you mean trainer.lr?"),
    ("reward try lr=1", "lr", "did you mean trainer.lr?"),
    ("serve model.path=m prot=1", "prot", "did you mean serve.port?"),
    ("train --lr 1e-5", "command line", "got --lr; keys have no dashes; did you mean trainer.lr=1e-5?"),
    ("train temperature=0.7", "temperature", "did you mean generation.temperature?"),
    ("train num_generations=8", "num_generations", "did you mean group_size?"),
    ("train rollout.n=8", "rollout.n", "did you mean group_size?"),
    ("train data.train_batch_size=8", "data.train_batch_size", "did you mean prompts_per_step (a step has"),
    ("train trainer.foo=1", "trainer.foo", "there is no such key, got 1; `rlft train --cfg job` shows every key"),
    ("dpo rpo_alpha=1", "rpo_alpha", "did you mean loss.sft_coef?"),
    ("train gae_lambda=0.9", "gae_lambda", "did you mean algorithm.lam?"),
    ("train n_grpo_steps=3", "n_grpo_steps", "did you mean steps?"),
    ("train n_train_steps_per_rollout_batch=2", "n_train_steps_per_rollout_batch", "did you mean epochs (minibatches"),
    ("rm temperature=0.1", "temperature", "there is no such key, got 0.1; `rlft rm --cfg job` shows every key"),
    ("plan device_mem=1GiB", "device_mem", "did you mean device_memory?"),
    ("chat model.path=m rwa=true", "rwa", "did you mean raw?"),
    ("chat model.path=m temperature=0", "temperature", "did you mean generation.temperature?"),
    ("eval rnu=x", "rnu", "did you mean run?"),
    ("eval chekpoint=x", "chekpoint", "did you mean checkpoint?"),
    ("train +lr=1e-5", "lr", "got 1e-05; did you mean trainer.lr?"),
    ("train --learning_rate=1e-5", "command line", "did you mean trainer.lr=1e-5?"),
    ("train --learning-rate 1e-5", "command line", "did you mean trainer.lr=1e-5?"),
    ("train lr 1e-5", "command line", "got lr; did you mean trainer.lr=1e-5?"),
    ("train learning_rat=1", "learning_rat", "did you mean trainer.lr?"),
    ("train trainer.learning_rate=1", "trainer.learning_rate", "did you mean trainer.lr?"),
    ("sample num_generations=8", "num_generations", "did you mean n?"),
    ("sft max_tokens=8", "max_tokens", "did you mean max_completion_tokens?"),
    ("train num_train_epochs=3", "num_train_epochs", "did you mean steps (a run is counted in steps of"),
    ("sft num_train_epochs=3", "num_train_epochs", "did you mean epochs?"),
    ("train --per_device_train_batch_size 8", "command line", "prompts_per_step=<value> (a step has"),
    ("rm batch_size=8", "batch_size", "did you mean rankings_per_step (of an update's"),
    ("train actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n", "did you mean group_size?"),
    ("train algorithm.adv_estimator=grpo", "algorithm.adv_estimator", "did you mean algorithm (for instance ppo"),
    ("train --load_in_4bit", "command line", "did you mean model.quantization=4bit?"),
    ("train --bf16 true", "command line", "did you mean model.dtype=bfloat16?"),
    ("train max_rounds=2", "max_rounds", "did you mean dynamic_sampling.max_rounds?"),
    ("train every=2", "every",
     "did you mean checkpoint.every, freshness.every, eval.every, rollouts.every or token_values.every?"),
    ("train weight=2", "weight", "did you mean curriculum.weight or reward.<name>.weight?"),
    ("train eval.max_tokens=1", "eval.max_tokens", "prompts.max_tokens, pretrain.max_tokens, generation.max_tokens"),
    ("sft beta=0.1", "beta", "there is no such key, got 0.1; `rlft sft --cfg job` shows every key"),
    ("dpo beta=0.1", "beta", "did you mean loss.beta?"),
    ("dpo loss_type=ipo", "loss_type", "did you mean loss (dpo (its sigmoid), ipo, simpo or orpo)?"),
    ("train algorithm=vpg", "algorithm", "did you mean reinforce?"),
    ("train algorithm=policy_gradient", "algorithm", "did you mean reinforce?"),
    ("train algorithm=actor_critic", "algorithm", "did you mean a2c?"),
    ("train algorithm=r1_zero", "algorithm", "did you mean grpo?"),
    ("train +recipe=r1_zero", "+recipe", "did you mean r1_zero_arithmetic?"),
    ("train +recipe=grpo_zero", "+recipe", "did you mean grpo_arithmetic?"),
    ("train +recipe=rlhf", "+recipe", "did you mean rlhf_ppo_arithmetic?"),
]  # fmt: skip


@each(("typed", "key", "fragment"), SAID, ids=[typed for typed, *_ in SAID])
def test_a_name_of_another_library_leads_to_ours(typed, key, fragment, capsys):
    code = cli.run(typed.split())
    told = capsys.readouterr()
    assert code == 2
    assert told.err.startswith(f"rlft: {key}: ")
    assert fragment in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("section", SECTIONS)
def test_a_refused_name_is_refused_in_every_section_of_sampling(section):
    for name in refused_settings("sampling"):
        problem, remedy = refused_setting(f"{section}.{name}" if section else name) or ("", "")
        assert problem
        assert remedy


def test_no_key_of_rlft_is_refused():
    for command in ("train", "sft", "rm", "sample"):
        assert [key for key in known_keys(command) if refused_setting(key)] == []


def test_all_unknown_keys_are_named_at_once_each_with_its_suggestion(capsys):
    words = ["num_generations=4", "generation.temprature=1", "learnig_rate=3", "foo=1"]
    assert cli.run(["train", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [word.partition("=")[0] for word in words]
    meant = [*(f"did you mean {key}?" for key in ("group_size", "generation.temperature", "trainer.lr")), "--cfg job"]
    assert all(text in line for text, line in zip(meant, lines, strict=True))


RECORDED = Path(__file__).parents[1] / "runs" / "recorded"
SERVE = [f"serve.{field.name}" for field in fields(ServeConfig)]
KEYS = {name: {*known_keys(name)} for name in commands.OWN} | {name: {*keys} for name, keys in OWN_KEYS.items()}
KEYS["serve"] |= {*SERVE}
WORDS = {  # {command that reads no key of a run, or one that needs words before it does: those words}
    **{name: [] for name in (*commands.OWN, "plan", "reward try", "doctor", "runs", "watch", "report")},
    **{name: ["model.path=none"] for name in ("eval", "chat", "serve")},
    **{name: [f"run={RECORDED / 'train'}"] for name in ("export", "resume")},
    "diff": ["a", "b"],
    "audit": ["a"],
}


@pytest.mark.parametrize("every", [9, slow(1)])
@each("command", WORDS)
def test_all_keys_that_a_command_has_not_are_named_at_once_with_the_commands_that_have_them(command, every, capsys):
    of_tools = command in ("runs", "watch", "report", "diff", "audit")
    own = KEYS.get(command, set()) | (set() if of_tools else KEYS.get(command if command in commands.OWN else "train"))
    foreign = sorted({key for keys in KEYS.values() for key in keys} - own - {"run", "recipe", "hydra.run.dir"})[
        ::every
    ]
    typed = [*foreign, "foo", "bar.baz", "serve.prt"]
    assert len(typed) > 5
    assert cli.run([*command.split(), *WORDS[command], *(f"{key}=1" for key in typed)]) == 2
    told = {line.split(": ")[1]: line for line in capsys.readouterr().err.splitlines()}
    assert [key for key in typed if key not in told] == []
    for key in foreign:
        owners = [name for name, keys in KEYS.items() if key in keys]
        assert re.search(rf"is a key of rlft .*{owners[0]}.*, and not of this command", told[key]), told[key]
        meant = [] if key in peer_names() else re.findall(r"did you mean (\S+)", told[key])
        assert all(name.strip("?").rpartition(".")[2] == key for name in meant), told[key]
    if not of_tools:
        prt = "did you mean serve.port?" if command == "serve" else "is in a section of rlft serve, and not of this"
        assert prt in told["serve.prt"]


@each("group", ["data", "demonstrations", "preferences"])
def test_a_kind_of_file_as_the_choice_of_data_leads_to_jsonl(group, capsys):
    command = {"data": "train", "demonstrations": "sft", "preferences": "dpo"}[group]
    for suffix in (*DATA_SUFFIXES, ".gz", ".zip"):
        for value in (suffix[1:], suffix, f"mine{suffix}", f"MINE{suffix.upper()}"):
            if value == "jsonl":
                continue
            assert cli.run([command, f"{group}={value}"]) == 2, value
            file = value if value.lower().startswith("mine") else "<file>"
            told = capsys.readouterr().err.replace("'", "")
            assert f"write {group}=jsonl {group}.path={file}" in told, value
