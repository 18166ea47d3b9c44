"""The server of `rlft rank`: what it shows and takes, and that no other page, host or machine is answered."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from in_one_test import each

from rlft.commands.rank import MAX_BODY_BYTES, RankServer
from rlft.system.disk import DiskError

Served = Callable[..., RankServer]


def ask(
    server: RankServer,
    request: object = None,
    *,
    method: str = "POST",
    path: str | None = None,
    headers: Mapping[str, str | None] | None = None,
) -> tuple[int, Any]:
    """(status, answer) of a request as the page sends it; `headers` replace some of those, None leaves one out."""
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), int(port), timeout=10)
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    sent = {"Host": server.hosts[0], "Origin": f"http://{server.hosts[0]}", "Content-Length": str(len(body))}
    connection.putrequest(method, server.path if path is None else path, skip_host=True, skip_accept_encoding=True)
    for name, value in {**sent, **(headers or {})}.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body if method == "POST" else None)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert answer.getheader("Cache-Control") == "no-store"
    assert answer.getheader("Content-Security-Policy") == "frame-ancestors 'none'"
    assert answer.getheader("Access-Control-Allow-Origin") is None
    is_json = answer.getheader("Content-Type") == "application/json"
    return answer.status, json.loads(content) if is_json else content.decode()


def test_the_page_ranks_skips_and_undoes(serve: Served, write_samples: Callable[..., Path]) -> None:
    server = serve(write_samples(2))
    status, page = ask(server, method="GET", headers={"Origin": None})
    assert (status, page.count("<script>")) == (200, 2)
    status, first = ask(server, {})
    assert status == 200
    assert (first["done"], first["of"], first["problem"]) == (0, 2, "")
    assert [m["role"] for m in first["prompt"]] == ["system", "user"]
    assert "secret-model" not in page + json.dumps(first), "what sampled an answer is hidden"
    status, second = ask(server, {"number": 0, "scores": [1, 0, 1]})
    assert (status, second["done"]) == (200, 1)
    assert second["prompt"] != first["prompt"]
    status, last = ask(server, {"number": 1, "scores": None})
    assert (status, last["done"], last["answers"]) == (200, 2, [])
    assert ask(server, {"number": 2, "scores": None})[0] == 409, "there is none left"
    assert ask(server, {"number": 2, "undo": True}) == (200, second)
    assert ask(server, {"number": 1, "undo": True}) == (200, first)
    assert ask(server, {"number": 0, "undo": True})[0] == 409, "there is none before"
    assert server.rankings.file.read_bytes() == b""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ValueError("of no kind that was foreseen"),
            "a request could not be answered: ValueError: of no kind that was",
        ),
        (PermissionError(13, "not yours"), "a request could not be answered: PermissionError: [Errno 13] not yours; "),
        (BrokenPipeError(32, "a closed browser"), ""),
        (ConnectionResetError(104, "a closed browser"), ""),
        (TimeoutError("a browser that sends no more"), ""),
    ],
)
def test_an_unexpected_error_is_said_and_a_closed_browser_is_not(
    error: Exception, said: str, serve: Served, write_samples: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(request: object) -> tuple[int, str]:
        raise error

    server = serve(write_samples(2))
    monkeypatch.setattr(server, "answer", fail)
    with pytest.raises(http.client.RemoteDisconnected):
        ask(server, {})
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert len(told.splitlines()) == bool(said)
    monkeypatch.undo()
    assert ask(server, {})[0] == 200, "the next request is answered"


@each(
    "request_",
    [
        {"number": 1, "scores": [0, 1, 2]},  # of another window
        {"number": 0},
        {"number": 0, "scores": [0, 1]},
        {"number": 0, "scores": [0, 1, 3]},
        {"number": 0, "scores": [1, 1, 2]},
        {"number": 0, "scores": [0, True, 1]},
        {"number": 0, "scores": [0.0, 1, 2]},
        {"number": 0, "scores": ["0", 1, 2]},
        {"number": 0, "scores": []},
        {"number": 0, "scores": {}},
        {"number": "0", "scores": None},
        {"number": 0, "undo": 1},
        {"scores": None},
        [],
        None,
        b"{",
        b"\xff",
        b"",
        b"[" * MAX_BODY_BYTES,
    ],
)
def test_what_is_no_ranking_of_the_next_prompt_changes_nothing(
    request_: object, serve: Served, write_samples: Callable[..., Path]
) -> None:
    server = serve(write_samples(2), f"{abs(hash(str(request_)))}.jsonl")
    status, answer = ask(server, request_)
    assert (status, answer["done"]) == (409, 0)
    assert "Nothing was saved" in answer["problem"]
    assert server.rankings.file.read_bytes() == b""


FOREIGN: list[Mapping[str, Any]] = [
    {"path": "/"},
    {"path": "/wrong/"},
    {"headers": {"Host": "evil.example"}},
    {"headers": {"Host": "evil.example", "Origin": "http://evil.example"}},
    {"headers": {"Host": None}},
    {"headers": {"Host": "127.0.0.1"}},
]
FOREIGN_ORIGIN = [
    {"headers": {"Origin": origin}}
    for origin in (None, "", "null", "http://evil.example", "https://{}", "http://{}.evil.example", "http://127.0.0.1")
]


def test_no_request_from_another_page_is_accepted(serve: Served, write_samples: Callable[..., Path]) -> None:
    server = serve(write_samples(2))
    ranking = {"number": 0, "scores": [0, 1, 2]}
    token = server.path[1:-1]
    near = [{"path": f"/{token[:-1]}/"}, {"path": f"/{token}"}, {"path": f"/?{token}/"}]
    for foreign in (*FOREIGN, *FOREIGN_ORIGIN, *near):
        headers = {k: v and v.format(server.hosts[0]) for k, v in foreign.get("headers", {}).items()}
        for request in (ranking, {}):
            status, answer = ask(server, request, path=foreign.get("path"), headers=headers)
            assert (status, [*answer]) == (403, ["problem"]), foreign
    for foreign in (*FOREIGN, *near):
        status, answer = ask(server, method="GET", **foreign)
        assert (status, [*answer]) == (403, ["problem"]), foreign
    assert server.rankings.file.read_bytes() == b""
    other = {"Host": server.hosts[1], "Origin": f"http://{server.hosts[1]}"}
    assert ask(server, ranking, headers=other)[0] == 200, "localhost is this server as well"
    assert len({serve(write_samples(2), f"{i}.jsonl").path for i in range(5)}) == 5
    assert len(token) == 32


def test_it_listens_on_this_machine_alone_and_limits_bodies(
    serve: Served, write_samples: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(write_samples(2))
    assert server.socket.getsockname()[0] == "127.0.0.1"
    for length in (str(MAX_BODY_BYTES + 1), "9" * 30, "-1", "x", "", None):
        status, answer = ask(server, b"", headers={"Content-Length": length})
        assert (status, [*answer]) == (413, ["problem"]), length
    with socket.create_connection(server.server_address[:2]):  # says nothing, and holds nobody up
        assert ask(server, {})[0] == 200

    def fails(scores: object) -> None:
        raise DiskError(28, server.rankings.file)

    monkeypatch.setattr(server.rankings, "add", fails)
    status, answer = ask(server, {"number": 0, "scores": None})
    assert (status, answer["done"]) == (507, 0)
    assert "Nothing was saved: the disk is full" in answer["problem"]
