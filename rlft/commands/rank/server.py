"""Serves the page of `rlft rank` to browsers on this machine, and takes the rankings that the page sends.

A request needs the random token in the page's address, and this server's Host, so that no other site's name can stand
for it (DNS rebinding). One that changes something must come from the page itself, by its Origin.
"""

from __future__ import annotations

import json
import secrets
import sys
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Lock
from typing import Any

from rlft.commands.html_page import html_page
from rlft.commands.rank.rankings import Rankings
from rlft.system import crash
from rlft.system.disk import DiskError
from rlft.system.terminal import say

HOST = "127.0.0.1"
MAX_BODY_BYTES = 10_000
STALE = "Nothing was saved: another window has changed the rankings. This is the next prompt."
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class RankServer(ThreadingTCPServer):
    """Listens at a free port. `lock` is held while the rankings change."""

    daemon_threads = True

    def __init__(self, rankings: Rankings) -> None:
        styles, scripts = ("report/report.css", "rank/rank.css"), ("report/dom.js", "rank/rank.js")
        page = html_page("rlft rank", "rank/rank.html", styles, scripts, policy="connect-src 'self'")
        self.rankings, self.page, self.lock = rankings, page.encode(), Lock()
        super().__init__((HOST, 0), Handler)
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self.hosts = [f"{name}:{self.server_address[1]}" for name in (HOST, "localhost")]
        self.url = f"http://{self.hosts[0]}{self.path}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Says an unexpected error, which the browser is not told; one that is closed only breaks its connections."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, ConnectionError | TimeoutError):
            say(f"a request could not be answered: {crash.report(error)}")

    def answer(self, request: object) -> tuple[int, str]:
        """Does what the page asks; returns the HTTP status, and what was wrong or "".

        request: {} for nothing; {"number": len(done), "scores": one for each answer, or None to skip}; or
            {"number": len(done), "undo": true}.
        """
        done, left = self.rankings.done, self.rankings.left
        try:
            match request:
                case {"number": int(number), "undo": True} if number == len(done) > 0:
                    self.rankings.undo()
                case {"number": int(number), "scores": scores} if number == len(done) and left and self._fit(scores):
                    self.rankings.add(scores)
                case _ if request != {}:
                    return 409, STALE
        except DiskError as error:
            return 507, f"Nothing was saved: {error}"
        return 200, ""

    def _fit(self, scores: Any) -> bool:
        """Whether these are None or whole numbers from 0 without a gap, one for each answer of the next question."""
        if not isinstance(scores, list):
            return scores is None
        kinds = [int] * len(self.rankings.left[-1]["completions"])
        return [*map(type, scores)] == kinds and {*scores} == {*range(max(scores) + 1)}


class Handler(BaseHTTPRequestHandler):
    server: RankServer  # type: ignore[assignment]
    timeout = 30  # seconds that a request may take to arrive
    server_version, sys_version = "rlft", ""

    def do_GET(self) -> None:
        if self._is_allowed(changes=False):
            self._send(200, self.server.page, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._send(413, json.dumps({"problem": f"a request has up to {MAX_BODY_BYTES} bytes"}).encode())
            return
        body = self.rfile.read(int(length))  # before a refusal, which the client might else not receive
        if not self._is_allowed(changes=True):
            return
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            request = None
        with self.server.lock:
            status, problem = self.server.answer(request)
            self._send(status, json.dumps({**self.server.rankings.shown(), "problem": problem}).encode())

    def _is_allowed(self, *, changes: bool) -> bool:
        """Whether the token and the host are this server's, and for changes the origin, too; else refuses."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        has_token = secrets.compare_digest(self.path.encode(), self.server.path.encode())
        is_allowed = has_token and host in self.server.hosts and (not changes or origin == f"http://{host}")
        if not is_allowed:
            self._send(403, json.dumps({"problem": "Open the address that rlft rank printed last."}).encode())
        return is_allowed

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing about requests."""
