"""What is known of keys is looked up where they are defined."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

import rlft
from rlft.config import command as commands
from rlft.config.catalog import config_folder
from rlft.config.instantiate import from_mapping
from rlft.config.keys import Key, flatten, keys_of, known


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    path: Annotated[str, Key(roles=("policy",))]
    size: Annotated[int, Key(free=False)]
    every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    section: Annotated[Section, Key(free=True, inside={"path": Key(roles=("reward", "policy"))})]
    data: Annotated[dict[str, Any], Key(inside={"path": Key(free=True)})]


def test_a_key_has_what_its_section_has_unless_it_says_otherwise():
    assert [key for key, said in keys_of(Config).items() if said.free] == [
        "section", "section.path", "section.every", "data.path"
    ]  # fmt: skip
    assert known(Config, "section.path").roles == ("reward", "policy"), "the root goes before the section's own class"
    assert known(Config, "section.every").roles == ()
    assert known(Config, "data.rows.first") == known(Config, "data")
    assert known(Config, "nothing.here") == Key()


def test_what_is_known_of_a_key_is_no_part_of_its_type():
    config = from_mapping(Config, {"section": {"path": "a", "size": 1, "every": 2}, "data": {"path": "b"}}, "")
    assert config == Config(section=Section(path="a", size=1, every=2), data={"path": "b"})


def test_a_run_of_each_kind_can_be_named_where_its_role_can_be_used():
    roles = {
        command: {key: said.roles for key, said in keys_of(commands.named(command).root).items() if said.roles}
        for command in commands.OWN
    }
    model, policy = {"model.path": ("model",)}, {"lora.path": ("policy",)}
    assert roles == {
        "train": {**model, **policy, "snapshot.reference": ("policy",), "snapshot.teacher": ("policy", "model"),
                  "critic.init": ("critic", "reward")},
        "sft": {**model, **policy},
        "rm": {**model, "lora.path": ("reward", "policy")},
        "dpo": {**model, **policy, "snapshot.reference": ("policy",)},
        "sample": {**model, "adapter": ("policy",)},
    }  # fmt: skip


@pytest.mark.parametrize(("key", "files"), [
    ("accuracy_drop", ("configs/train.yaml", "rlft/config/schema.py", "rlft/logger/alarms.py")),
    ("capacity", ("configs/train.yaml", "rlft/config/model.py", "rlft/trainer/reward_training.py")),
    ("teacher_dtype", ("configs/train.yaml", "rlft/config/model.py", "rlft/plan/roles.py")),
])  # fmt: skip
def test_a_key_stands_in_its_yaml_in_its_section_and_where_it_is_used(key, files):
    package, configs = Path(rlft.__file__).parent, config_folder()
    found = [f"rlft/{f.relative_to(package)}" for f in package.rglob("*.py") if key in f.read_text()]
    found += [f"configs/{f.relative_to(configs)}" for f in configs.rglob("*.yaml") if f"{key}:" in f.read_text()]
    assert sorted(found) == sorted(files)


def test_an_empty_section_is_a_value():
    assert flatten({"data": {}, "a": {"b": {"c": None}}, "d": [{"e": 1}]}) == {
        "data": {},
        "a.b.c": None,
        "d": [{"e": 1}],
    }
