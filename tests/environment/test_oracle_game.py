from collections import Counter

import pytest
from in_one_test import each

from rlft.data.arithmetic import Arithmetic
from rlft.environment.oracle_game import HELPERS, NOBODY, OracleGame
from rlft.types import Split

ROW = {"prompt": [{"role": "user", "content": "What is 812 - 345?"}], "answer": "467", "id": "812-345"}


def game() -> OracleGame:
    started = OracleGame()
    assert "A, B or C" in started.reset(**ROW)
    return started


# 812 + 345 = 1157, 812 - 345 = 467, 812 * 345 = 280140.
@pytest.mark.parametrize(("name", "says"), [("A", "1157"), ("B", "467"), ("C", "280140")])
def test_each_helper_does_the_same_whatever_the_question_and_the_answer_alone_is_rewarded(name: str, says: str) -> None:
    play = game()
    assert play.step(f"<ask>{name}</ask>") == (says, None, False)
    assert play.step(f"<answer>{says}</answer>") == ("", float(says == "467"), True)


@each("said", ["A", "<ask>D</ask>", "<ask>AB</ask>", "", "<ask>A"])
def test_who_asks_nobody_hears_nothing_and_still_answers(said: str) -> None:
    play = game()
    assert play.step(said) == (NOBODY, None, False)
    assert play.step("<answer>467</answer>") == ("", 1.0, True)


def test_an_answer_at_once_ends_the_game_and_so_does_a_second_turn_without_one() -> None:
    assert game().step("<answer>467</answer>") == ("", 1.0, True)
    assert game().step("<ask>B</ask><answer>1</answer>") == ("", 0.0, True)
    play = game()
    play.step("<ask>B</ask>")
    assert play.step("467") == ("", 0.0, True)


def test_whoever_asks_at_random_is_right_in_a_third_of_the_games() -> None:
    data = Arithmetic(difficulty=3, operations=["+", "-", "*"], size=600, held_out_size=1, seed=0)
    right = Counter[str]()
    prompts = data.load(Split.train)
    for prompt in prompts:
        for name in HELPERS:
            play = OracleGame()
            play.reset([dict(message) for message in prompt.messages], prompt.answer)
            heard, _, _ = play.step(f"<ask>{name}</ask>")
            right[name] += play.step(f"<answer>{heard}</answer>")[1] == 1.0
    # One helper is right for each question (numbers of three digits: no two operations agree), and each for a third.
    assert sum(right.values()) == len(prompts)
    assert all(0.28 * len(prompts) < count < 0.39 * len(prompts) for count in right.values())


def test_another_question_is_refused() -> None:
    with pytest.raises(ValueError, match="use data=arithmetic"):
        OracleGame().reset(prompt=[{"role": "user", "content": "Who is it?"}], answer="1")
