"""A server of the Model Context Protocol without a library, which misbehaves as its argument says."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def send(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def answer(number: int, method: str, parameters: dict[str, Any]) -> None:
    capabilities = {"tools": {}}
    if method == "initialize":
        about = {"protocolVersion": parameters["protocolVersion"], "capabilities": capabilities}
        send({"id": number, "result": {**about, "serverInfo": {"name": "bare", "version": "1"}}})
    elif method == "tools/list":
        page = int(parameters.get("cursor") or 0)
        tool = {"name": f"tool_{page}", "inputSchema": {"type": "object"}}
        send({"id": number, "result": {"tools": [tool], **({"nextCursor": str(page + 1)} if page < 2 else {})}})
    elif method == "tools/call":
        if how == "hangs in calls":
            time.sleep(1000)
        if how == "garbage":
            print("Traceback\n{half\n" * 100, flush=True)
        if how == "refuses":
            send({"id": number, "error": {"code": -32602, "message": "not today"}})
            return
        picture = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
        content = [{"type": "text", "text": "one"}, picture]
        if how == "stays":
            content = [{"type": "text", "text": f"{os.getpid()} {os.getppid()}"}]
        send({"id": number, "result": {"content": content}})
    else:
        send({"id": number, "error": {"code": -32601, "message": "unknown method"}})


how = sys.argv[1]
if how == "hangs":
    time.sleep(1000)
if how != "ends":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            answer(message["id"], message["method"], message.get("params") or {})
if how == "stays":
    time.sleep(1000)
