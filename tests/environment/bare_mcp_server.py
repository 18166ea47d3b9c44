"""A server of the Model Context Protocol without a library, which misbehaves as its argument or a call says."""

import json
import os
import subprocess
import sys
import time
from typing import Any

TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("add", {"properties": {"number": {"type": "integer"}}}), ("misbehave", {"properties": {"how": {}}}), ("pids", {}),
]  # fmt: skip
total = 0


def send(number: int | None = None, **message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", "id": number, **message}), flush=True)


def answer(number: int, method: str, parameters: dict[str, Any]) -> None:
    if method == "initialize":
        about = {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}}
        send(number, result={**about, "serverInfo": {"name": "bare", "version": "1"}})
    elif method == "tools/list":  # a page for each
        page = int(parameters.get("cursor") or 0)
        name, schema = TOOLS[page]
        more = {"nextCursor": str(page + 1)} if page < 2 else {}
        send(number, result={"tools": [{"name": name, "inputSchema": {"type": "object", **schema}}], **more})
    elif method == "tools/call":
        called(number, parameters["name"], parameters.get("arguments") or {})
    else:
        send(number, error={"code": -32601, "message": "unknown method"})


def called(number: int, name: str, arguments: dict[str, Any]) -> None:
    global total
    total += arguments.get("number", 0)
    content, how = [{"type": "text", "text": f"{total}"}], arguments.get("how")
    if how == "refuses":
        send(number, error={"code": -32602, "message": "not today"})
        return
    if how == "hangs":
        time.sleep(1000)
    if how == "exits":
        os._exit(3)
    if how == "garbage":
        print("Traceback\n{half\n" * 100, flush=True)
        content.append({"type": "image", "data": "aGk=", "mimeType": "image/png"})
    if name == "pids":
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        content[0]["text"] = f"{os.getpid()} {os.getppid()} {program.pid}"
    send(number, result={"content": content})


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
