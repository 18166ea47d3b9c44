"""Endpoints over engines, and agents that play through one."""

import pytest

from rlft.environment.endpoint.agents import Endpoint
from rlft.environment.endpoint.played import AgentGenerator
from tests.environment.endpoint.test_app import QWEN, Served
from tests.environment.endpoint.test_played import LIMITS
from tests.environment.test_conversations import Recorder


@pytest.fixture
def serve(opened):
    def make(generator, tokenizer=QWEN, syntax="template", **limits):
        opened.append(Served(generator, tokenizer, syntax, limits))
        return opened[-1]

    return make


@pytest.fixture
def play(opened):
    """Opens conversations with a scripted policy: `play(["first", ["a", "b"]], agent="endpoint_agents.once")`."""

    def make(answers, traces=None, **keys):
        environment = Endpoint(**{**LIMITS, "agent": None, **keys})
        opened.append(AgentGenerator(Recorder({"*": answers}), environment, QWEN, longest_row=400, traces=traces))
        return opened[-1]

    return make
