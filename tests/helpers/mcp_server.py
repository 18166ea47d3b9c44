"""A server of the Model Context Protocol, made with the official SDK: tools with state, and tools that misbehave."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
total = 0


@server.tool()
def add(number: int) -> int:
    """Adds to the total, and returns it."""
    global total
    total += number
    return total


@server.tool()
def say(text: str, times: int = 1) -> list[str]:
    """Says a text, once or more often."""
    return [text] * times


@server.tool()
def pids() -> str:
    """The processes of the server and of a program that it starts."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    return f"{os.getpid()} {os.getppid()} {program.pid}"


@server.tool()
def misbehave(how: str) -> str:
    """Exits, hangs or fails."""
    if how == "exit":
        os._exit(3)
    if how == "hang":
        time.sleep(1000)
    raise ValueError(how)


if __name__ == "__main__":
    server.run()
