"""Conversations of scripted policies; whatever tests open here ends beside the tests that follow it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlft.environment.conversations import Conversations
from tests.environment.test_conversations import TOKENIZER, Recorder


@pytest.fixture(scope="module")
def ends():
    """Ends what is given to it, which nobody uses any more: the end of a server takes a fifth of a second."""
    with ThreadPoolExecutor() as threads:
        ending = []
        yield lambda one: ending.append(threads.submit(one.close))
    for end in ending:
        end.result()


@pytest.fixture
def opened(ends):
    """What a test has opened, to be ended after it."""
    opened = []
    yield opened
    for one in opened:
        ends(one)


@pytest.fixture
def converse(opened):
    """Opens conversations of a scripted policy: `converse({"*": [["call", "answer"]]}, environment)`."""

    def make(answers, environment, at_once=None, tokenizer=TOKENIZER):
        policy = Recorder(answers, tokenizer)
        opened.append(Conversations(policy, environment, tokenizer, at_once=at_once, longest_row=1200))
        return opened[-1]

    return make
