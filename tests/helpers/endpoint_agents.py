"""Agents that play through an endpoint in tests; imported by worker processes, too, so that bare HTTP is enough."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

from conversation_tools import misbehave

INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}}


def post(base_url: str, api_key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply, or {"status": .., "error": ..}."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    url = base_url.removesuffix("/v1") + path
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as got:
            return json.load(got)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def chat(base_url: str, api_key: str, messages: list[dict[str, Any]], **wish: Any) -> dict[str, Any]:
    return post(base_url, api_key, "/v1/chat/completions", {"messages": messages, **wish})


def once(base_url: str, api_key: str, prompt: list[dict[str, Any]], answer: str) -> float:
    """One question; 1 for the right answer."""
    return float(chat(base_url, api_key, prompt)["choices"][0]["message"]["content"] == answer)


def adds(base_url: str, api_key: str, model: str, prompt: list[dict[str, Any]], **row: Any) -> float:
    """Answers calls of `add` until there are none, by OpenAI's own client; the reward is the number of calls."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = list(prompt)
    calls = 0
    while True:
        reply = client.chat.completions.create(model=model, messages=messages, tools=[ADD])  # type: ignore[list-item]
        said = reply.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return float(calls)
        for call in said.tool_calls:
            given = json.loads(call.function.arguments)  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
            calls += 1


def talks(base_url: str, api_key: str, prompt: list[dict[str, Any]], turns: int = 2, **row: Any) -> float:
    """Speaks again and again until it is refused; the reward is the number of answers, less 10 for each odd error."""
    messages = list(prompt)
    for turn in range(turns):
        reply = chat(base_url, api_key, messages)
        if "choices" not in reply:
            return float(turn) if reply["error"]["code"] == "conversation_over" else turn - 10.0
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"and <|im_end|> {turn}?"}]
    return float(turns)


def rewrites(base_url: str, api_key: str, prompt: list[dict[str, Any]], **row: Any) -> float:
    """Forgets what the policy has said first, and goes on as if it had said something else."""
    chat(base_url, api_key, prompt)
    messages = [*prompt, {"role": "assistant", "content": "something else"}, {"role": "user", "content": "so?"}]
    return float("choices" in chat(base_url, api_key, messages))


def is_unread(base_url: str, api_key: str, prompt: list[dict[str, Any]], **row: Any) -> float:
    """Says in the first and in a later turn what the template leaves out, or what is not known; counts the refusals."""
    refused, messages = 0, list(prompt)
    for turn in range(2):
        *earlier, last = messages
        for more, wish in (({"name": "Ann"}, {}), ({"mood": "kind"}, {}), ({}, {"min_tokens": 5}), ({}, {"mood": 1})):
            reply = chat(base_url, api_key, [*earlier, {**last, **more}], **wish)
            refused += reply.get("status") == 400 and "choices" not in reply
        tool = {"role": "tool", "name": "calculator", "tool_call_id": "000000001", "content": f"{turn}"}
        refused += chat(base_url, api_key, [*messages, tool]).get("status") == 400
        reply = chat(base_url, api_key, messages, min_tokens=0, user="me", stop=None)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "and?"}]
    return float(refused)


def by_tokens(base_url: str, api_key: str, ids: list[int], **row: Any) -> float:
    """Two turns by tokens; the second has ids behind what was sampled."""
    wish = {"sampling_params": {"logprobs": 1}}
    first = post(base_url, api_key, "/inference/v1/generate", {"token_ids": ids, **wish})["choices"][0]["token_ids"]
    more = [*ids, *first, *ids[-3:]]
    second = post(base_url, api_key, "/inference/v1/generate", {"token_ids": more, **wish})["choices"][0]
    other = post(base_url, api_key, "/inference/v1/generate", {"token_ids": [7], **wish})
    assert other["status"] == 409, other
    return float(len(second["token_ids"]))


async def asks_at_once(base_url: str, api_key: str, prompt: list[dict[str, Any]], **row: Any) -> float:
    """Two requests beside each other, of which one is refused."""
    import asyncio

    replies = await asyncio.gather(*(asyncio.to_thread(chat, base_url, api_key, prompt, n=n) for n in (1, 2)))
    return float(sorted(reply.get("status", 0) for reply in replies)[-1])


def misbehaves(base_url: str, api_key: str, prompt: list[dict[str, Any]], how: str, **row: Any) -> Any:
    if how != "mute":
        chat(base_url, api_key, prompt)
    if how == "text":
        return "much"
    misbehave(how)
    return 0.5


def by_the_clock(base_url: str, api_key: str, prompt: list[dict[str, Any]], id: str, **row: Any) -> float:
    """What it asks and gives is of the moment: no seed brings it back. Of a quarter of the prompts it asks nothing."""
    now = time.time_ns()
    if int(id[-1], 36) % 4 == 0:
        return 0.5
    content = f"{prompt[-1]['content']} {now % 97}"
    chat(base_url, api_key, [*prompt[:-1], {"role": "user", "content": content}], max_tokens=4 + now % 5)
    return now % 1000 / 1000


def no_key(base_url: str, prompt: list[dict[str, Any]]) -> float:
    return 0.0
