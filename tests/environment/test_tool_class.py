"""Classes written for TRL's `environment_factory`, with nothing changed in them."""

import pytest

from rlft.batch import fault
from rlft.environment.tool_class import ToolClass
from rlft.types import EnvironmentFailure
from tests.environment.test_conversations import LIMITS, SAMPLING, call, one, prompt


def made_for_trl(name, **keys):
    made = ToolClass(**{**LIMITS, "reward": "get_reward", **keys}, factory=f"trl_environments.{name}")
    made.check()
    return made


def test_a_class_that_draws_its_own_task_gives_all_siblings_the_same(converse):
    environment = made_for_trl("SelfSampled")
    assert [schema["function"]["name"] for schema in environment.schemas()] == ["count"]
    conversations = converse({"*": [[call("count", step=step), "done"] for step in range(1, 7)]}, environment)
    [group] = conversations.sample([prompt()], 6, [0], SAMPLING)
    assert "Count to " in group.prompt.messages[-1]["content"], "what reset returns is asked"
    # Whatever was drawn, from 1 to 6, exactly one of six siblings who count to 1, 2, .. 6 is right.
    assert sum(r.completion.turns[-1].reward or 0.0 for r in group.rollouts) == 1.0


def test_coroutines_are_run_and_columns_of_the_data_come_to_reset(converse):
    conversations = converse({"*": [[call("count", step=step), "done"] for step in (4, 3)]}, made_for_trl("FromRows"))
    [group] = conversations.sample([prompt(target=4)], 2, [0], SAMPLING)
    assert [fault(r.completion) for r in group.rollouts] == [None, None]
    turns = [r.completion.turns for r in group.rollouts]
    assert [(first.answer, last.reward) for first, last in turns] == [("4", 1.0), ("3", 0.0)]


def test_a_reward_that_an_attribute_holds_is_named_by_a_key(converse):
    said = [call("guess", guess="[crate]"), call("guess", guess="[crane]"), call("guess", guess="[crane]"), "done"]
    conversations = converse({"*": [said]}, made_for_trl("Guesses", reward="reward"))
    completion = one(conversations.sample([prompt()], 1, [0], SAMPLING))
    # c r a n e: of "crate" the t alone is not in the word.
    assert [turn.answer for turn in completion.turns[:2]] == ["GGGXG", "GGGGG"]
    [late] = completion.turns[2].calls
    assert (late.failed, late.answer) == (True, "Error: ValueError: Game over.")
    assert completion.turns[-1].reward == 1.0
    # Without the key the class gives none: TRL's attribute is read by a reward function, which may be another.
    assert not made_for_trl("Guesses").rewards_turns


def test_an_attribute_that_is_not_there_is_told(converse):
    conversations = converse({"*": [["done"]]}, made_for_trl("Guesses", reward="points"))
    with pytest.raises(EnvironmentFailure, match=r"cannot say the reward of prompt .*no attribute 'points'"):
        conversations.sample([prompt()], 1, [0], SAMPLING)
