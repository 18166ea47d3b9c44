"""Whose fault a refusal is: a trial's values, or a file, server or engine that refuses every trial alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_studies import RATE

from rlft.commands.sweep.checks import Values, checked_configs, corners_of, planned
from rlft.commands.sweep.space import Choice, Space
from rlft.types import UserError

SMALL = ("generation=transformers", "model.device=cpu", "data.size=16", "data.held_out_size=4", "scoring.workers=0")
TOKENS = Choice(key="generation.max_tokens", values=("16", "256"))
PROMPTS = Choice(key="prompts.max_tokens", values=("64", "300"))
BOTH = ["generation.max_tokens=256", "prompts.max_tokens=300"]
"""556 tokens a row, and the model's context has 512: each of the two is accepted with the first of the other."""


def with_recipes(folder: Path, **texts: str) -> Space:
    """A space of recipes with these keys."""
    (folder / "recipe").mkdir()
    for name, text in texts.items():
        (folder / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n# A recipe.\n{text}\n")
    return Space(fixed=SMALL, varied=(Choice(key="+recipe", values=tuple(texts)),))


def test_recipes_of_other_lengths_are_refused_though_they_read_the_same_files(tmp_path: Path) -> None:
    space = with_recipes(tmp_path, one="steps: 2", same="steps: 2\nepochs: 2", longer="steps: 4")
    configs = checked_configs(corners_of(space), space, tmp_path, "train", "accuracy")
    with pytest.raises(UserError, match=r"^recipe: decides how many steps a run has, .*, got 2 and 4 steps; "):
        planned(corners_of(space), configs)


def test_the_loggers_of_every_recipe_must_write_what_trials_are_compared_by(tmp_path: Path) -> None:
    console = "defaults:\n  - override /logger: [console]\n"
    space = with_recipes(tmp_path, one="seed: 1", silent=f"{console}seed: 1")
    with pytest.raises(
        UserError, match=r"^logger: trials are compared by eval.jsonl, .*\+recipe=silent\), got console;"
    ):
        checked_configs(corners_of(space), space, tmp_path, "train", "accuracy")


@pytest.mark.parametrize("word", ["trainer.lr=-1.0", "algorithm.clip_low=-1"])
def test_values_that_the_config_refuses_are_to_blame(word: str) -> None:
    space = Space(fixed=SMALL, varied=(RATE,))
    assert Values(space, None, "train").are_refused([*SMALL, word], word.partition("=")[0])


def test_values_that_contradict_each_other_only_once_the_model_is_read_are_to_blame() -> None:
    values = Values(Space(fixed=SMALL, varied=(TOKENS, PROMPTS)), None, "train")
    assert values.are_refused([*SMALL, *BOTH], "prompts.max_tokens")


def test_a_server_that_does_not_answer_is_no_fault_of_the_values() -> None:
    fixed = (*SMALL, "reward=http", "reward.http.url=http://127.0.0.1:9/score")  # the discard port: nobody listens
    values = Values(Space(fixed=fixed, varied=(TOKENS, PROMPTS)), None, "train")
    assert not values.are_refused([*fixed, "generation.max_tokens=16"], "reward.http.url")


def test_a_file_that_was_there_when_the_study_began_is_no_fault_of_the_values(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    fixed = (*SMALL[:2], "scoring.workers=0", "data=jsonl", f"data.path={data}")
    values = Values(Space(fixed=fixed, varied=(TOKENS,)), None, "train")
    words = [*fixed, "generation.max_tokens=16"]
    assert not values.are_refused(words, "data.path")
    data.write_text("".join(json.dumps({"prompt": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(40)))
    assert not values.are_refused(words, "data.path"), "it is there again, or has changed"


def test_what_is_refused_after_its_plan_is_of_the_values_only_if_a_chosen_key_is_named() -> None:
    values = Values(Space(fixed=SMALL, varied=(TOKENS, PROMPTS)), None, "train")
    words = [*SMALL, "generation.max_tokens=16", "prompts.max_tokens=64"]
    assert values.are_refused(words, "generation.max_tokens")
    assert not any(values.are_refused(words, key) for key in ("generation.engine", "resume", "hydra.run.dir"))
