"""What may stand after a group's name: a name, or a list of names; null where nothing need be chosen."""

import itertools

import pytest
import yaml
from in_one_test import each

from rlft.commands.sweep.space import read_space
from rlft.config import catalog, command as commands
from rlft.config.compose import answer, compose
from rlft.config.overrides import parse
from rlft.config.resolved import build
from rlft.config.schema import SftConfig
from rlft.types import UserError

GROUPS = [(command, group) for command in commands.OWN for group in catalog.groups(command)]
NO_NAMES = [
    "1", "-1", "1.5", "true", "nan", "inf", "''", "[[x]]", "[null]", "[1]", "[nan]", "[inf]", "[true]", "[{}]",
    "[{a: 1}]", "[exact_match,1]", "[exact_match,null]", "[exact_match,[]]", "9" * 5000,
]  # fmt: skip
NO_CHOICES = ["x", "a/b", "../x", "[..]", "???"]
MAY_BE_NULL = {(command, group) for command, group in GROUPS if group in ("reward", "logger", "environment")} | {
    ("sft", "data")
}


@each(("command", "group"), GROUPS)
def test_what_is_no_name_or_no_choice_is_refused_by_the_groups_key(command, group):
    sign = "+" if group == "recipe" else ""
    for value in (*NO_NAMES, *NO_CHOICES):
        with pytest.raises(UserError) as refused:
            compose([f"{sign}{group}={value}"], command=command)
        assert value in NO_CHOICES or refused.value.key.lstrip("+") == group
        assert refused.value.remedy
    if (command, group) not in MAY_BE_NULL:
        with pytest.raises(UserError, match="something must be chosen, got null; "):
            compose([f"{sign}{group}=null"], command=command)


@pytest.mark.parametrize("group", ["base", "base/run", "hydra/help", "reward@x", "algorithm@x"])
def test_folders_of_yaml_that_are_no_groups_take_no_other_values_either(group):
    for sign, value in itertools.product(("", "+"), ("null", "1", "x")):
        if (group, value) != ("reward@x", "null"):
            with pytest.raises(UserError):
                build(compose([f"{sign}{group}={value}"]))


def test_null_may_be_said_where_there_need_be_nothing():
    for words in ([], ["logger=null"], ["logger=[]"], ["+recipe=grpo_arithmetic", "logger=null"]):
        assert build(compose(words)).logger == {}
    assert build(compose(["+recipe=sft_arithmetic", "data=null"], command="sft"), SftConfig, "sft").data == {}
    assert build(compose(["reward=null"])).reward == {}
    printed = yaml.safe_load(answer("train", parse(["--cfg", "job", "console=null", "logger=null"])))
    assert "logger" not in printed
    assert printed["console"] is None


def test_null_among_the_values_of_a_sweep_means_the_same():
    space = read_space(["logger=null,wandb", "reward=format,null", "seed=1"], "train", is_study=False)
    plains = [compose(space.words(params)) for params in space.combinations()]
    assert [(list(p.get("logger", {})), list(p.get("reward", {}))) for p in plains] == [
        (loggers, rewards) for loggers in ([], ["wandb"]) for rewards in (["format"], [])
    ]
    algorithms = read_space(["algorithm=grpo,null"], "train", is_study=False)
    *_, nothing = algorithms.combinations()
    with pytest.raises(UserError, match="algorithm: something must be chosen"):
        compose(algorithms.words(nothing))
