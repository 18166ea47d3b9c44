"""`rlft plan` tries an environment once, and `rlft chat` uses a run's tools and shows its calls."""

import io
import sys

import pytest
from slow_cases import slow_but

from rlft.commands import chat
from rlft.config.compose import compose
from rlft.environment.endpoint.agents import Endpoint
from rlft.environment.game import Game
from rlft.environment.tool_class import ToolClass
from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import TransformersGenerator
from rlft.plan.prediction import try_environment
from tests.environment.test_conversations import LIMITS, TOKENIZER, prompt, tools

BARE = ["model.path=embedded:tiny-arithmetic", "model.device=cpu", "generation.max_tokens=200", "scoring.workers=0"]


@pytest.mark.parametrize("syntax", slow_but("template", ["template", "json", "xml"]))
def test_a_plan_shows_a_call_and_its_answer_as_the_policy_will_read_them(syntax):
    environment = ToolClass(**{**LIMITS, "syntax": syntax}, factory="conversation_tools.Counter", reward="get_reward")
    tried = try_environment(environment, TOKENIZER, prompt(start=40))
    assert tried.error is None
    # `draw` is the class's first tool by name: it takes nothing and answers a number below 1.
    [(said, answer), (last, nothing)] = tried.said
    assert "draw" in said
    assert 0 < float(answer) < 1
    assert (last, nothing, tried.finish) == ("done", "", "stop")
    assert tried.opening == "It stands at 40."
    assert tried.reward == 40.0
    assert tried.failed == []


def test_a_plan_names_an_environment_that_cannot_begin():
    environment = ToolClass(**LIMITS, factory="conversation_tools.Counter", reward="get_reward")
    tried = try_environment(environment, TOKENIZER, prompt(start="none"))
    assert "cannot begin a conversation of prompt 'p'" in tried.error


def test_a_plan_plays_a_game_and_makes_arguments_up():
    game = Game(**LIMITS, factory="conversation_tools.Guessing", arguments={})
    tried = try_environment(game, TOKENIZER, prompt())
    assert tried.said == [("done", "high"), ("done", "")]
    assert tried.reward == 0.25
    added = try_environment(tools("conversation_tools.add"), TOKENIZER, prompt())
    assert added.said[0][1] == "2", "1 + 1"


def test_a_plan_has_an_agent_play_once_and_a_chat_has_none():
    keys = {**LIMITS, "port": 0, "body_bytes": 10_000, "command": None}
    tried = try_environment(Endpoint(**keys, agent="endpoint_agents.talks"), TOKENIZER, prompt())
    assert [said for said, _ in tried.said] == ["done", "done"]
    assert (tried.reward, tried.failed, tried.error) == (2.0, [], None)
    failing = try_environment(Endpoint(**keys, agent="endpoint_agents.misbehaves"), TOKENIZER, prompt(how="raise"))
    assert failing.failed == ["raised"]
    mute = try_environment(Endpoint(**keys, agent="endpoint_agents.misbehaves"), TOKENIZER, prompt(how="mute"))
    assert "none of 1 agents has asked the policy anything" in mute.error
    words = ["environment=endpoint", "environment.agent=endpoint_agents.talks"]
    assert chat.read(compose([*BARE, *words]), raw=True).parts is None


@pytest.fixture
def chat_of(monkeypatch, capsys):
    """(what a chat prints, the prompts of a policy) that says these texts in turn, and is asked these questions."""

    def chat_of(script, asks, *words):
        asked = []

        def sample(self, prompts, *rest):
            asked.extend(prompts)
            return ScriptedGenerator({"*": [script]}, self.tokenizer).sample(prompts, *rest)

        monkeypatch.setattr(TransformersGenerator, "sample", sample)
        monkeypatch.setattr(sys, "stdin", io.StringIO(asks))
        words = (*BARE, "environment=calculator", "environment.show_tools=false", *words)
        chat.run(chat.read(compose(words), False), None, False, lambda _: None)
        return capsys.readouterr().out.splitlines(), asked

    return chat_of


def test_a_chat_shows_calls_and_answers_and_keeps_them_in_its_history(chat_of):
    said = '<call tool="calculate"><expression>12*12</expression></call>'
    lines, asked = chat_of([said, "It is 144."], "12 * 12?\nAgain?\n", "environment.syntax=xml")
    shown = [said, "  calculate(<expression>12*12</expression>)", "  -> 144", "It is 144."]
    assert lines[:4] == lines[5:9] == shown
    assert lines[4].startswith("[")
    history = [(m["role"], m["content"]) for m in asked[2].messages]
    assert history == [
        ("user", "12 * 12?"), ("assistant", said), ("user", "144"), ("assistant", "It is 144."), ("user", "Again?"),
    ]  # fmt: skip


def test_limits_of_a_conversation_are_named_in_a_chat(chat_of):
    call = '{"name": "calculate", "arguments": {"expression": "1"}}'
    lines, _ = chat_of([call, call], "1?\n", "environment.syntax=json", "environment.max_turns=2")
    assert any("(cut: environment.max_turns)" in line for line in lines)
