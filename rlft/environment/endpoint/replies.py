"""The bodies of replies in OpenAI's API and vLLM's."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlft.environment.endpoint.bodies import Chat, Generate, Refusal
from rlft.environment.endpoint.speech import Said
from rlft.environment.protocol import Call
from rlft.system.seeds import derive
from rlft.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity in JSON, as in vLLM."""


def models(name: str, most_tokens: int) -> dict[str, Any]:
    """The list of the only model. Its `max_model_len` is, as in vLLM, that of a prompt and its completion together."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rlft", "max_model_len": most_tokens}],
    }


def chat(
    body: Chat,
    model: str,
    prompt: Sequence[int],
    completions: Sequence[Completion],
    said: Sequence[Said],
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """The reply to a `Chat`; the ids of calls derive from `seed`, the seed of the first completion."""
    choices = []
    for index, (completion, message) in enumerate(zip(completions, said, strict=True)):
        choices.append(
            {
                "index": index,
                "message": as_message(message, seed + index),
                "finish_reason": "tool_calls" if message.calls else _finish(completion),
                "logprobs": _chat_logprobs(body, completion, tokenizer),
                **({"token_ids": list(completion.token_ids)} if body.return_token_ids else {}),
            }
        )
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(prompt, completions),
        **({"prompt_token_ids": list(prompt)} if body.return_token_ids else {}),
    }


def as_message(said: Said, seed: int) -> dict[str, Any]:
    """A turn of the policy as a message of OpenAI's API. Ids of calls have the nine digits of Mistral's."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = [
            {
                "id": f"{derive(seed, number, 'call') % 10**9:09d}",
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call)},
            }
            for number, call in enumerate(said.calls)
        ]
    return message


def arguments_of(call: Call) -> str:
    """The arguments as JSON, or as the policy wrote them if they cannot be read."""
    return call.written if call.problem else json.dumps(call.arguments, ensure_ascii=False)


class Stream:
    """The reply to a `Chat` as server-sent events: pieces of its text, then the rest of the reply."""

    def __init__(self, model: str) -> None:
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion.chunk"}
        self._common |= {"created": int(time.time()), "model": model}
        self.sent = ""

    def start(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def piece(self, text: str) -> bytes:
        self.sent += text
        return self._delta({"content": text})

    def end(self, reply: Mapping[str, Any], *, with_usage: bool) -> Iterator[bytes]:
        """The rest of the text, calls, log-probs, and the reason of the end."""
        [choice] = reply["choices"]
        message = choice["message"]
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        content = message["content"]
        rest = content if content is None else content.removeprefix(self.sent)
        if rest != "" or calls or choice["logprobs"] or not self.sent:
            delta = {"content": rest, **({"tool_calls": calls} if calls else {})}
            yield self._delta(delta, logprobs=choice["logprobs"])
        ids = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
        yield self._delta({}, finish_reason=choice["finish_reason"], **ids)
        if with_usage:
            yield _event({**self._common, "choices": [], "usage": reply["usage"]})
        yield b"data: [DONE]\n\n"

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        """The events of a refusal, once the stream has begun."""
        yield _event(refusal.body)
        yield b"data: [DONE]\n\n"

    def _delta(self, delta: Mapping[str, Any], **further: Any) -> bytes:
        return _event({**self._common, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **further}]})


def generated(body: Generate, model: str, completions: Sequence[Completion]) -> dict[str, Any]:
    """The reply to a `Generate`. Log-probs name tokens by number, and as `token_id:<number>` for old clients."""
    choices = []
    for index, completion in enumerate(completions):
        ids, logprobs = list(completion.token_ids), None
        if body.sampling_params.logprobs is not None:
            logprobs = {"content": [_of_token(*pair) for pair in zip(ids, completion.logprobs, strict=True)]}
        choices.append(
            {
                "index": index,
                "token_ids": ids,
                "logprobs": logprobs,
                "finish_reason": _finish(completion),
                "stop_reason": None,
            }
        )
    return {
        "request_id": body.request_id or uuid.uuid4().hex,
        "output_mode": "tokens",
        "model": model,
        "created": int(time.time()),
        "choices": choices,
        "usage": _usage(body.token_ids, completions),
        "prompt_token_ids": list(body.token_ids) if body.return_token_ids else None,
    }


def tokenized(
    ids: Sequence[int], most_tokens: int, tokenizer: PreTrainedTokenizerBase, *, with_strings: bool
) -> dict[str, Any]:
    """The reply to a `Tokenize`."""
    strings = tokenizer.convert_ids_to_tokens(list(ids)) if with_strings else None
    return {"count": len(ids), "max_model_len": most_tokens, "tokens": list(ids), "token_strs": strings}


# -- details -----------------------------------------------------------------------------------------------------------
def _finish(completion: Completion) -> str:
    return "length" if completion.finish_reason.is_limit else "stop"


def _usage(prompt: Sequence[int], completions: Sequence[Completion]) -> dict[str, int]:
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}


def _chat_logprobs(body: Chat, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Log-probs as engines give them: of the sampled token alone, with temperature applied."""
    if not body.logprobs:
        return None
    content = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = str(tokenizer.decode([token]))
        entry = {"token": text, "logprob": max(LEAST_LOGPROB, logprob), "bytes": list(text.encode("utf-8", "replace"))}
        content.append({**entry, "top_logprobs": [entry] if body.top_logprobs else []})
    return {"content": content}


def _of_token(token: int, logprob: float) -> dict[str, Any]:
    value = max(LEAST_LOGPROB, logprob)
    return {"token": f"token_id:{token}", "token_id": token, "logprob": value, "rank": None, "top_logprobs": []}


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
