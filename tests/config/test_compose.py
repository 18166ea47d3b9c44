"""From YAML and the command line to typed dataclasses: conversion, composition, and what configs/ itself must be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from annotated_types import Gt
from in_one_test import each

import rlft
from rlft import cli
from rlft.algorithm.grpo import GRPO
from rlft.algorithm.ops.surrogate import Mismatch
from rlft.config import catalog, command as commands
from rlft.config.bounds import Decay, Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from rlft.config.compose import compose, compose_run
from rlft.config.instantiate import convert, from_mapping, instantiate, locate
from rlft.config.keys import with_values
from rlft.config.resolved import build
from rlft.config.schema import RunConfig, SampleConfig, SftConfig
from rlft.reward.workers.reward_spec import specs
from rlft.types import UserError


class Colour(StrEnum):
    red = "red"
    off = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    name: str
    share: Fraction = 0.5


# -- conversion ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 3, 3),
        (PositiveInt, 1, 1),
        (NonNegativeInt, 0, 0),
        (float, 3, 3.0),
        (PositiveFloat, 1e-9, 1e-9),
        (Decay, 0.0, 0.0),
        (bool, False, False),
        (str, "3", "3"),
        (str | None, None, None),
        (Colour, "red", Colour.red),
        (Colour | None, None, None),
        (Colour, False, Colour.off),  # a bare `off` in YAML
        (float | Literal["stop"], "stop", "stop"),
        (float | Literal["stop"], 1, 1.0),
        (Literal["drop", "refuse"], "drop", "drop"),
        (Literal["off", "auto"], False, "off"),
        (float | Literal["off"] | None, False, "off"),
        (bool | Literal["off"], False, False),
        (Sequence[str], ["a", "b"], ("a", "b")),
        (str | Sequence[str], "all-linear", "all-linear"),
        (str | Sequence[str], ["q", "k"], ("q", "k")),
        (Mapping[str, Any], {"a": [1]}, {"a": [1]}),
        (Inner, {"size": 2}, Inner(size=2)),
    ],
)
def test_a_value_becomes_its_fields_type(hint: Any, value: Any, expected: Any) -> None:
    converted = convert(hint, value, "key")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "problem"),
    [
        (int, "3", "must be a whole number, got '3'"),
        (int, 3.5, "must be a whole number, got 3.5"),
        (int, 3.0, "must be a whole number, got 3.0; write 3"),
        (int, True, "must be a whole number, got true"),
        (int, None, "must be a whole number, got null"),
        (PositiveInt, 0, "must be greater than 0, got 0"),
        (NonNegativeInt, -1, "must be greater than or equal to 0, got -1"),
        (Decay, 1.0, "must be less than 1, got 1.0"),
        (Annotated[float, Gt(0)], float("nan"), "got nan"),
        (float, float("inf"), "must be finite, got inf"),
        (float, "0.1", "must be a number, got '0.1'"),
        (bool, 1, "must be true or false, got 1"),
        (bool, "yes", "must be true or false, got 'yes'"),
        (str, 3, """must be a string, got 3; quote it twice: "key='3'\""""),
        (str, ["a"], "must be a string, got ['a']"),
        (Colour, "rde", "is not one of its choices, got 'rde'; did you mean red? All: red, off"),
        (Colour | None, "rde", "did you mean red? All: red, off, null"),
        (float | Literal["stop"], "go", "use stop or a number"),
        (Literal["drop", "refuse"], "keep", "use drop or refuse"),
        (Sequence[str], "a", "got 'a'"),
        (Sequence[int], [1, "b"], "must be a whole number"),
        (Mapping[str, Any], 3, "got 3"),
        (Inner, 3, "must be a section of keys, got 3; set one of key.size"),
        (Inner, {"size": 0}, "must be greater than 0"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(hint: Any, value: Any, problem: str) -> None:
    with pytest.raises(UserError) as refusal:
        convert(hint, value, "key")
    assert refusal.value.key in ("key", "key.size")
    assert problem in str(refusal.value)


DEFAULTS = compose([])
OUT_OF_BOUNDS = {
    "prompts_per_step": 0, "epochs": 0, "eval.num_samples": 0, "checkpoint.keep": 0, "checkpoint.on_signal": 0,
    "lora.rank": 0, "lora.dropout": 1, "prompts.over_limit": "droop", "scoring.on_error": "go", "scoring.timeout": 0,
    "generation.vllm.gpu_memory_utilization": 90, "generation.vllm.weights": "both", "generation.temperature": -1,
    "generation.min_p": 1, "rollouts.every": -1, "rollouts.keep": 0, "snapshot.ema_decay": 1.5, "snapshot.old": "never",
    "snapshot.teacher_gpu_memory_utilization": 0, "snapshot.teacher_quantization": "8bit",
    "snapshot.teacher_engine": "trl",
    "model.kernels": "fast", "model.quantization": "8bit", "critic.kind": "own", "overlap.lag": 2,
}  # fmt: skip


@each(("key", "value"), OUT_OF_BOUNDS.items())
def test_a_value_out_of_the_bounds_of_its_key_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError) as refusal:
        build(with_values(DEFAULTS, {key: value}))
    assert refusal.value.key == key


def test_a_nested_mapping_becomes_nested_dataclasses() -> None:
    assert from_mapping(Outer, {"inner": {"size": 2}, "name": "x"}, "") == Outer(inner=Inner(size=2), name="x")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"inner": {"size": 2, "sise": 3}, "name": "x"},
            "inner.sise: there is no such key, got 3; did you mean inner.size?",
        ),
        ({"inner": {"size": 2}, "nmae": "x"}, "nmae: there is no such key, got 'x'; did you mean name?"),
        ({"inner": {"size": 2}, "q": 1, "name": "x"}, "q: there is no such key, got 1; known here: inner, name, share"),
        ({"inner": {}, "name": "x"}, "inner.size: is missing"),
        ({"inner": {"size": 2}}, "name: is missing"),
    ],
)
def test_unknown_and_missing_keys_are_told_by_their_full_name(values: Any, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        from_mapping(Outer, values, "")
    assert str(refusal.value).startswith(message)


def test_a_target_outside_the_tree_gets_the_keys_it_takes_and_no_others() -> None:
    fraction = instantiate({"_target_": "fractions.Fraction", "numerator": 1, "denominator": 3}, "x")
    assert str(fraction) == "1/3"
    with pytest.raises(UserError, match=r"x\.denominater: there is no such key, got 3; did you mean x\.denominator\?"):
        instantiate({"_target_": "fractions.Fraction", "numerator": 1, "denominater": 3}, "x")


def test_what_cannot_be_imported_says_why() -> None:
    with pytest.raises(UserError, match=r"^x: cannot be imported \(ModuleNotFoundError: No module named 'no'\)"):
        locate("no.such.Thing", "x")


# -- composition -----------------------------------------------------------------------------------------------------
def test_the_defaults_build_and_every_section_is_typed() -> None:
    config = build(compose([]))
    assert isinstance(config, RunConfig)
    assert config.completions_per_step == config.prompts_per_step * config.group_size


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("train", []),
        ("sft", ["demonstrations.path=some.jsonl"]),
        ("rm", ["preferences.path=some.jsonl"]),
        ("sample", []),
    ],
)
def test_every_commands_defaults_build(command: str, needs: list[str]) -> None:
    plain, root = compose(needs, command=command), commands.named(command).root
    assert isinstance(build(plain, root, command), root)
    with pytest.raises(UserError, match=rf"^command: this is rlft {command}, got another; leave it as it is$"):
        build({**plain, "command": "another"}, root, command)


def test_every_command_has_a_file_that_names_it_and_no_other_file_does() -> None:
    named = {file.stem: yaml.safe_load(file.read_text())["command"] for file in catalog.config_folder().glob("*.yaml")}
    assert named == {command: command for command in commands.OWN}
    assert [commands.named(command).name for command in commands.OWN] == list(commands.OWN)


def test_prompts_with_answers_are_left_out_by_default_of_sft_only() -> None:
    assert build(compose(["demonstrations.path=some.jsonl"], command="sft"), SftConfig, "sft").data == {}
    plain = compose([], command="sample")
    del plain["data"]
    with pytest.raises(UserError, match=r"^data: is missing; choose data=arithmetic or "):
        build(plain, SampleConfig, "sample")


def test_a_run_without_an_adapter_has_no_lora_section() -> None:
    assert build(compose(["demonstrations.path=some.jsonl", "lora=null"], command="sft"), SftConfig, "sft").lora is None


def test_nothing_chosen_leaves_out_what_a_recipe_says_of_its_keys_but_not_what_is_typed() -> None:
    assert compose(["+recipe=grpo_calculator"])["environment"]["syntax"] == "xml"
    plain = compose(["+recipe=grpo_calculator", "environment=null"])
    assert "environment" not in plain
    assert build(plain).environment is None
    typed = compose(["+recipe=grpo_calculator", "environment=null", "environment.syntax=json"])
    assert typed["environment"]["syntax"] == "json", "which is refused: it is of no environment"


def test_a_run_gets_the_folder_hydra_names_and_a_resumed_one_its_own() -> None:
    assert re.fullmatch(r"runs/mine/[0-9-]+_[0-9-]+", str(compose_run(["name=mine"]).folder))
    assert compose_run(["hydra.run.dir=there"]).folder == Path("there")
    assert compose_run(["resume=runs/x/y"]).folder == Path("runs/x/y")


def test_a_key_that_a_file_requires_must_be_given_although_a_file_before_it_has_a_value(tmp_path: Path) -> None:
    for name, text in {
        "recipe/first.yaml": "# @package _global_\nlora:\n  path: ???\nsteps: ???\n",
        "recipe/second.yaml": "# @package _global_\ndefaults: [first, _self_]\nsteps: 7\n",
        "recipe/third.yaml": "# @package _global_\ndefaults: [second, _self_]\nsteps: ???\nname: ???\n",
        "recipe/fourth.yaml": "# @package _global_\ndefaults: [{override /reward: '???'}]\nhydra: {job: {num: '???'}}",
        "recipe/fifth.yaml": "# @package _global_\nreward: ???\n",
        "algorithm/mine.yaml": "defaults: [grpo]\nclip_low: ???\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def missing(*words: str, problem: str = "has no value yet") -> str:
        with pytest.raises(UserError) as refused:
            compose(words, tmp_path)
        assert refused.value.problem == problem
        return refused.value.key

    assert missing("+recipe=first", "lora.path=adapter") == "steps"
    assert missing("+recipe=second") == "lora.path"
    assert missing("+recipe=third", "lora.path=adapter", "name=mine") == "steps"
    assert missing("+recipe=third", "lora.path=adapter", "steps=3") == "name"
    assert missing("+recipe=fourth", problem="something must be chosen") == "reward"
    assert list(compose(["+recipe=fourth", "reward=math"], tmp_path)["reward"]) == ["math"]
    for words in (["+recipe=fifth"], ["+recipe=fifth", "reward=math"]):
        assert missing(*words, problem="is chosen in a list of defaults") == "reward"
    assert missing("algorithm=mine") == "algorithm.clip_low"
    composed = compose(["+recipe=second", "lora.path=null", "algorithm=mine", "algorithm.clip_low=0.1"], tmp_path)
    assert (composed["lora"]["path"], composed["steps"], composed["algorithm"]["clip_low"]) == (None, 7, 0.1)
    # What only samples does not ask for them.
    assert compose(["+recipe=first"], tmp_path, requires=False)["steps"] == compose([])["steps"]
    assert compose(["data=jsonl", "data.path=a.jsonl"], requires=False)["data"]["path"] == "a.jsonl"


def test_a_users_folder_adds_choices(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text(
        "# Mine.\ndefaults: [grpo, _self_]\nmismatch: off\nclip_low: 0.1\n"
    )
    plain = compose(["algorithm=mine"], tmp_path)
    assert plain["algorithm"]["mismatch"] is False  # YAML reads a bare off so
    algorithm = instantiate(plain["algorithm"], "algorithm")
    assert (algorithm.clip_low, algorithm.mismatch) == (0.1, Mismatch.off)


@pytest.mark.parametrize("word", ["off", "'off'", "token_mask"])
def test_a_mismatch_mode_is_a_plain_word_on_the_command_line(word: str) -> None:
    algorithm = instantiate(compose([f"algorithm.mismatch={word}"])["algorithm"], "algorithm")
    assert algorithm.mismatch == word.strip("'")


def test_load_algorithm_composes_and_overrides() -> None:
    algorithm = rlft.load_algorithm("grpo", clip_high=0.28)
    assert isinstance(algorithm, GRPO)
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
    assert rlft.load_algorithm("gspo").ratio == "sequence"


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("grop", {}, "algorithm: is not one of its choices, got grop; did you mean grpo?"),
        ("grpo", {"clip": 1.0}, "algorithm.clip: there is no such key"),
        ("grpo", {"clip_high": "a lot"}, "algorithm.clip_high: must be a number, got 'a lot'"),
    ],
)
def test_load_algorithm_refuses_as_the_command_line_does(name: str, overrides: Any, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        rlft.load_algorithm(name, **overrides)
    assert str(refusal.value).startswith(message)


# -- what configs/ holds -----------------------------------------------------------------------------------------------
CHOICES = [(group, choice) for group in catalog.groups() if group != "recipe" for choice in catalog.choices(group)]
CHOSEN = [catalog.config_folder() / group / f"{choice}.yaml" for group, choice in CHOICES]
BASES = list(dict.fromkeys(base for file in CHOSEN for base in catalog.bases(file)))
ROOT_FILES = list(dict.fromkeys(file for command in commands.OWN for file in catalog.root_files(command)))
FILES = [*ROOT_FILES, *CHOSEN, *BASES]
NEEDS = {
    ("data", "jsonl"): ["data.path=some.jsonl"],
    ("data", "hub"): ["data.path=some/set"],
    ("environment", "tools"): ["environment.tools=[mine.search]"],
    ("environment", "class"): ["environment.factory=mine.Shop"],
    ("environment", "game"): ["environment.factory=mine.Game"],
    ("environment", "mcp"): ["environment.command=[python,server.py]"],
    ("environment", "textarena"): ["environment.game=GuessTheNumber-v0"],
}
COMMAND_OF = {"demonstrations": "sft", "preferences": "rm"}


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_builds(group: str, choice: str) -> None:
    if group == "loss":
        plain = compose([f"loss={choice}", "preferences.path=some.jsonl"], command="dpo")
        assert type(instantiate(plain[group], group)).__name__.lower() == choice
        return
    if group in COMMAND_OF:
        plain = compose([f"{group}={choice}", f"{group}.path=some.jsonl"], command=COMMAND_OF[group])
        assert type(instantiate(plain[group], group)).__module__ == f"rlft.data.{group}"
        return
    config = build(compose([f"{group}={choice}", *NEEDS.get((group, choice), [])]))
    built = {
        "algorithm": lambda: instantiate(config.algorithm, "algorithm"),
        "data": lambda: instantiate(config.data, "data"),
        "reward": lambda: specs(config.reward)[choice].build(),
        "logger": lambda: instantiate(config.logger[choice], f"logger.{choice}"),
        "generation": lambda: config.generation,
        "cluster": lambda: config.cluster,
        "environment": lambda: instantiate(config.environment, "environment"),
    }[group]()
    if group == "generation":
        assert config.generation.engine == choice
    elif group == "cluster":
        assert config.cluster.kind == choice
    else:
        assert type(built).__module__.startswith(f"rlft.{group}.")


@each("file", FILES)
def test_every_key_has_a_comment_and_every_file_a_first_line(file: Path) -> None:
    assert file.read_text().startswith("# ")
    entries = catalog.entries(file)
    sections = {key.rpartition(".")[0] for key in entries}
    told = {key for command in commands.OWN for key, entry in catalog.root_entries(command).items() if entry.comment}
    told = told if file in ROOT_FILES else set()  # what one of them changes is explained in the base that it builds on
    bare = [k for k, e in entries.items() if not e.comment and k not in sections | told and not k.endswith("_target_")]
    # The upper end of a range that is explained at its lower end.
    assert [key for key in bare if key.replace("high", "low") not in entries or key.replace("high", "low") == key] == []


@each("file", FILES)
def test_the_catalog_reads_the_keys_and_defaults_that_yaml_reads(file: Path) -> None:
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


def test_a_key_means_what_its_comments_say() -> None:
    meaning = catalog.meaning("prompts_per_step")
    assert meaning is not None
    assert (meaning.default, meaning.comment) == ("16", "prompts sampled in a step")
    below = catalog.meaning("snapshot.old")
    assert below is not None
    assert below.comment.endswith("| sampled (trust the engine's) | recompute (always) | copy (an adapter of its own)")
    both = catalog.meaning("algorithm.value_coef")  # a line above it, and one on its own line
    assert both is not None
    assert both.comment.startswith("weight of the critic's loss, 0.5 .. 1 is usual; Critic: + value_coef * 0.5")
    assert catalog.meaning("data.path") is None  # each data set means something else by it


def test_a_commands_keys_are_its_bases_and_its_own_and_what_it_changes_means_what_it_did() -> None:
    names = {command: [file.stem for file in catalog.root_files(command)] for command in commands.OWN}
    assert names["sft"] == ["run", "training", "sampling", "evaluation", "sft"]
    assert names["rm"] == ["run", "training", "rankings", "rm"]
    assert names["dpo"] == ["run", "training", "rankings", "dpo"]
    assert names["sample"] == ["run", "sampling", "sample"]
    train, sft = catalog.root_entries("train")["trainer.lr"], catalog.root_entries("sft")["trainer.lr"]
    assert (train.comment, sft.comment) == ("learning rate",) * 2
    assert (train.default, sft.default) == ("1.0e-5", "1.0e-4")


def test_a_command_has_the_groups_of_its_defaults_list_and_the_recipes_that_name_it() -> None:
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


def test_only_the_data_of_sft_and_an_environment_may_be_absent() -> None:
    found = {(command, group) for command in commands.OWN for group in catalog.groups(command)}
    assert {(command, group) for command, group in found if catalog.may_be_absent(group, command)} == {
        ("sft", "data"),
        ("train", "environment"),
        ("sample", "environment"),
    }


def test_what_choices_share_stands_in_a_base_that_is_no_choice() -> None:
    assert {f"{file.parent.name}/{file.stem}" for file in BASES} == {
        "base/objective",
        "base/ratio",
        "base/limits",
    }
    assert not {"base", "objective", "ratio"} & {*catalog.groups(), *catalog.choices("algorithm")}
    ratio = catalog.meaning("algorithm.dual_clip")
    assert ratio is not None
    assert ratio.comment.startswith("clipped, when A < 0: no gradient above")
    shared = catalog.meaning("algorithm.kl_coef")  # also in rloo and others, which only say how they differ
    assert shared is not None
    assert (shared.default, shared.comment[:20]) == ("0.0", "beta, reward per nat")
    own = catalog.meaning("algorithm.lam")  # of one choice, which stands on a base
    assert own is not None
    assert own.default == "0.95"
    assert catalog.meaning("algorithm.baseline") is None  # REINFORCE's and Kimi's are different things


def test_a_key_of_a_base_belongs_to_the_choices_that_build_on_it() -> None:
    known = catalog.keys("algorithm")
    assert set(known["algorithm.entropy_coef"]) == {"a2c", "grpo", "kimi", "ppo", "reinforce"}
    assert set(known["algorithm.dual_clip"]) == {"grpo", "ppo", "reinforce"}
    with pytest.raises(UserError, match=r"it belongs to algorithm=grpo and algorithm=ppo and algorithm=reinforce$"):
        compose(["algorithm=kimi", "algorithm.dual_clip=3"])


@pytest.mark.parametrize("words", [("sft", "trainer.lr=1e-4"), ("train", "data=jsonl"), ("dpo", "name=${x}"), ("sft",)])
def test_cfg_prints_a_config_whose_values_are_not_all_given_yet(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *overrides = words
    assert cli.run([command, "--cfg", "job", *overrides]) == 0
    printed = capsys.readouterr()
    assert (printed.err, "???" in printed.out or "${x}" in printed.out) == ("", True)
