"""The ASGI app and its server: it checks keys, limits what is requested and for how long, and fills an `Inbox`.

starlette and uvicorn are imported when an app is made and served (`pip install 'rlft[serve]'`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlft.environment.endpoint import bodies
from rlft.environment.endpoint.bodies import Refusal
from rlft.environment.endpoint.service import Inbox, Request
from rlft.system.terminal import pip_install
from rlft.types import UserError, are, counted, require

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

RETRY_AFTER_S = 1
START_S, END_S = 30.0, 5.0  # time limits of starting and ending the server
BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server."""

    body_bytes: int  # of a request
    requests: int  # under way
    timeout: float  # seconds until one is answered
    section: str  # that of their keys, for refusals: `serve` or `environment`


def make_app(
    inbox: Inbox, callers: Container[str], limits: Limits, *, model: str, most_tokens: int, completes: bool = False
) -> Starlette:
    """The app of `model`, whose prompt and completion have at most `most_tokens` together; requests go into the inbox.

    `completes`: whether it continues texts that are no conversations (`/v1/completions`).
    `callers` are the keys with which requests may come now; the server's thread reads it.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    under_way = 0

    def refused(refusal: Refusal, more: Mapping[str, str] | None = None) -> Response:
        headers = {**(more or {}), "x-should-retry": "true" if refusal.again else "false"}
        if refusal.status == 429:
            headers["retry-after"] = str(RETRY_AFTER_S)
        if refusal.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(refusal.body, refusal.status, headers)

    def key_of(http: HttpRequest) -> str:
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or key not in callers:
            remedy = "send the key that this server was started with, as Authorization: Bearer <key>"
            raise Refusal(401, f"the key is wrong or no longer in use; {remedy}", "invalid_api_key")
        return key

    def within_limit(app: ASGIApp) -> ASGIApp:
        """The app, which counts as under way until the last byte of its response."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal under_way
            if under_way >= limits.requests:
                requests = counted(limits.requests, "request")
                problem = f"{requests} {are(limits.requests)} under way ({limits.section}.requests)"
                raise Refusal(429, f"{problem}; ask again later", "too_many_requests", again=True)
            under_way += 1
            try:
                await app(scope, receive, send)
            finally:
                under_way -= 1

        return serve

    limited = partial(Route, middleware=[Middleware(within_limit)])

    def answering(kind: type[bodies.Body]) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(http: HttpRequest) -> Response:
            key = key_of(http)
            _check_plain(http)
            body = bodies.read(kind, await _body(http, limits))
            if body.model not in (None, model):
                problem = f"there is no model {body.model!r:.200}; there is {model!r} (GET /v1/models)"
                raise Refusal(404, problem, "model_not_found", param="model")
            if isinstance(body, bodies.Chat) and body.stream:
                events = _events(http, key, body, inbox, limits, bodies.Stream(model))
                first = await anext(events)  # a refusal before the first token is no stream, and has its status
                return StreamingResponse(_with_first(first, events), media_type="text/event-stream")
            request = Request(key=key, body=body)
            inbox.put(request)
            return JSONResponse(await _reply(http, request, limits))

        return answer

    async def list_models(http: HttpRequest) -> Response:
        key_of(http)
        models, name = bodies.list_of_models(model, most_tokens), http.path_params.get("name")
        if name not in (None, model):
            raise Refusal(404, f"there is no such model; there is {model!r}", "model_not_found")
        return JSONResponse(models if name is None else models["data"][0])

    async def healthy(http: HttpRequest) -> Response:
        return JSONResponse({})

    async def not_served(http: HttpRequest, error: Exception) -> Response:
        if isinstance(error, Refusal):
            return refused(error)
        if not isinstance(error, HTTPException):
            problem = f"an error of the server: {type(error).__name__}"
            return refused(Refusal(500, problem, "server_error"))
        status, reasons = error.status_code, {404: "there is no such path here", 405: "this path takes another method"}
        problem = f"{reasons.get(status, 'an error')}: {http.method} {http.url.path}"
        return refused(Refusal(status, problem, "not_found"), error.headers)

    kinds = {
        "/v1/chat/completions": bodies.Chat,
        "/inference/v1/generate": bodies.Generate,
        "/tokenize": bodies.Tokenize,
    }
    kinds |= {"/v1/completions": bodies.Complete} if completes else {}
    return Starlette(
        routes=[
            Route("/health", healthy),
            limited("/v1/models", list_models),
            limited("/v1/models/{name:path}", list_models),
            *(limited(path, answering(kind), methods=["POST"]) for path, kind in kinds.items()),
        ],
        exception_handlers=dict.fromkeys((Refusal, HTTPException, Exception), not_served),
    )


def _check_plain(http: HttpRequest) -> None:
    """Raises Refusal: the request says something outside of its body, or in another encoding."""
    for name in http.query_params:
        raise bodies.unfit(name, "stands in the URL, where nothing is read; send it in the body")
    if http.headers.get("content-encoding", "identity") != "identity":
        problem = "content-encoding: bodies are read as they are; send it uncompressed"
        raise Refusal(415, problem, "unsupported_encoding")


async def _body(http: HttpRequest, limits: Limits) -> bytes:
    """The body, of which no more is read than allowed. Raises Refusal if it is longer, or does not come in time."""
    from starlette.requests import ClientDisconnect

    problem = f"the body has more than {limits.body_bytes} bytes; send less, or raise {limits.section}.body_bytes"
    too_long = Refusal(413, problem, "body_too_large")
    if int(http.headers.get("content-length") or 0) > limits.body_bytes:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.timeout):
            async for part in http.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        problem = f"the client has not sent the whole body within {limits.section}.timeout={limits.timeout:g} s"
        raise Refusal(408, problem, "timeout") from None
    except ClientDisconnect:
        raise Refusal(499, "the client has gone", "client_gone") from None
    return b"".join(parts)


async def _reply(http: HttpRequest, request: Request, limits: Limits) -> dict[str, Any]:
    """The reply of the thread that samples. If the client disconnects before sampling begins, nothing is sampled.

    Raises Refusal: the request is refused, or not answered in time.
    """
    reply = asyncio.wrap_future(request.reply)
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({reply, gone}, timeout=limits.timeout, return_when=asyncio.FIRST_COMPLETED)
        if reply.done():
            return reply.result()
        if gone.done():
            raise Refusal(499, "the client has gone", "client_gone")
        problem = f"the engine has not answered within {limits.section}.timeout={limits.timeout:g} s"
        raise Refusal(504, f"{problem}; ask for fewer tokens, or raise it", "timeout")
    finally:
        gone.cancel()
        reply.cancel()  # and with it the request, unless it is being sampled


async def _events(
    http: HttpRequest, key: str, body: bodies.Chat, inbox: Inbox, limits: Limits, stream: bodies.Stream
) -> AsyncGenerator[bytes]:
    """The reply as events, of which the first is sent with the first token.

    Raises Refusal: as in `_reply`; once the stream has begun, a refusal becomes an event of it instead.
    """
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()  # None: the reply is there

    def on_text(piece: str) -> None:  # called by the thread that samples
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    request = Request(key=key, body=body, on_text=on_text)
    inbox.put(request)
    reply = asyncio.ensure_future(_reply(http, request, limits))
    reply.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield stream.piece(piece)
        try:
            whole = reply.result()
        except Refusal as refusal:
            if not stream.sent:
                raise
            for event in stream.failed(refusal):
                yield event
            return
        for event in stream.end(whole, with_usage=bool(body.stream_options and body.stream_options.include_usage)):
            yield event
    finally:
        reply.cancel()


async def _with_first(first: bytes, others: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(others):
        yield first
        async for event in others:
            yield event


async def _gone(http: HttpRequest) -> None:
    """Returns when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


# -- the server --------------------------------------------------------------------------------------------------------
def check_installed(key: str) -> None:
    """Refuses, by this key, to serve without the libraries that serving needs."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    problem = f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
    require(not missing, key, problem, remedy=pip_install("rlft[serve]"))


def bound(host: str, port: int, section: str) -> socket.socket:
    """A socket that listens at this address; port 0: at a free port.

    Raises UserError: by <section>.port or .host: another process uses the port, or this machine has no such address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        reason: object = error.strerror or error
        if error.errno is not None and not isinstance(error, socket.gaierror):  # which has numbers of its own
            reason = os.strerror(error.errno)  # without what Python appends
        key, got, problem = f"{section}.host", host, f"is no address of this machine ({reason})"
        remedy = "use 127.0.0.1 for this machine alone, or 0.0.0.0 for all of its addresses"
        if error.errno == errno.EADDRINUSE:
            key, got, problem = f"{section}.port", port, "is in use by another process"
            remedy = f"end that, or choose another one ({section}.port=0: one that is free)"
        elif error.errno == errno.EACCES:
            key, got, problem = f"{section}.port", port, "may not be used by this user"
            remedy = "choose one above 1023"
        raise UserError(key, problem, got=got, remedy=remedy) from None


class Server:
    """Serves an app by uvicorn, in a thread of its own, until it is closed, with its socket from `bound`.

    Raises RuntimeError: the server has not started in time.
    """

    def __init__(self, app: Starlette, listening: socket.socket) -> None:
        import uvicorn

        host, self.port = listening.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        self.address = f"http://{url_host}:{self.port}"
        self._listening = listening
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        serving = self._server.serve(sockets=[listening])
        self._thread = threading.Thread(target=asyncio.run, args=(serving,), name="rlft-endpoint", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError(f"the server of the endpoint has not started within {START_S:g} s")
            time.sleep(0.005)

    def close(self) -> None:
        """Ends the server; requests under way get a second. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(END_S)
        self._listening.close()
