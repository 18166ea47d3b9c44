"""Recipes: each is told in a line, composes over the defaults, and passes every check that needs no network."""

from itertools import chain
from pathlib import Path

import pytest
import yaml
from in_one_test import each

from rlft.config import catalog, command as commands
from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.logger.loggers import loggers_of
from rlft.plan.rules import check_components, check_preferences, check_sft
from rlft.types import UserError

RECIPES = catalog.choices("recipe")
CHECKS = {"train": check_components, "sft": check_sft, "rm": check_preferences, "dpo": check_preferences}

# What a stage of a pipeline is told on the command line: what an earlier stage has made.
MODEL = ["model.path=embedded:tiny-arithmetic"]  # in place of a folder that a script makes
PROBLEMS = Path(__file__).parent / "data" / "gsm8k_mini"
OF_FOLDER, OF_FILE = ([*MODEL, f"data.path={path}"] for path in (PROBLEMS, PROBLEMS.parent / "svamp_mini.jsonl"))
LESSONS = ["demonstrations.path=embedded:arithmetic-cold-start"]
WITHOUT_REWARD_MODEL = ["~reward.learned", "critic.init=base", "reward.exact_match.weight=1.0"]
TOLD = {
    "r1_keepers_arithmetic": LESSONS,
    "distill_arithmetic": LESSONS,
    "grpo_smollm2_gsm8k": [*OF_FOLDER, "lora.path=null"],
    "grpo_smollm2_sums": MODEL,
    "grpo_smollm2_svamp": [*OF_FILE, "lora.path=null"],
    "sft_smollm2_gsm8k": OF_FOLDER,
    "sft_smollm2_svamp": OF_FILE,
    "opd_arithmetic": ["snapshot.teacher=embedded:tiny-arithmetic"],
    "r1_final_arithmetic": WITHOUT_REWARD_MODEL,
    "rlhf_rm_arithmetic": ["preferences.path=embedded:arithmetic-preferences"],
    "rlhf_ppo_arithmetic": WITHOUT_REWARD_MODEL,
}


def command_of(recipe):
    command = catalog.command_of(recipe)
    assert command is not None
    return command


def composed(recipe, *words):
    """The plain config of the recipe, with what it must be told."""
    return compose([f"+recipe={recipe}", *TOLD.get(recipe, []), *words], command=command_of(recipe))


@each("recipe", RECIPES)
def test_a_recipe_is_named_as_its_file_and_begins_with_its_package_and_what_it_is(recipe):
    file = catalog.files("recipe")[recipe]
    text = file.read_text()
    lines, own = text.splitlines(), yaml.safe_load(text)
    assert lines[0] == "# @package _global_"
    assert lines[1] == f"# {catalog.first_comment(file)}"
    assert own["name"] == recipe
    assert own.get("command", "train") == command_of(recipe)


@each("recipe", RECIPES)
def test_a_recipe_composes_builds_and_passes_the_checks_below_what_is_typed(recipe):
    command = command_of(recipe)
    config = build(composed(recipe), commands.named(command).root, command)
    CHECKS[command](config)
    assert loggers_of(config.logger) == ()
    config = build(composed(recipe, "trainer.lr=0.25", "steps=7"), commands.named(command).root, command)
    assert (config.trainer.lr, config.steps) == (0.25, 7)


def required(section, path=""):
    """The keys of a recipe's own file that have no value, but `???`."""
    below = [required(value, f"{path}{key}.") for key, value in section.items() if isinstance(value, dict)]
    return [f"{path}{key}" for key, value in section.items() if value == "???"] + list(chain(*below))


def test_what_a_recipe_requires_has_no_default_from_another_file():
    """Most recipes of a pipeline require what an earlier stage has made."""
    files = {recipe: catalog.files("recipe")[recipe] for recipe in RECIPES}
    keys = {recipe: required(yaml.safe_load(file.read_text())) for recipe, file in files.items()}
    assert len({recipe for recipe, names in keys.items() if names}) >= 6
    for recipe, names in keys.items():
        for key in names:
            words = [word for word in TOLD.get(recipe, []) if not word.startswith(f"{key}=")]
            with pytest.raises(UserError, match=rf"^{key}: has no value yet; give {key}=<value>"):
                compose([f"+recipe={recipe}", *words], command=command_of(recipe))


def test_the_main_job_is_what_it_says():
    config = build(compose(["+recipe=grpo_gsm8k"]))
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.lora.rank, config.lora.target_modules, config.group_size) == (32, "all-linear", 8)
    assert config.generation.engine == "vllm"
    assert list(config.reward) == ["math", "format"]
    assert config.data["path"] == "openai/gsm8k"
