"""What is refused of a study before its first trial, and what refuses every trial alike once it has begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlft.commands.sweep.checks import check_possible, checked_configs, corners_of, planned
from rlft.commands.sweep.space import Choice, Space
from rlft.types import UserError

SMALL = ("generation=transformers", "model.device=cpu", "data.size=16", "data.held_out_size=4", "scoring.workers=0")
TOKENS = Choice(key="generation.max_tokens", values=("16", "256"))
PROMPTS = Choice(key="prompts.max_tokens", values=("64", "300"))


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


def test_a_study_stays_possible_whatever_its_other_values_are() -> None:
    """Each of the two is accepted with the first of the other, and both together are refused."""
    check_possible(Space(fixed=SMALL, varied=(TOKENS, PROMPTS)), None, "train")


def test_a_server_that_does_not_answer_refuses_every_trial() -> None:
    fixed = (*SMALL, "reward=http", "reward.http.url=http://127.0.0.1:9/score")  # the discard port: nobody listens
    with pytest.raises(UserError, match=r"^reward\.http\.url: "):
        check_possible(Space(fixed=fixed, varied=(TOKENS, PROMPTS)), None, "train")


def test_a_file_that_is_gone_refuses_every_trial_and_one_that_is_back_none(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    fixed = (*SMALL[:2], "scoring.workers=0", "data=jsonl", f"data.path={data}")
    space = Space(fixed=fixed, varied=(TOKENS,))
    with pytest.raises(UserError, match=r"^data\.path: "):
        check_possible(space, None, "train")
    data.write_text("".join(json.dumps({"prompt": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(40)))
    check_possible(space, None, "train")
