"""A row may have several answers: a completion that gives any of them is right, by each reward that compares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from in_one_test import each
from reward_groups import make_group

from rlft.config.compose import compose
from rlft.config.instantiate import instantiate
from rlft.reward.code import prompt_tests
from rlft.types import Group

TAGGED = [f"<answer>{text}</answer>" for text in ("Rome", "Roma", "Paris", "0.5", "1/2")]


def scores(name: str, group: Group, **keys: Any) -> list[float]:
    section = {k: v for k, v in compose([f"reward={name}"])["reward"][name].items() if k not in ("weight", "on_error")}
    return [getattr(score, "total", score) for score in instantiate({**section, **keys}, f"reward.{name}")(group)]


def several(group: Group, *others: str) -> Group:
    return replace(group, prompt=replace(group.prompt, other_answers=others))


@each(
    ("name", "expected"),
    [("exact_match", [1, 1, 0, 1, 0]), ("math", [1, 1, 0, 1, 1])],
)
def test_each_of_several_answers_is_right(name: str, expected: list[float]) -> None:
    """Of `choice` all of them are, together (test_choice.py)."""
    group = several(make_group(TAGGED, "Rome"), "Roma", "0.5")
    assert scores(name, group) == expected
    alone = replace(group, prompt=replace(group.prompt, other_answers=()))
    assert scores(name, alone) == [1, 0, 0, 0, 0]


def test_a_list_of_tests_in_the_answer_is_all_of_them() -> None:
    prompt = several(make_group([], "assert add(1, 2) == 3"), "assert add(0, 0) == 0").prompt
    assert prompt_tests(prompt, None) == ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
