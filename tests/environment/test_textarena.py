"""Games of the real TextArena library."""

import random
from dataclasses import replace

import pytest
from slow_cases import slow

from rlft.environment.textarena import Match, TextArena
from rlft.types import UserError
from tests.environment.test_conversations import LIMITS


def arena(game="GuessTheNumber-v0", **keys):
    return TextArena(**{**LIMITS, "game": game, "arguments": {}, "opponents": [], "player": 0, **keys})


def test_the_policy_reads_what_is_new_and_the_last_answer_has_the_games_reward():
    match = arena().make()
    assert isinstance(match, Match)
    opening = match.reset({"seed": 3}, 7)
    assert opening.startswith("[GAME] You are Player 0. You are playing Guess The Number.")
    rng = random.Random(3)
    number = rng.randint(1, 20)  # how the game draws it
    wrong = 1 if number > 1 else 2
    step = match.step(f"I say [{wrong}]")
    hint = "higher" if wrong < number else "lower"
    assert (step.observation, step.reward, step.done) == (f"[GAME] The target number is {hint}.", None, False)
    step = match.step(f"[{number}]")
    assert (step.observation, step.reward, step.done) == ("Congratulations! You guessed the correct number.", 1.0, True)


def test_siblings_play_the_same_game_and_a_row_may_name_its_own():
    def numbers(row, seed):
        match = arena(arguments={"max_number": 10**6}).make()
        match.reset(row, seed)
        return match._rules.game_number

    assert numbers({}, 5) == numbers({}, 5) == numbers({"seed": 5}, 9) != numbers({}, 6)


@pytest.mark.parametrize("player", [0, 1])
def test_an_opponent_moves_between_the_policys_turns(player):
    match = arena("TicTacToe-v0", opponents=["conversation_tools.Remembers"], player=player).make()
    text = match.reset({}, 0)
    assert f"You are Player {player} in Tic Tac Toe" in text
    assert ("[Player" in text) == bool(player), "player 0 has moved before player 1 is asked"
    # The opponent fills cells from the first on, and so has won before the policy, which fills them from the last.
    for _ in range(5):
        free = text.rsplit("Available Moves: ", 1)[1].split("'")[1::2]
        step = match.step(free[-1])
        assert f"[Player {player}]" not in step.observation.replace("As Player", ""), "its own moves it has said itself"
        if step.done:
            break
        text = step.observation
    assert step.done
    assert step.reward in (-1.0, 0.0, 1.0)
    assert step.observation


def test_a_game_that_an_opponent_ends_before_the_first_turn_is_over_with_it(monkeypatch):
    match = arena("TicTacToe-v0", opponents=["conversation_tools.gives_up"], player=1).make()
    assert match.reset({}, 0) == "", "two invalid moves in a row lose the game"
    monkeypatch.setattr(match._game, "step", lambda action: pytest.fail("a game that is over is not played on"))
    step = match.step("[0]")
    assert (step.reward, step.done) == (1.0, True)


def test_what_the_game_says_of_the_policys_own_moves_is_shown():
    match = arena("IteratedRockPaperScissors-v0", opponents=["conversation_tools.plays_rock"]).make()
    match.reset({}, 0)
    step = match.step("I take [paper]")
    own, result = "[Player 0] Player 0 selects move paper.", "[GAME] Round result: Player 0 wins!"
    assert step.observation == f"{own}\n{result}"


def test_an_invalid_move_is_answered_and_a_second_one_ends_the_game():
    match = arena().make()
    match.reset({}, 0)
    first, second = match.step("nothing"), match.step("nothing")
    assert "Invalid move format" in first.observation
    assert not first.done
    assert second.done
    assert second.reward == 0.0  # GuessTheNumber pays for how near the last guess was, and there was none


# -- refused -----------------------------------------------------------------------------------------------------------
def test_a_game_that_begins_is_not_refused():
    arena("TicTacToe-v0", opponents=["conversation_tools.first_free_cell"]).check()


@pytest.mark.parametrize(("keys", "problem"), [
    ({"game": "GuessTheNumbers-v0"}, r"game: is none of TextArena's \d+ games, got GuessTheNumbers-v0; "),
    slow({"game": "TicTacToe-v0"}, r"game: does not begin with 1 players \(Error: AssertionError: The number"),
    slow({"arguments": {"sides": 6}}, r"game: does not begin with 1 players \(Error: TypeError: .*sides"),
    ({"opponents": ["math.pi"]}, "opponents: is not callable, got math"),
    ({"opponents": ["no.such"]}, "opponents: "),
    ({"player": 1}, r"player: is beyond the game's last player \(0\): .*, got 1; lower it, or name"),
])  # fmt: skip
def test_what_cannot_be_played_is_refused(keys, problem):
    with pytest.raises(UserError, match=rf"environment.{problem}"):
        arena(**keys).check()


def test_a_game_whose_beginning_hangs_is_refused_in_time(monkeypatch):
    hanging = replace(arena(opponents=["conversation_tools.sleeps"], player=1, game="TicTacToe-v0"), call_timeout=0.5)
    with pytest.raises(UserError, match=r"does not begin with 2 players \(Error: no answer within 0.5 s\)"):
        hanging.check()


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"library is not installed, got textarena; .*pip install .*'rlft\[textarena"):
        arena().check()
