"""`environment=mcp`: the tools of a server of the Model Context Protocol, which is started and speaks over stdio.

The official Python SDK (`mcp`) is the client. Each conversation has a server process of its own, so that what it is
answered does not depend on other conversations; with `shared` all conversations of a worker have one.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlft.environment.pool import first_reply
from rlft.environment.protocol import Environment, Play
from rlft.system.terminal import pip_install
from rlft.types import UserError, require

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client
    from mcp.types import CallToolResult

KEY = "environment.command"
LIST_TOOLS = "tools/list"  # the call, as MCP names it, that returns the server's tools as JSON
LONGEST_LIST = 10**7  # the most characters of a server's list of tools

LAUNCH = """
import ctypes, os, signal, subprocess, sys
def end(*_):
    os.killpg(0, signal.SIGKILL)
signal.signal(signal.SIGTERM, end)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # sent when its parent ends
if os.getppid() == int(sys.argv[1]):
    subprocess.call(sys.argv[2:], stderr=subprocess.DEVNULL)
end()
"""
"""The program that starts a server, without its log: it leads the process group of the server, which ends with the
worker and with the server itself, so that nothing that either has started outlives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mcp(Environment):
    """The keys of `environment=mcp`: how the server is started, and whether conversations share it."""

    command: Sequence[str]
    env: Mapping[str, str]
    shared: bool

    def check(self) -> None:
        is_installed, problem = importlib.util.find_spec("mcp"), "the mcp library is not installed"
        require(is_installed, "environment", problem, got="mcp", remedy=pip_install("rlft[mcp]"))
        remedy = "name a program and its arguments, as environment.command=[python,server.py]"
        require(self.command, KEY, "is empty, so there is nothing to start", got="[]", remedy=remedy)
        problem, remedy = "there is no such program", "give the path of one, or install it"
        require(shutil.which(self.command[0], path=search_path()), KEY, problem, got=self.command[0], remedy=remedy)
        for name, value in self.env.items():
            problem, remedy = "must be a string", f'quote it: {{{name}: "{value}"}}'
            require(isinstance(value, str), f"environment.env.{name}", problem, got=value, remedy=remedy)

    def schemas(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": tool} for tool in listed(json.dumps(asdict(self)))]

    def start(self) -> None:
        import mcp  # noqa: F401 (takes seconds)

        # The SDK logs each line of a server that is no message.
        logging.getLogger("mcp").setLevel(logging.CRITICAL)

    def make(self) -> ServerCalls:
        return ServerCalls(self)


def search_path() -> str:
    """Where programs are looked for: first next to the Python that runs this, so that `python` is that one."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@cache
def listed(keys: str) -> list[dict[str, Any]]:
    """The server's tools, {name, description, parameters} of each; it is started in a worker, under its limits.

    `keys` are the environment's, as JSON. Raises UserError: it does not answer, or its tools cannot be shown.
    """
    environment = Mcp(**json.loads(keys) | {"max_answer": LONGEST_LIST, "shared": False})
    command, reply = " ".join(environment.command), first_reply(environment, "call", LIST_TOOLS)
    problem = f"its server does not list its tools ({reply.text})"
    remedy = "try that command by itself: it must speak MCP over stdio"
    require(reply.cause is None, KEY, problem, got=command, remedy=remedy)
    return checked(json.loads(reply.text), command)


def checked(tools: list[dict[str, Any]], command: str) -> list[dict[str, Any]]:
    """The tools of the server that this command starts, unless they cannot be shown or called. Raises UserError."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    require(tools, KEY, "its server lists no tool", got=command, remedy="use one that has tools")
    remedy = "fix it in the server"
    names = [tool["name"] for tool in tools]
    for tool in tools:
        name, schema = tool["name"], tool["parameters"]
        require(name, KEY, "its server lists a tool without a name", got=command, remedy=remedy)
        require(names.count(name) == 1, KEY, f"its server lists two tools called {name}", got=command, remedy=remedy)
        problem = f"the arguments of its tool {name} are not an object, but of type {schema.get('type')!r:.80}"
        require(schema.get("type") == "object", KEY, problem, got=command, remedy=remedy)
        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            problem = f"the arguments of its tool {name} have no valid JSON schema ({error.message:.200})"
            raise UserError(KEY, problem, got=command, remedy=remedy) from None
    return tools


# -- in a worker -------------------------------------------------------------------------------------------------------
class ServerCalls(Play):
    """Calls of a conversation's own server, which starts with the first one; or of the worker's, if it is shared."""

    def __init__(self, environment: Mcp) -> None:
        self.environment = environment
        self._own: Server | None = None

    @property
    def server(self) -> Server:
        if not self.environment.shared:
            self._own = self._own or Server(self.environment)
            return self._own
        shared = _shared.get(self.environment.command)
        if shared is None or shared.ended:
            shared = _shared[self.environment.command] = Server(self.environment)
        return shared

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps(self.server.tools) if name == LIST_TOOLS else self.server.call(name, arguments)

    def close(self) -> None:
        if self._own is not None:
            self._own.end("the conversation is over")


_shared: dict[Sequence[str], Server] = {}  # the server of this process, by its command


_kept = ExitStack()


@cache
def portal() -> BlockingPortal:
    """The thread of this process in which the SDK's clients run, as long as the process does."""
    from anyio.from_thread import start_blocking_portal

    return _kept.enter_context(start_blocking_portal("asyncio"))


@dataclass(slots=True)
class Server:
    """A server process and its client."""

    environment: Mcp
    tools: list[dict[str, Any]] = field(default_factory=list)  # name, description and parameters of each tool
    ended: str = ""  # why no call is made any more; "" while there are calls
    _client: Client | None = None
    _task: Future[None] | None = None

    def __post_init__(self) -> None:
        ready: Future[None] = Future()
        self._task = portal().start_task_soon(self._run, ready)
        self._wait(ready, "it did not start in time")

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A tool's answer as text. Raises RuntimeError: the tool reports an error, or the server has ended."""
        if self.ended or self._client is None:
            raise RuntimeError(f"the tool's server has ended: {self.ended}")
        call = portal().start_task_soon(partial(self._client.call_tool, name, dict(arguments)))
        result = self._wait(call, "an earlier call took too long")
        text = text_of(result)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def end(self, why: str) -> None:
        """Ends the process, without waiting for that."""
        self.ended = self.ended or why
        if self._task is not None:
            self._task.cancel()

    def _wait(self, task: Future[Any], why: str) -> Any:
        """The task's result; a server that does not give it in time, or that has ended, is ended."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            return task.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self.end("it has closed the connection")
                raise RuntimeError("the tool's server has ended") from None
            raise RuntimeError(error.message) from None
        except BaseException as error:
            task.cancel()
            self.end("it has failed" if isinstance(error, Exception) else why)  # else it is out of time
            raise

    async def _run(self, ready: Future[None]) -> None:
        """Lives as long as the server: the SDK closes a connection in the task that has opened it."""
        import anyio
        from mcp import Client, StdioServerParameters

        words = ["-c", LAUNCH, str(os.getpid()), *self.environment.command]
        own = {"PATH": search_path(), "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        started = StdioServerParameters(command=sys.executable, args=words, env={**own, **self.environment.env})
        try:
            async with Client(started) as client:
                cursor = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    for tool in page.tools:
                        about = {"name": tool.name, "description": tool.description or ""}
                        self.tools.append({**about, "parameters": {"properties": {}, **tool.input_schema}})
                    if (cursor := page.next_cursor) is None:
                        break
                self._client = client
                ready.set_result(None)
                await anyio.sleep_forever()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(_cause_of(error))
            raise


def _cause_of(error: BaseException) -> Exception:
    """What has failed in a task of the SDK, which raises groups."""
    from anyio import BrokenResourceError, ClosedResourceError

    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Exception) and not isinstance(error, BrokenResourceError | ClosedResourceError):
        return error
    return RuntimeError("the tool's server has ended")


def text_of(result: CallToolResult) -> str:
    """The texts of a tool's answer, one below the other; of other content only its kind."""
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
