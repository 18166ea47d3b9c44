"""An export that is pushed: to a small server that speaks the hub's protocol; and what is said where none can be."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from in_one_test import each

from rlft import cli
from rlft.commands.export import command as export_command
from rlft.commands.export.command import Push, limited_waits, read_target
from rlft.runs.find import NamedRun
from rlft.system import interrupt
from rlft.system.hub import hub_answers
from rlft.types import UserError

ID = "me/mine"


class Hub(ThreadingHTTPServer):
    """account: what whoami answers, None for a token that is refused. repositories: {id: whether it is private}.

    files: {id: {path: content}}, of what was committed. wrong: {path of a request: status to fail with}. asked: the
    requests so far.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.account: dict[str, Any] | None = {"name": "me", "auth": {"accessToken": {"role": "write"}}}
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.wrong: dict[str, int] = {}
        self.asked: list[str] = []
        self.seconds = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no error."""


class Answer(BaseHTTPRequestHandler):
    @property
    def hub(self) -> Hub:
        assert isinstance(self.server, Hub)
        return self.server

    def do_HEAD(self) -> None:
        self._reply({})

    def do_GET(self) -> None:
        self._take()
        if self._failed():
            return
        if self.path == "/api/whoami-v2":
            self._reply(self.hub.account or {"error": "no"}, 200 if self.hub.account else 401)
            return
        name = self.path.removeprefix("/api/models/").partition("/revision/")[0].partition("?")[0]
        private = self.hub.repositories.get(name)
        if private is None:
            self._reply({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        else:
            self._reply({"id": name, "private": private, "sha": "0" * 40, "siblings": [], "tags": []})

    def do_POST(self) -> None:
        body = self._take()
        if self._failed():
            return
        if self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._reply({"files": files})
        elif "/commit/" in self.path:
            self._commit(body)
        else:
            self._reply({})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        exists = name in self.hub.repositories
        if not exists:
            self.hub.repositories[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
        self._reply({"url": f"{self.hub.url}/{name}", "id": name}, 409 if exists else 200)

    def _commit(self, body: bytes) -> None:
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                file = line["value"]
                self.hub.files.setdefault(name, {})[file["path"]] = base64.b64decode(file["content"])
        address = f"{self.hub.url}/{name}/commit/{'1' * 40}"
        self._reply({"success": True, "commitOid": "1" * 40, "commitUrl": address})

    def _take(self) -> bytes:
        self.hub.asked.append(f"{self.command} {self.path.partition('?')[0]}")
        time.sleep(self.hub.seconds)
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _failed(self) -> bool:
        status = self.hub.wrong.get(self.path.partition("?")[0])
        if status is not None:
            self._reply({"error": "it is broken"}, status)
        return status is not None

    def _reply(self, fields: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(fields).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that takes everything, and a token for it."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hub_answers.cache_clear()
    huggingface_hub.close_session()
    yield server
    server.shutdown()
    server.server_close()
    hub_answers.cache_clear()
    huggingface_hub.close_session()


@pytest.fixture
def run(policy_run: Callable[..., NamedRun]) -> Path:
    return policy_run().run


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# -- a hub that takes it -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("words", "private"), [((), True), (("private=false",), False)])
def test_the_folder_is_pushed_as_it_is(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], private: bool
) -> None:
    out = tmp_path / "out"
    assert cli.run(["export", f"run={run}", f"out={out}", "as=adapter", f"push={ID}", *words]) == 0
    assert hub.files == {ID: files_of(out)}
    assert hub.repositories == {ID: private}
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == f"exported to {out}"
    assert printed.out.splitlines()[-1] == f"pushed to {hub.url}/{ID}"
    size = sum(map(len, files_of(out).values()))
    kind = "private" if private else "public"
    assert f"pushing {len(files_of(out))} files ({size:,} bytes) to the {kind} repository {ID}" in printed.err
    assert "on this machine, which others will not find" in printed.err, "the embedded base is nowhere else"
    assert f'path = "{ID}"' in (out / "README.md").read_text(), "the card is read on the hub"
    assert interrupt.line() == f"rlft: interrupted: {out} is exported and pushed to {ID}"


def test_a_repository_that_exists_gets_the_files(hub: Hub, run: Path, tmp_path: Path) -> None:
    hub.repositories[ID] = True
    hub.files[ID] = {"mine.txt": b"stays", "README.md": b"is replaced"}
    out = tmp_path / "out"
    assert cli.run(["export", f"run={run}", f"out={out}", "as=adapter", f"push={ID}"]) == 0
    assert hub.files == {ID: {"mine.txt": b"stays", **files_of(out)}}


# -- one that does not -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("account", "repositories", "wrong", "words", "message"),
    [
        (None, {}, {}, (), f"push: the hub refuses the token (401), got {ID}; create one that may write at "),
        (
            {"auth": {"accessToken": {"role": "read"}}},
            {},
            {},
            (),
            f"push: the token may only read, got {ID}; create one",
        ),
        ({}, {}, {f"/api/models/{ID}": 403}, (), f"push: the hub refuses the token (403), got {ID}; "),
        (
            {},
            {ID: False},
            {},
            (),
            f"private: {ID} exists on the hub and is public; a push does not change that, got tr",
        ),
        ({}, {ID: True}, {}, ("private=false",), f"private: {ID} exists on the hub and is private; a push does not ch"),
    ],
)
def test_what_the_hub_would_refuse_is_refused_before_anything_is_written(
    hub: Hub,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    account: Any,
    repositories: dict[str, bool],
    wrong: dict[str, int],
    words: tuple[str, ...],
    message: str,
) -> None:
    hub.account = None if account is None else {"name": "me", **account}
    hub.repositories, hub.wrong = repositories, wrong
    monkeypatch.setattr("rlft.commands.export.command.export", lambda *_: pytest.fail("something was computed"))
    assert cli.run(["export", f"run={run}", f"out={tmp_path / 'out'}", "as=adapter", f"push={ID}", *words]) == 2
    assert capsys.readouterr().err.startswith(f"rlft: {message}")
    assert not any(line.startswith("POST") for line in hub.asked)


@pytest.mark.parametrize(
    ("broken", "status", "problem"),
    [("/api/repos/create", 403, "HfHubHTTPError: "), (f"/api/models/{ID}/commit/main", 400, "BadRequestError: ")],
)
def test_a_push_that_fails_keeps_the_folder_and_names_the_command(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str, status: int, problem: str
) -> None:
    hub.wrong = {broken: status}
    out = tmp_path / "out"
    assert cli.run(["export", f"run={run}", f"out={out}", "as=adapter", f"push={ID}"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"rlft: stopped: not pushed to the private repository {ID}: {problem}")
    assert line.endswith(f"; {out} is kept; try `hf upload {ID} {out} --private`")
    assert (out / "adapter_model.safetensors").is_file()
    assert interrupt.line().endswith(f"`hf upload {ID} {out} --private` uploads the rest")


def test_a_hub_that_is_broken_or_silent_does_not_keep_the_export_from_being_written(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.wrong = {"/api/whoami-v2": 500}
    assert cli.run(["export", f"run={run}", f"out={tmp_path / 'broken'}", "as=adapter", f"push={ID}"]) == 1
    assert "not pushed: HfHubHTTPError: " in capsys.readouterr().err
    hub.wrong, hub.seconds = {}, 60.0
    monkeypatch.setattr(export_command, "QUESTION_SECONDS", 0.2)
    began = time.monotonic()
    assert cli.run(["export", f"run={run}", f"out={tmp_path / 'silent'}", "as=adapter", f"push={ID}"]) == 1
    assert time.monotonic() - began < 50
    assert "not pushed: ReadTimeout: " in capsys.readouterr().err
    assert (tmp_path / "silent" / "adapter_model.safetensors").is_file()


def test_waits_are_limited_inside_and_as_before_outside(hub: Hub) -> None:
    client = huggingface_hub.get_session()
    before = client.timeout
    with limited_waits(0.5):
        assert huggingface_hub.get_session().timeout.read == 0.5
    assert client.timeout == before


# -- nowhere to push to ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("why", ["offline", "no token", "no answer"])
def test_offline_it_says_what_it_would_do(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", why == "offline")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None if why == "no token" else "hf_of_the_test")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port of "discard", which nobody opens
    hub_answers.cache_clear()
    out = tmp_path / "a folder"
    assert cli.run(["export", f"run={run}", f"out={out}", "as=adapter", f"push={ID}"]) == 1
    hub_answers.cache_clear()
    printed = capsys.readouterr()
    assert printed.out.startswith(f"exported to {out}\n")
    assert "pushed" not in printed.out
    files = files_of(out)
    problem = {
        "offline": "HF_HUB_OFFLINE is set",
        "no token": "there is no token for the Hugging Face hub",
        "no answer": "http://127.0.0.1:9 cannot be reached",
    }[why]
    commands = ["`hf auth login`"] if why == "no token" else []
    commands.append(f"`hf upload {ID} '{out}' --private`")
    assert printed.err.splitlines()[-1] == (
        f"rlft: stopped: not pushed: {problem}; {out} is kept; what would go to the private repository {ID}: "
        f"{len(files)} files ({sum(map(len, files.values())):,} bytes), by {' and then '.join(commands)}"
    )


# -- words -------------------------------------------------------------------------------------------------------------
def test_ids_of_repositories() -> None:
    assert read_target(None, None) is None
    assert read_target(ID, None) == Push(repo_id=ID, private=True) == read_target(ID, "true")
    assert read_target("an-org/Mine_0.5B", "false") == Push(repo_id="an-org/Mine_0.5B", private=False)


@each(
    ("repo_id", "private", "message"),
    [
        *((word, None, f"push: is not a repository id .*, got {word or 'nothing'}; write push=<user>/<name>") for word
          in ("", "a/b/c", "/mine", "me/", "me/my model", "me/-x", "me/a--b", "me/a..b", "me/x.git", "me/" + "x" * 97,
              "https://huggingface.co/me/mine")),
        ("mine", None, "push: names no user or organisation, got mine; write push=<user>/<name>"),
        (ID, "yes", "private: must be true or false, got yes; write private=false if"),
        (ID, "", "private: must be true or false, got nothing"),
        (None, "true", "private: has no effect without push=, got true; add push="),
    ],
)  # fmt: skip
def test_words_that_name_no_repository_are_refused(repo_id: str | None, private: str | None, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        read_target(repo_id, private)
