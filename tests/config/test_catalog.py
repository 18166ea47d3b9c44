"""What configs/ holds, read without Hydra: files, choices, and what their comments say of keys."""

from typing import Any

import pytest
import yaml
from in_one_test import each

from rlft.config import catalog, command as commands
from rlft.config.compose import compose
from rlft.types import UserError

GROUPS = [group for group in catalog.groups() if group != "recipe"]
CHOSEN = [catalog.config_folder() / group / f"{choice}.yaml" for group in GROUPS for choice in catalog.choices(group)]

BASES = list(dict.fromkeys(base for file in CHOSEN for base in catalog.bases(file)))

ROOT_FILES = list(dict.fromkeys(file for command in commands.OWN for file in catalog.root_files(command)))

FILES = [*ROOT_FILES, *CHOSEN, *BASES]


@each("file", FILES)
def test_every_key_has_a_comment_and_every_file_a_first_line(file):
    assert file.read_text().startswith("# ")
    entries = catalog.entries(file)
    sections = {key.rpartition(".")[0] for key in entries}
    told = {key for command in commands.OWN for key, entry in catalog.root_entries(command).items() if entry.comment}
    told = told if file in ROOT_FILES else set()  # what one of them changes is explained in the base that it builds on
    bare = [k for k, e in entries.items() if not e.comment and k not in sections | told and not k.endswith("_target_")]
    # The upper end of a range that is explained at its lower end.
    assert [key for key in bare if key.replace("high", "low") not in entries or key.replace("high", "low") == key] == []


@each("file", FILES)
def test_the_catalog_reads_the_keys_and_defaults_that_yaml_reads(file):
    known = catalog.entries(file)
    read = yaml.safe_load(file.read_text())
    read = {key: value for key, value in read.items() if key not in ("defaults", "hydra", "_target_")}

    def value_of(key: str) -> Any:
        value = read
        for part in key.split("."):
            value = value[part]
        return value

    assert set(read) == {key for key in known if "." not in key}
    for key, entry in known.items():
        value = value_of(key)
        if entry.default == "":
            assert {f"{key}.{inner}" for inner in value} <= known.keys()
        elif entry.default != ">-":
            assert yaml.safe_load(entry.default) == value, key


def meaning(key):
    found = catalog.meaning(key)
    return found.default, found.comment


def test_a_key_means_what_its_comments_say():
    assert meaning("prompts_per_step") == ("16", "prompts sampled in a step")
    below = meaning("snapshot.old")[1]
    assert below.endswith("| sampled (trust the engine's) | recompute (always) | copy (an adapter of its own)")
    both = meaning("algorithm.value_coef")[1]  # a line above it, and one on its own line
    assert both.startswith("weight of the critic's loss, 0.5 .. 1 is usual; Critic: + value_coef * 0.5")
    assert catalog.meaning("data.path") is None  # each data set means something else by it


def test_a_commands_keys_are_its_bases_and_its_own_and_what_it_changes_means_what_it_did():
    names = {command: [file.stem for file in catalog.root_files(command)] for command in commands.OWN}
    assert names["sft"] == ["run", "training", "sampling", "evaluation", "sft"]
    assert names["rm"] == ["run", "training", "rankings", "rm"]
    assert names["dpo"] == ["run", "training", "rankings", "dpo"]
    assert names["sample"] == ["run", "sampling", "sample"]
    train, sft = catalog.root_entries("train")["trainer.lr"], catalog.root_entries("sft")["trainer.lr"]
    assert (train.comment, sft.comment) == ("learning rate",) * 2
    assert (train.default, sft.default) == ("1.0e-5", "1.0e-4")


def test_a_command_has_the_groups_of_its_defaults_list_and_the_recipes_that_name_it():
    assert catalog.groups("sft") == ["data", "demonstrations", "generation", "logger", "recipe", "reward"]
    assert catalog.groups("rm") == ["logger", "preferences", "recipe"]
    assert catalog.groups("dpo") == ["logger", "loss", "preferences", "recipe"]
    assert catalog.groups("sample") == ["data", "environment", "generation", "recipe", "reward"]
    assert {"algorithm", "data", "reward"} < set(catalog.groups("train"))
    by_command = [name for command in commands.OWN for name in catalog.choices("recipe", command)]
    assert sorted(by_command) == catalog.choices("recipe")
    assert "sft_arithmetic" in catalog.choices("recipe", "sft")
    assert "grpo_arithmetic" in catalog.choices("recipe", "train")
    assert catalog.choices("data", "sft") == catalog.choices("data")  # of any other group every command has all


def test_only_the_data_of_sft_and_an_environment_may_be_absent():
    found = {(command, group) for command in commands.OWN for group in catalog.groups(command)}
    absent = {(command, group) for command, group in found if catalog.may_be_absent(group, command)}
    assert absent == {("sft", "data"), ("train", "environment"), ("sample", "environment")}


def test_what_choices_share_stands_in_a_base_that_is_no_choice():
    assert {f"{file.parent.name}/{file.stem}" for file in BASES} == {"base/objective", "base/ratio", "base/limits"}
    assert not {"base", "objective", "ratio"} & {*catalog.groups(), *catalog.choices("algorithm")}
    assert meaning("algorithm.dual_clip")[1].startswith("clipped, when A < 0: no gradient above")
    default, comment = meaning("algorithm.kl_coef")  # also in rloo and others, which only say how they differ
    assert (default, comment[:20]) == ("0.0", "beta, reward per nat")
    assert meaning("algorithm.lam")[0] == "0.95"  # of one choice, which stands on a base
    assert catalog.meaning("algorithm.baseline") is None  # REINFORCE's and Kimi's are different things


def test_a_key_of_a_base_belongs_to_the_choices_that_build_on_it():
    known = catalog.keys("algorithm")
    assert set(known["algorithm.entropy_coef"]) == {"a2c", "grpo", "kimi", "ppo", "reinforce"}
    assert set(known["algorithm.dual_clip"]) == {"grpo", "ppo", "reinforce"}
    with pytest.raises(UserError, match=r"it belongs to algorithm=grpo and algorithm=ppo and algorithm=reinforce$"):
        compose(["algorithm=kimi", "algorithm.dual_clip=3"])
