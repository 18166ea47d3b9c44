"""A server of the Model Context Protocol, made with the official SDK: tools with state, and one that misbehaves."""

import os

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
def misbehave(how: str) -> str:
    """Exits or fails."""
    if how == "exit":
        os._exit(3)
    raise ValueError(how)


if __name__ == "__main__":
    server.run()
