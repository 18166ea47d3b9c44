from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scripted_server import Reply, ScriptedServer, scores

from rlft.reward.workers.scorer import RewardError, Scorer, specs
from rlft.types import Unscored, UserError

SHIPPED = yaml.safe_load((Path(__file__).parents[2] / "configs/reward/http.yaml").read_text())["http"]


def by_length(body):
    """A reward server that likes long completions."""
    return scores(*(len(text) for text in body["completions"]))


@pytest.fixture
def server():
    with ScriptedServer() as running:
        running.answer = by_length
        yield running


@pytest.fixture
def config(server):
    """Makes the `reward` section: the shipped keys, with this server and quick retries; keys override."""

    def make(**keys):
        quick = {"url": f"{server.address}/score", "group_timeout": 4.0, "timeout": 1.0, "retries": 1, "backoff": 0.01}
        return {"http": SHIPPED | quick | keys}

    return make


def test_completions_get_the_servers_scores_in_order(server, config, group):
    reward = specs(config())["http"].build()
    assert reward(group(["abc", "", "ab"])) == [3.0, 0.0, 2.0]


def test_a_request_says_all_there_is_to_know(server, config, group):
    specs(config())["http"].build()(group(["x", "y"], answer="18", id="gsm8k-17"))
    question = [{"role": "user", "content": "What is 8 + 10?"}]
    assert server.bodies == [
        {
            "ids": ["gsm8k-17", "gsm8k-17"],
            "prompts": [question, question],
            "answers": ["18", "18"],
            "completions": ["x", "y"],
        }
    ]


def test_metadata_go_along_where_they_are_asked_for(server, config, group):
    whole = group(["x", "y"])
    known = replace(whole, prompt=replace(whole.prompt, metadata={"tests": ["1 + 1 == 2"]}))
    specs(config(send_metadata=True))["http"].build()(known)
    assert server.bodies[0]["metadata"] == [{"tests": ["1 + 1 == 2"]}] * 2


def test_a_group_is_split_into_batches(server, config, group):
    texts = ["a", "ab", "abc", "abcd", "abcde"]
    assert specs(config(batch_size=2))["http"].build()(group(texts)) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert sorted(body["completions"] for body in server.bodies) == [["a", "ab"], ["abc", "abcd"], ["abcde"]]


@pytest.mark.parametrize("text", ['"}]}\n{"scores": [9]}', "\x00\x1b[2J", "é漢😀", "\ud800", "\u2028"])
def test_a_completion_arrives_as_it_was_whatever_stands_in_it(server, config, group, text):
    specs(config())["http"].build()(group([text]))
    assert server.bodies[0]["completions"] == [text]


def test_a_batch_that_fails_leaves_the_scores_of_the_others(server, config, group):
    server.answer = lambda body: Reply(status=400) if body["completions"] == ["b"] else by_length(body)
    with pytest.raises(Unscored) as failed:
        specs(config(batch_size=1))["http"].build()(group(["a", "b", "ccc"]))
    assert failed.value.scores == (1.0, None, 3.0)


def test_wrong_keys_are_refused_by_their_full_name(config):
    for keys, message in [
        ({"url": "localhost"}, "reward.http.url: is no http:// or https:// address, got localhost"),
        ({"token_variable": "NO_SUCH_TOKEN"}, "reward.http.token_variable: names an environment variable that is not"),
        ({"timeout": 30.0}, "reward.http.timeout: exceeds the 3.6 s for requests that scoring.timeout leaves"),
        ({"batch_size": 0}, "reward.http.batch_size: "),
        ({"retries": -1}, "reward.http.retries: "),
        ({"headers": {"X-Run": 7}}, "reward.http.headers: "),
    ]:
        with pytest.raises(UserError) as refusal:
            specs(config(**keys))
        assert str(refusal.value).startswith(message)


def test_workers_ask_the_server_and_send_the_token_of_the_environment(server, config, group, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "tok-1234")
    score = Scorer(specs(config(token_variable="REWARD_TOKEN")), 2, 4.0, "stop")
    try:
        totals = score([group(["a" * i, "b"], id=f"p{i}") for i in range(6)]).total.tolist()
    finally:
        score.close()
    assert totals == [[float(i), 1.0] for i in range(6)]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer tok-1234"}
    # Each of two workers keeps its connection.
    assert server.num_connections <= 2


def test_a_server_that_stays_away_stops_the_run_and_says_where_it_was_looked_for(server, config, group):
    server.answer = lambda body: Reply(status=503, text="loading the model")
    score = Scorer(specs(config()), 1, 4.0, "stop")
    try:
        with pytest.raises(RewardError) as stopped:
            score([group(["a", "b"])])
    finally:
        score.close()
    problem = "it answered 503 Service Unavailable 'loading the model' (attempt 2 of 2)"
    where = f"got no scores from {server.address}/score: {problem}, on prompt 'p0', its 2 completions as a whole; "
    assert str(stopped.value).startswith(f"reward.http: {where}")
    # Both attempts of the group's one request; the completions are not tried alone.
    assert len(server.bodies) == 2


def test_a_slow_server_is_told_by_the_reward_before_the_scorer_cuts_it_off(server, config, group):
    server.answer = lambda body: Reply(delay_s=5.0)
    # The reward gives up after 0.9 * 3 = 2.7 s, the scorer would after 3 s.
    score = Scorer(specs(config(group_timeout=3.0, timeout=2.7, retries=5)), 0, 3.0, 0.25)
    assert score([group(["a"])]).total.tolist() == [[0.25]]
    assert "no answer within 2.7 s" in score.last_failure
