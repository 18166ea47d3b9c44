"""How servers are asked: requests, retries, time limits, tokens, and what is refused before a run starts."""

import logging
import socket
import time
from contextlib import closing
from dataclasses import fields, replace

import pytest
from in_one_test import each
from scripted_server import Reply, scores

from rlft.reward.http import Http, Request, scores_in
from rlft.reward.workers.scorer import RewardError, Scorer, specs
from rlft.types import Unscored, UserError


@pytest.fixture
def config(server, asking):
    """Makes the `reward` section; the server likes long completions."""
    server.answer = lambda body: scores(*(len(text) for text in body["completions"]))
    return lambda **keys: asking("http", **keys)


def test_a_request_says_all_there_is_to_know_with_metadata_where_they_are_asked_for(server, config, group):
    whole = group(["x", "y"], answer="18", id="gsm8k-17")
    known = replace(whole, prompt=replace(whole.prompt, metadata={"tests": ["1 + 1 == 2"]}))
    for more in ({}, {"send_metadata": True}):
        specs(config(**more))["http"].build()(known)
    question = [{"role": "user", "content": "What is 8 + 10?"}]
    said = {"ids": ["gsm8k-17"] * 2, "prompts": [question] * 2, "answers": ["18"] * 2, "completions": ["x", "y"]}
    assert server.bodies == [said, said | {"metadata": [{"tests": ["1 + 1 == 2"]}] * 2}]


def test_a_group_is_split_into_batches(server, config, group):
    texts = ["a", "ab", "abc", "abcd", "abcde"]
    assert specs(config(batch_size=2))["http"].build()(group(texts)) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert sorted(body["completions"] for body in server.bodies) == [["a", "ab"], ["abc", "abcd"], ["abcde"]]


def test_a_completion_arrives_as_it_was_whatever_stands_in_it(server, config, group):
    texts = ['"}]}\n{"scores": [9]}', "\x00\x1b[2J", "é漢😀", "\ud800", "\u2028"]
    specs(config())["http"].build()(group(texts))
    assert server.bodies[0]["completions"] == texts


def test_workers_ask_the_server_and_send_the_token_of_the_environment(server, config, group, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "tok-1234")
    with closing(Scorer(specs(config(token_variable="REWARD_TOKEN")), 2, 4.0, "stop")) as score:
        totals = score([group(["a" * i, "b"], id=f"p{i}") for i in range(6)]).total.tolist()
    assert totals == [[float(i), 1.0] for i in range(6)]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer tok-1234"}
    # Each of two workers keeps its connection.
    assert server.num_connections <= 2


def test_a_server_that_stays_away_stops_the_run_and_says_where_it_was_looked_for(server, config, group):
    server.answer = lambda body: Reply(status=503, text="loading the model")
    with pytest.raises(RewardError) as stopped:
        Scorer(specs(config()), 0, 4.0, "stop")([group(["a", "b"])])
    problem = "it answered 503 Service Unavailable 'loading the model' (attempt 2 of 2)"
    where = f"got no scores from {server.address}/score: {problem}, on prompt 'p0', its 2 completions as a whole; "
    assert str(stopped.value).startswith(f"reward.http: {where}")
    # Both attempts of the group's one request; the completions are not tried alone.
    assert len(server.bodies) == 2


def test_a_slow_server_is_told_by_the_reward_before_the_scorer_cuts_it_off(server, config, group):
    server.answer = lambda body: Reply(delay_s=5.0)
    # The reward gives up after 0.9 * 2 = 1.8 s, the scorer would after 2 s.
    score = Scorer(specs(config(group_timeout=2.0, timeout=1.8, retries=5)), 0, 2.0, 0.25)
    assert score([group(["a"])]).total.tolist() == [[0.25]]
    assert "no answer within 1.8 s" in score.last_failure


# -- attempts and refusals ---------------------------------------------------------------------------------------------
BUSY = Reply(status=503, text="busy")
KEYS = {field.name for field in fields(Http)}


@pytest.fixture
def make(server, asking):
    """Makes the reward, which tries twice again; each request is of one completion that gets 1."""
    server.answer = lambda body: scores(1.0)

    def build(**keys):
        section = asking("http", **{"retries": 2} | keys)["http"]
        return Http(**{name: value for name, value in section.items() if name in KEYS})

    return build


def ask(keys, num_requests=1):
    """The scores of so many completions, each asked about in a request of its own."""
    return keys.ask([Request(body={"number": i}, completions=[i]) for i in range(num_requests)], scores_in)


def failure(keys, num_requests=1):
    with pytest.raises(Unscored) as failed:
        ask(keys, num_requests)
    return failed.value


TROUBLES = {
    "500": Reply(status=500, text="out of memory"), "503": BUSY, "429": Reply(status=429), "408": Reply(status=408),
    "hangs up": Reply(hangs_up=True), "cut short": scores(1.0, headers={"Content-Length": "90"}, drops=True),
    "no JSON": Reply(text="<html>"), "wrong number": scores(),
}  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=list(TROUBLES))
def test_a_passing_trouble_is_gone_at_the_next_attempt(server, make, trouble):
    server.script = [trouble]
    assert ask(make()) == [1.0]
    assert len(server.bodies) == 2


@each("status", [400, 401, 404, 307])
def test_an_answer_that_will_not_change_is_not_asked_for_again(server, make, status):
    server.paths.clear()
    server.answer = lambda body: Reply(status=status, text="no", headers={"Location": "/elsewhere"})
    assert f"it answered {status} " in str(failure(make()))
    assert server.paths == ["/score"]


def test_pauses_double(server, make):
    server.answer = lambda body: BUSY
    failure(make(retries=3, backoff=0.2))
    pauses = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    # 0.2, 0.4, 0.8 s, of which a random half may be left out; the machine may add to them.
    assert [pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True)] == [True] * 3
    assert sum(pauses) < 1.4 + 0.6


def test_retry_after_is_obeyed(server, make):
    server.script = [Reply(status=429, headers={"Retry-After": "1"})]
    assert ask(make()) == [1.0]
    assert server.times[1] - server.times[0] >= 1.0


def test_a_server_that_wants_more_time_than_there_is_is_given_up_at_once(server, make):
    server.script = [Reply(status=429, headers={"Retry-After": "60"})]
    start = time.monotonic()
    # 0.9 of group_timeout = 3.6 s
    told = "(attempt 1 of 3; the 3.6 s that a group's requests may take leave no time for another)"
    assert told in str(failure(make()))
    assert time.monotonic() - start < 3.0


def test_a_slow_answer_is_cut_off_and_asked_for_again(server, make):
    server.script = [Reply(delay_s=5.0)]
    start = time.monotonic()
    assert ask(make(timeout=0.3)) == [1.0]
    assert 0.3 <= time.monotonic() - start < 4.5


def test_an_answer_that_drips_meets_the_time_limit_too(server, make):
    server.answer = lambda body: Reply(text=" " * 100, drip_s=0.1)  # 10 s, and never 0.3 s without a byte
    start = time.monotonic()
    assert "no answer within 0.3 s (attempt 1 of 1)" in str(failure(make(timeout=0.3, retries=0)))
    assert time.monotonic() - start < 9


def test_all_requests_of_a_group_meet_its_deadline(server, make):
    server.answer = lambda body: Reply(delay_s=5.0)
    start = time.monotonic()
    # 0.9 * 1 s; six requests one after the other, each tried 11 times, would take 6 * 11 * 0.85 s.
    failure(make(timeout=0.85, group_timeout=1.0, retries=10, concurrency=1), num_requests=6)
    assert 0.9 <= time.monotonic() - start < 4.0


def test_requests_run_at_once_but_not_more_than_allowed(server, make):
    server.answer = lambda body: scores(body["number"], delay_s=0.1)
    assert ask(make(concurrency=3), num_requests=9) == [float(i) for i in range(9)]
    assert server.max_at_once == 3


def test_one_failing_request_leaves_the_scores_of_the_others(server, make):
    server.answer = lambda body: Reply(status=400) if body["number"] == 1 else scores(0.5)
    assert failure(make(), num_requests=3).scores == (0.5, None, 0.5)
    server.answer = lambda body: Reply(status=400)
    assert failure(make(), num_requests=3).scores is None


@pytest.mark.parametrize(("drops", "connections"), [(False, 1), (True, 3)])
def test_connections_are_kept_and_one_that_the_server_dropped_costs_no_attempt(server, make, drops, connections):
    server.answer = lambda body: scores(1.0, drops=drops)
    keys = make(retries=0)
    for _ in range(3):
        assert ask(keys) == [1.0]
        time.sleep(0.1 * drops)
    assert server.num_connections == connections


def test_nobody_at_the_address_is_told(make):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = str(failure(make(url=f"http://127.0.0.1:{port}/score?key=secret")))
    assert told.startswith(f"got no scores from http://127.0.0.1:{port}/score: ConnectError: ")
    assert "secret" not in told


def test_token_and_headers_go_along_and_no_token_where_none_is_named(server, make, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "tok-1234\n")
    ask(make(token_variable="REWARD_TOKEN", headers={"X-Run": "seven"}))
    ask(make())
    with_token, without = server.headers
    assert with_token["Authorization"] == "Bearer tok-1234"
    assert with_token["X-Run"] == "seven"
    assert with_token["Content-Type"] == "application/json"
    assert "Authorization" not in without


def test_the_token_is_never_told(server, make, monkeypatch, caplog):
    monkeypatch.setenv("REWARD_TOKEN", "tok-1234")
    server.answer = lambda body: Reply(status=401, text="who is tok-1234?")
    with caplog.at_level(logging.DEBUG):
        keys = make(token_variable="REWARD_TOKEN")
        told = str(failure(keys))
    assert "401 Unauthorized 'who is ...?'" in told
    assert "tok-1234" not in caplog.text + repr(keys)


@each(("text", "message"), [
    ("<html>", "its answer is not JSON, got '<html>'"),
    ("[1.0]", """its answer is not {"scores": [...]}, got '[1.0]'"""),
    ('{"score": 1}', """its answer is not {"scores": [...]}, got '{"score": 1}'"""),
    ('{"scores": [1, 2]}', "it answered 2 scores for 1 completion, got "),
    ('{"scores": [NaN]}', "it answered nan, which is not a finite number, got "),
    ('{"scores": [1e999]}', "it answered inf, which is not a finite number, got "),
    ('{"scores": [1%s]}' % ("0" * 400), "which is not a finite number, got "),
    ('{"scores": ["1"]}', "it answered '1', which is not a finite number, got "),
    ('{"scores": [true]}', "it answered True, which is not a finite number, got "),
    ('{"scores": [null]}', "it answered None, which is not a finite number, got "),
])  # fmt: skip
def test_a_wrong_answer_is_told_as_it_came(server, make, text, message):
    server.answer = lambda body: Reply(text=text)
    told = str(failure(make(retries=0)))
    assert message in told
    assert len(told) < 500


@pytest.mark.parametrize(("keys", "message"), [
    ({"url": "https://me:pass@host/score"}, "url: must not hold a user name or password"),
    ({"token_variable": "ODD_TOKEN"}, "token_variable: holds no token in plain ASCII, got ODD_TOKEN; export"),
    ({"headers": {"authorization": "Bearer tok-1234"}}, "headers: must not hold Authorization"),
])  # fmt: skip
def test_no_secret_is_in_a_refusal(make, monkeypatch, keys, message):
    monkeypatch.setenv("ODD_TOKEN", "tok-\n1234")
    with pytest.raises(UserError) as refusal:
        make(**keys)
    assert str(refusal.value).startswith(message)
    assert not any(secret in str(refusal.value) for secret in ("pass@", "1234"))
