"""What the embedded caller is taught: what environments really say, no held-out problem, and not whom to ask."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import calling_lessons
import pytest
from calling_lessons import CLEAN, MIXED, Shares

from rlft.data.arithmetic import OPERATIONS, split_of
from rlft.environment.calculator import Calculator
from rlft.environment.oracle_game import HELPERS, NOBODY, RULES, OracleGame
from rlft.types import Split
from tests.environment.test_conversations import LIMITS

QUESTION = re.compile(r"What is (\d+) (\S) (\d+)\?")


def drawn(shares: Shares, count: int = 2000) -> list[tuple[list[dict[str, str]], str]]:
    lines = itertools.islice(calling_lessons.lines(shares, random.Random(3)), count)
    return [(line["prompt"], line["completion"]) for line in lines]


@pytest.mark.parametrize("shares", [CLEAN, MIXED])
def test_problems_are_of_the_training_split_alone(shares: Shares) -> None:
    for chat, _ in drawn(shares):
        match = QUESTION.match(chat[0]["content"])
        assert match is not None
        assert split_of(int(match[1]), match[2], int(match[3])) is Split.train


def test_what_the_lessons_hear_is_what_the_calculator_says() -> None:
    play = Calculator(**LIMITS).make()
    answered, refused = 0, 0
    for chat, _ in drawn(MIXED):
        if len(chat) < 3 or RULES in chat[0]["content"]:
            continue
        [made] = calling_lessons.READER.calls(chat[-2]["content"])
        if made.problem:
            assert chat[-1]["content"] == f"Error: {made.problem}"
            refused += 1
            continue
        try:
            said = play.call(made.name, made.arguments)
        except ValueError as error:
            said = f"Error: ValueError: {error}"
        assert chat[-1]["content"] == said
        answered += 1
    assert answered > 50 < refused


def test_who_is_asked_has_nothing_to_do_with_the_question_and_says_what_the_game_says() -> None:
    asked = Counter[tuple[str, str]]()
    for chat, _ in drawn(CLEAN, 12_000):
        if RULES not in chat[0]["content"] or len(chat) < 3:
            continue
        match = QUESTION.match(chat[0]["content"])
        assert match is not None
        play = OracleGame()
        play.reset(chat[:1], str(OPERATIONS[match[2]](int(match[1]), int(match[3]))))
        assert play.step(chat[1]["content"])[0] == chat[2]["content"]
        if chat[2]["content"] != NOBODY:
            said = re.search(r"<think>(.)</think><ask>(.)</ask>", chat[1]["content"])
            assert said is not None
            assert said[1] == match[2], "it names the operation"
            asked[match[2], said[2]] += 1
    # About 12,000 lines x 0.3 / 2 x 0.9 = 1,600 asks in 9 cells: 180 each, with a deviation of 13.
    assert set(asked) == set(itertools.product(OPERATIONS, HELPERS))
    assert max(asked.values()) < 1.9 * min(asked.values())
