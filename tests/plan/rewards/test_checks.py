"""A server that scores is asked once before a run, and one that gives no score is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from scripted_server import Reply, ScriptedServer, chat, rated, scores

from rlft.config.compose import compose
from rlft.plan.rewards.references import check_servers
from rlft.reward.workers.reward_spec import specs
from rlft.types import Prompt, UserError

ONE = Prompt(id="p", messages=({"role": "user", "content": "1 + 1?"},), answer="2")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def asked(name: str, url: str, *overrides: str) -> None:
    words = [
        f"reward=[{name}]",
        f"reward.{name}.url={url}/chat/completions",
        *(f"reward.{name}.{key}" for key in overrides),
    ]
    check_servers(specs(compose(words)["reward"]), ONE)


@pytest.mark.parametrize(("name", "reply"), [("http", scores(1.0)), ("judge", rated(7))])
def test_a_server_that_scores_is_asked_once(name: str, reply: Reply, server: ScriptedServer) -> None:
    server.script = [reply]
    asked(name, server.address)
    assert len(server.bodies) == 1
    assert "2" in json.dumps(server.bodies[0])


@pytest.mark.parametrize(
    ("name", "reply", "problem"),
    [
        ("http", Reply(status=401, text="no such key"), "401"),
        ("http", Reply(status=503, text="busy"), "503"),
        ("http", Reply(delay_s=5.0), "no answer within 0.2 s"),
        ("judge", chat("it is good"), "the judge's reply is not JSON"),
    ],
)
def test_a_server_that_gives_no_score_is_refused_by_its_key(
    name: str, reply: Reply, problem: str, server: ScriptedServer
) -> None:
    server.script = [reply]
    with pytest.raises(UserError) as refused:
        asked(name, server.address, "timeout=0.2" if reply.delay_s else "retries=3")
    assert str(refused.value).startswith(
        f"reward.{name}.url: was asked for one score before the start, and got no score"
    )
    assert problem in refused.value.problem
    assert f"reward.{name}.try_first=false" in refused.value.remedy
    assert len(server.bodies) == 1, "no further attempts"


def test_a_server_that_is_away_is_refused_or_left_for_later() -> None:
    away = "http://127.0.0.1:9"
    with pytest.raises(
        UserError, match=r"^reward.http.url: was asked .* got http://127.0.0.1:9/chat/completions; start"
    ):
        asked("http", away)
    asked("http", away, "try_first=false")
