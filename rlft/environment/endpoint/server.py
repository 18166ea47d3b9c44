"""uvicorn in a thread of its own, on a socket that is bound before anything else happens."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from typing import TYPE_CHECKING

from rlft.types import UserError

if TYPE_CHECKING:
    from starlette.applications import Starlette

START_S, END_S = 30.0, 5.0
"""Time limits of starting and ending the server."""
BACKLOG = 1024


def check_installed(key: str) -> None:
    """Refuses, by this key, to serve without the libraries that serving needs."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise UserError(key, problem, remedy="pip install 'rlft[serve]'")


def bound(host: str, port: int, section: str) -> socket.socket:
    """A socket that listens at this address; port 0: at a free port.

    Raises:
        UserError: by <section>.port or .host: another process uses the port, or this machine has no such address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        key, got, problem, remedy = _why_not(error, host, port, section)
        raise UserError(key, problem, got=got, remedy=remedy) from None
    return listening


def _why_not(error: OSError, host: str, port: int, section: str) -> tuple[str, object, str, str]:
    import errno

    if error.errno == errno.EADDRINUSE:
        remedy = f"end that, or choose another one ({section}.port=0: one that is free)"
        return f"{section}.port", port, "is in use by another process", remedy
    if error.errno == errno.EACCES:
        return f"{section}.port", port, "may not be used by this user", "choose one above 1023"
    remedy = "use 127.0.0.1 for this machine alone, or 0.0.0.0 for all of its addresses"
    return f"{section}.host", host, f"is no address of this machine ({error.strerror or error})", remedy


class Server:
    """Serves an app until it is closed.

    Args:
        app: the app that handles requests.
        listening: a socket from `bound`; it is closed with the server.

    Raises:
        RuntimeError: the server has not started in time.
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
        self._thread = threading.Thread(target=self._run, name="rlft-endpoint", daemon=True)
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

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listening]))
