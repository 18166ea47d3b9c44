"""`rlft serve`: what was trained answers until a signal, and bad keys are refused before a weight is loaded."""

import os
import re
import signal
import socket
import time

import httpx2
import pytest

from rlft.commands import chat, serve
from rlft.runs import checkpoint
from rlft.runs.find import find
from rlft.types import Prompt

MODEL = "model.path=embedded:tiny-arithmetic"
ASKED = [{"role": "user", "content": "12 + 30"}]


def addressed(started, seconds=60):
    """(URL, key) that a server says at its start, for which it has so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if said := re.search(r"OPENAI_BASE_URL=(\S+)(?: OPENAI_API_KEY=(\S+))?\n", started.err.read_text()):
            return said[1], said[2]
        time.sleep(0.05)
    raise AssertionError(started.err.read_text())


def test_a_run_is_served_as_it_was_trained_until_a_signal_ends_it(forks, trained, tmp_path):
    """Token by token and log-prob by log-prob what a chat with the run says to the same seed."""
    started = forks.start("serve", f"run={trained}", "serve.port=0", "serve.name=mine", cwd=tmp_path)
    url, key = addressed(started)
    assert url.startswith("http://127.0.0.1:")
    assert len(key) == 32  # 24 random bytes
    wish = {"seed": 5, "return_token_ids": True, "logprobs": True}
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx2.post(f"{url}/chat/completions", json={"messages": ASKED, **wish}, headers=headers, timeout=60).json()
    assert reply["model"] == "mine"
    policy_says = said_by(trained)
    [choice] = reply["choices"]
    assert choice["token_ids"] == list(policy_says.token_ids)
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == list(policy_says.logprobs)
    other = said_by(trained, checkpoint.finished(trained / "checkpoints")[0])
    assert list(other.logprobs) != list(policy_says.logprobs)  # so that it is known to be the newest checkpoint's
    started_at = time.monotonic()
    os.kill(started.pid, signal.SIGTERM)
    ended = started.wait()
    assert ended.code == 130
    assert ended.err.endswith("\nrlft: interrupted: the server has ended\n")
    assert time.monotonic() - started_at < 60


def said_by(run, folder=None):
    """What the policy of a checkpoint says by the engine that chats have."""
    place = find(folder or run)
    with chat.open_talk(chat.read(place.config, True), place, True, lambda _: None) as talk:
        ids = talk.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
        prompt = Prompt(id="p", messages=tuple(ASKED), answer="", token_ids=tuple(ids))
        [group] = talk._policy.sample([prompt], 1, [5], talk.sampling)
    return group.rollouts[0].completion


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_an_address_that_it_cannot_have_is_refused_before_a_weight_is_loaded(taken, ran, monkeypatch):
    monkeypatch.setattr(serve, "opened", lambda *_: pytest.fail("nothing is opened"))
    for words, message in {
        (MODEL, f"serve.port={taken}"): f"serve.port: is in use by another process, got {taken}; end that, or choose",
        (MODEL, "serve.host=203.0.113.1"): "serve.host: is no address of this machine",
    }.items():
        assert message in ran(["serve", *words], ends=2).err
