"""A misspelt value of any key that has choices is answered with the choice that was meant."""

import dataclasses
import typing
from enum import Enum

import pytest
from in_one_test import each

from rlft import cli
from rlft.commands.sweep.checks import check_metric
from rlft.commands.sweep.space import StudyConfig
from rlft.config import command as commands
from rlft.config.catalog import choices, groups
from rlft.config.instantiate import convert, instantiate
from rlft.config.keys import options, without_key
from rlft.types import UserError


def choices_of(hint):
    kinds = [
        typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind for kind in options(hint)
    ]
    enums = [member.value for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for member in kind]
    return enums + [v for kind in kinds if typing.get_origin(kind) is typing.Literal for v in typing.get_args(kind)]


def typed_choices(root, prefix=""):
    """(key, type, choices) of every field below a typed section whose values are names."""
    hints = typing.get_type_hints(root, include_extras=True)
    for field in dataclasses.fields(root):
        hint, key = without_key(hints[field.name]), f"{prefix}{field.name}"
        sections = [kind for kind in options(hint) if dataclasses.is_dataclass(kind)]
        if sections:
            yield from typed_choices(sections[0], f"{key}.")
        elif found := [choice for choice in choices_of(hint) if isinstance(choice, str)]:
            yield key, hint, found


ROOTS = {**{name: commands.named(name).root for name in commands.OWN}, "sweep": StudyConfig}
TYPED = [(name, *found) for name, root in ROOTS.items() for found in typed_choices(root)]


def test_there_are_such_keys_in_every_command():
    assert {name for name, *_ in TYPED} == {*ROOTS}
    assert {"trainer.optimizer", "trainer.schedule", "cluster.placement"} <= {key for _, key, *_ in TYPED}


@each(("command", "key", "hint", "known"), TYPED)
def test_a_choice_without_its_last_letter_is_recognised(command, key, hint, known):
    for choice in (choice for choice in known if len(choice) > 3 and choice[:-1] not in known):
        if str in options(hint):
            continue  # any other text is a value as well, such as a path
        with pytest.raises(UserError) as refused:
            convert(hint, choice[:-1], key)
        meant = refused.value.remedy.partition("did you mean ")[2].partition("?")[0]
        assert meant.startswith(choice[:-1]), (key, refused.value.remedy)


@each("group", [group for group in groups("train") if group != "recipe"])
def test_a_choice_of_a_group_is_recognised(group, capsys):
    longest = max(choices(group, "train"), key=len)
    capsys.readouterr()
    assert cli.run(["train", f"{group}={longest[:-1]}"]) == 2
    assert "did you mean" in capsys.readouterr().err


@each(("words", "meant"), [
    ("train trainer.optimizer=adam", "adamw"),
    ("train model.dtype=float61", "float16"),
    ("train model.dtype=fp16", "float16"),
    ("train model.device=gpu", "cuda"),
    ("train model.device=cdua:0", "cuda"),
    ("train generation.engine=vlm", "vllm"),
    ("train model.path=embedded:tiny-arithmatic", "embedded:tiny-arithmetic"),
    ("train snapshot.reference=bsae", "base"),
    ("runs {folder} status=kiled", "killed"),
    ("runs {folder} sort=lost", "loss"),
    ("diff {folder} {folder} at=comon", "common"),
    ("trian", "rlft train"),
    ("algorithms gpro", "grpo"),
    ("models llamma", "llama"),
])  # fmt: skip
def test_a_choice_elsewhere_is_recognised(words, meant, tmp_path, capsys):
    capsys.readouterr()
    assert cli.run(words.format(folder=tmp_path).split()) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_metric_of_a_study_is_recognised():
    plain = {"command": "rm", "eval": {"every": 1}}
    with pytest.raises(UserError, match="did you mean accuracy"):
        check_metric("accuray", plain)


def test_a_section_of_which_nothing_is_chosen_says_what_to_add():
    """That of a run of sft, for instance, whose command needs no task."""
    with pytest.raises(UserError, match=r"^data: is needed here, and none is chosen; add data=<one of arithmetic, "):
        instantiate({}, "data")
