"""A real local HTTP server that answers by a script, and misbehaves where the script says so."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server does with a request.

    delay_s: before the answer. drip_s: after each byte of it. hangs_up: closes the connection instead of an answer.
    drops: closes the connection after it, unannounced.
    """

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0
    hangs_up: bool = False
    drops: bool = False


def scores(*values: Any, **how: Any) -> Reply:
    """The reply of a reward server that gives these scores."""
    return Reply(text=json.dumps({"scores": values}), **how)


def chat(content: str) -> Reply:
    """The reply of an OpenAI-compatible server whose model says this."""
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return Reply(text=json.dumps({"id": "c", "object": "chat.completion", "model": "stub", "choices": [choice]}))


def rated(*values: Any) -> Reply:
    """The reply of a judge that gives these ratings."""
    return chat(json.dumps({"scores": values}))


class ScriptedServer:
    """Answers requests by `script`, one reply each, then by `answer(body)`. Use it as a context manager.

    paths, headers, bodies, times: of the requests so far. num_connections: opened so far. max_at_once: of requests.
    """

    def __init__(self) -> None:
        self.script: list[Reply] = []
        self.answer: Callable[[Any], Reply] = lambda body: Reply(status=404, text="no script left")
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[Any] = []
        self.times: list[float] = []
        self.num_connections = self.max_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _next(self, path: str, headers: dict[str, str], body: Any) -> Reply:
        with self._lock:
            self._at_once += 1
            self.max_at_once = max(self.max_at_once, self._at_once)
            self.paths.append(path)
            self.headers.append(headers)
            self.bodies.append(body)
            self.times.append(time.monotonic())
            return self.script.pop(0) if self.script else self.answer(body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                server.num_connections += 1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = server._next(self.path, dict(self.headers), body)
                with contextlib.suppress(ConnectionError):  # the client may have given up
                    self._send(reply)
                with server._lock:
                    server._at_once -= 1

            def _send(self, reply: Reply) -> None:
                time.sleep(reply.delay_s)
                self.close_connection = reply.hangs_up or reply.drops
                if reply.hangs_up:
                    return
                content = reply.text.encode()
                self.send_response(reply.status)
                for name, value in ({"Content-Length": str(len(content))} | reply.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                step = 1 if reply.drip_s else max(1, len(content))
                for first in range(0, len(content), step):
                    self.wfile.write(content[first : first + step])
                    self.wfile.flush()
                    time.sleep(reply.drip_s)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        return Handler
