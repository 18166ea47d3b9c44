"""Recipes: each is told in a line, composes over the defaults, and passes every check that needs no network."""

from __future__ import annotations

import pytest
import yaml

from rlft import catalog
from rlft.config import build, compose
from rlft.plan import check_components

RECIPES = catalog.choices("recipe")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_begins_with_its_package_and_says_what_it_is(recipe: str) -> None:
    file = catalog.recipe_folder() / f"{recipe}.yaml"
    lines = file.read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# ")
    assert catalog.first_comment(file) == lines[1].removeprefix("# ")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_named_as_its_file(recipe: str) -> None:
    assert yaml.safe_load((catalog.recipe_folder() / f"{recipe}.yaml").read_text())["name"] == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_builds_and_passes_the_checks(recipe: str) -> None:
    config = build(compose([f"+recipe={recipe}"]))
    algorithm, loggers = check_components(config)
    assert config.group_size >= algorithm.min_group_size
    assert len(loggers) == len(config.logger)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_command_line_goes_before_a_recipe(recipe: str) -> None:
    config = build(compose(["trainer.lr=0.25", f"+recipe={recipe}", "reward=[exact_match]", "steps=7"]))
    assert (config.trainer.lr, config.steps) == (0.25, 7)


def test_the_main_job_is_what_it_says() -> None:
    config = build(compose(["+recipe=grpo_gsm8k"]))
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.lora.rank, config.lora.target_modules, config.group_size) == (32, "all-linear", 8)
    assert config.generation.engine == "vllm"
    assert list(config.reward) == ["math", "format"]
    assert config.data["path"] == "openai/gsm8k"
