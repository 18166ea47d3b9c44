from collections import Counter

import pytest
from in_one_test import each

from rlft.data.arithmetic import Arithmetic
from rlft.environment.oracle_game import HELPERS, NOBODY, OracleGame
from rlft.types import Split

ROW = {"prompt": [{"role": "user", "content": "What is 812 - 345?"}], "answer": "467", "id": "812-345"}


# 812 + 345 = 1157, 812 - 345 = 467, 812 * 345 = 280140: each helper does the same, whatever the question.
GAMES = [
    *(
        [(f"<ask>{name}</ask>", (says, None, False)), (f"<answer>{says}</answer>", ("", reward, True))]
        for name, says, reward in (("A", "1157", 0.0), ("B", "467", 1.0), ("C", "280140", 0.0))
    ),
    *(
        [(asked, (NOBODY, None, False)), ("<answer>467</answer>", ("", 1.0, True))]
        for asked in ("A", "<ask>D</ask>", "<ask>AB</ask>", "", "<ask>A")
    ),
    [("<answer>467</answer>", ("", 1.0, True))],
    [("<ask>B</ask><answer>1</answer>", ("", 0.0, True))],
    [("<ask>B</ask>", ("467", None, False)), ("467", ("", 0.0, True))],  # the second turn is the last
]
"""[[(what the policy says, what it gets)] of each game]."""


@each("turns", GAMES)
def test_who_asks_a_helper_hears_it_and_the_answer_alone_is_rewarded(turns):
    play = OracleGame()
    assert "A, B or C" in play.reset(**ROW)
    for said, got in turns:
        assert play.step(said) == got


def test_whoever_asks_at_random_is_right_in_a_third_of_the_games():
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


def test_another_question_is_refused():
    with pytest.raises(ValueError, match="use data=arithmetic"):
        OracleGame().reset(prompt=[{"role": "user", "content": "Who is it?"}], answer="1")
