"""The endpoint as clients see it: OpenAI's own client and bare HTTP against the app, on a port, over an engine."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pytest
import torch
from run_processes import happens

from rlft.environment.endpoint.app import Limits, Server, bound, make_app
from rlft.environment.endpoint.bodies import Chat, Refusal
from rlft.environment.endpoint.service import Inbox, Request, Service, Speech
from rlft.generation.engine import Generator
from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import TransformersGenerator
from rlft.model.backbone import Backbone
from rlft.model.roles import Roles
from rlft.types import Batch, Group, Prompt, Sampling, UserError
from tests.helpers.family_tokenizers import family_tokenizer, with_attributes

KEY = "a-secret-key"
QWEN = family_tokenizer("qwen2.5")
USUAL = Sampling(max_tokens=40, temperature=1.0)
MOST = 2000
ASKED = [{"role": "user", "content": "2 + 3?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


DEAF = """{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that leaves system messages out."""


class Recorder(ScriptedGenerator):
    """Canned answers by an engine that keeps what it was asked, and answers once it may."""

    def __init__(self, *texts: str, tokenizer: Any = QWEN) -> None:
        super().__init__({"*": list(texts)}, tokenizer)
        self.calls: list[tuple[int, int, int]] = []  # prompts, n, the most tokens
        self.may, self.begun = threading.Event(), threading.Event()
        self.may.set()

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        self.begun.set()
        assert self.may.wait(120), "the test lets the engine go on"
        self.calls.append((len(prompts), n, sampling.max_tokens))
        return super().sample(prompts, n, seeds, sampling)


class Broken(Recorder):
    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        raise RuntimeError("no GPU")


class Served:
    """An endpoint over a generator, whose requests a thread answers."""

    def __init__(self, generator: Generator, tokenizer: Any, syntax: Any, limits: Mapping[str, Any]) -> None:
        self.failures: list[Exception] = []
        speech = Speech(tokenizer, syntax, "serve.syntax")
        given = {"body_bytes": 100_000, "requests": 32, "timeout": 20.0, "section": "serve", **limits}
        self.inbox = Inbox()
        self.service = Service(
            generator, speech, USUAL, model="policy", most_tokens=MOST, vocabulary=len(tokenizer), seed=1
        )
        app = make_app(self.inbox, {KEY}, Limits(**given), model="policy", most_tokens=MOST, completes=True)
        self.server = Server(app, bound("127.0.0.1", 0, "serve"))
        self.url = self.server.address
        self.ends = False
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self) -> None:
        while not self.ends:
            self.service.answer(self.inbox.take(wait_s=0.02), self.failures.append)

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def post(self, path: str, body: Any, key: str = KEY) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(f"{self.url}{path}", content=content, headers=headers, timeout=30)

    @contextmanager
    def busy(self, engine: Recorder) -> Iterator[None]:
        """In the meantime the engine is at work on somebody else's request."""
        engine.may.clear()
        first = threading.Thread(target=self.post, args=(CHAT, {"messages": ASKED}))
        first.start()
        try:
            assert engine.begun.wait(120)
            yield
        finally:
            engine.may.set()
            first.join(120)

    def have_come(self, number: int) -> bool:
        """Waits until so many requests wait."""
        return happens(lambda: len(self.inbox._waiting) == number, within_s=20)

    def close(self) -> None:
        self.ends = True
        self.thread.join(120)
        self.inbox.close()
        self.server.close()


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    opened: list[Served] = []

    def make(generator: Generator, tokenizer: Any = QWEN, syntax: str = "template", **limits: Any) -> Served:
        opened.append(Served(generator, tokenizer, syntax, limits))
        return opened[-1]

    yield make
    for served in opened:
        served.close()


def ids_of(messages: Any, **more: Any) -> list[int]:
    return list(QWEN.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more))


# -- what is answered --------------------------------------------------------------------------------------------------
def test_a_chat_is_answered_with_text_tokens_and_logprobs(serve: Serve) -> None:
    client = serve(Recorder("five", "six")).client()
    assert [(model.id, model.max_model_len) for model in client.models.list()] == [("policy", MOST)]
    assert client.models.retrieve("policy").id == "policy"
    more = {"return_token_ids": True}
    reply = client.chat.completions.create(
        model="policy", messages=ASKED, n=2, seed=0, logprobs=True, top_logprobs=1, extra_body=more
    )
    assert [choice.message.content for choice in reply.choices] == ["five", "six"]
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "stop"]
    ids = [*QWEN("five")["input_ids"], QWEN.eos_token_id]
    assert reply.choices[0].token_ids == ids
    assert reply.prompt_token_ids == ids_of(ASKED)
    content = reply.choices[0].logprobs.content
    assert "".join(token.token for token in content) == "five<|im_end|>"
    assert [token.logprob for token in content] == [0.0] * len(ids)  # what the scripted engine says
    assert content[0].top_logprobs[0].token == content[0].token
    assert bytes(content[0].bytes).decode() == content[0].token
    sampled = len(ids) + len(QWEN("six")["input_ids"]) + 1
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids_of(ASKED)), sampled)


def test_calls_of_tools_are_read_and_their_answers_are_shown(serve: Serve) -> None:
    engine = Recorder(f"Let me see.\n{CALL}")
    client = serve(engine).client()
    reply = client.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 2, "b": 3})
    assert len(call.id) == 9
    assert call.id.isdigit()
    said = choice.message.model_dump(exclude_none=True)
    messages = [*ASKED, said, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    more = {"return_token_ids": True}
    again = client.chat.completions.create(model="policy", messages=messages, tools=[ADD], extra_body=more)
    arguments = {"name": "add", "arguments": {"a": 2, "b": 3}}
    shown = [
        *ASKED,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"type": "function", "function": arguments}]},
        {"role": "tool", "content": "5"},
    ]
    assert again.prompt_token_ids == ids_of(shown, tools=[ADD])
    none = client.chat.completions.create(model="policy", messages=ASKED, tools=[ADD], tool_choice="none")
    assert none.choices[0].message.tool_calls is None
    assert CALL in none.choices[0].message.content


def test_calls_are_written_as_json_where_the_template_cannot_show_tools(serve: Serve) -> None:
    plain = family_tokenizer("smollm2")
    written = 'So: {"name": "add", "arguments": {"a": 2, "b": 3}}'
    refused = serve(Recorder(written, tokenizer=plain), plain).client()
    with pytest.raises(openai.BadRequestError, match=r"cannot show tools .*; set serve.syntax=json or xml, or"):
        refused.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])
    client = serve(Recorder(written, tokenizer=plain), plain, "json").client()
    more = {"return_token_ids": True}
    reply = client.chat.completions.create(model="policy", messages=ASKED, tools=[ADD], extra_body=more)
    [call] = reply.choices[0].message.tool_calls
    assert (reply.choices[0].message.content, call.function.name) == ("So:", "add")
    assert "You can call tools." in plain.decode(reply.prompt_token_ids)
    said = reply.choices[0].message.model_dump(exclude_none=True)
    messages = [*ASKED, said, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    again = client.chat.completions.create(model="policy", messages=messages, tools=[ADD], extra_body=more)
    text = plain.decode(again.prompt_token_ids)
    assert '{"name": "add", "arguments": {"a": 2, "b": 3}}<|im_end|>\n<|im_start|>user\n5<|im_end|>' in text


def test_calls_that_are_written_as_json_are_written_once_by_a_template_that_knows_calls(serve: Serve) -> None:
    served = serve(Recorder("5"), QWEN, "json")
    call = {"id": "000000001", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    messages = [*ASKED, {"role": "assistant", "content": "So:", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "000000001", "content": "5"}]
    reply = served.post(CHAT, {"messages": messages, "tools": [ADD], "return_token_ids": True}).json()
    text = QWEN.decode(reply["prompt_token_ids"])
    assert 'So:\n{"name": "add", "arguments": {"a": 2, "b": 3}}<|im_end|>' in text
    assert "<tool_call>" not in text


def test_a_streamed_chat_says_the_same_in_events(serve: Serve) -> None:
    served = serve(Recorder(f"Well.\n{CALL}"))
    client = served.client()
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="policy", messages=ASKED, tools=[ADD], stream=True, stream_options=options
    )
    events = list(stream)
    deltas = [event.choices[0].delta for event in events if event.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    [call] = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "add")
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "tool_calls"
    raw = served.post(CHAT, {"messages": ASKED, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")
    assert events[-1].usage.completion_tokens == len(QWEN(f"Well.\n{CALL}")["input_ids"]) + 1


class Slow(Recorder):
    """Says its tokens one by one, each once it may, and fails behind the last where it is to."""

    def __init__(self, text: str, *, fails: bool = False) -> None:
        super().__init__(text)
        self.next, self.fails = threading.Semaphore(0), fails

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        callback, self.token_callback = self.token_callback, None
        groups = super().sample(prompts, n, seeds, sampling)
        for token in groups[0].rollouts[0].completion.token_ids:
            assert self.next.acquire(timeout=20), "the test lets the engine go on"
            if callback is not None:
                callback(0, token)
        if self.fails:
            raise RuntimeError("no GPU")
        return groups


def test_a_stream_has_the_text_as_it_is_sampled(serve: Serve) -> None:
    text = "one two three. And four"
    num_tokens = len(QWEN(text)["input_ids"]) + 1
    engine = Slow(text)
    engine.next.release(len(QWEN("one two")["input_ids"]))
    stream = serve(engine).client().chat.completions.create(model="policy", messages=ASKED, stream=True, stop=". A")
    assert next(stream).choices[0].delta.role == "assistant"
    said = ""
    while len(said) < len("one t"):  # the engine waits; two more letters could be the beginning of the stop string
        said += next(stream).choices[0].delta.content
    assert said == "one t"
    engine.next.release(num_tokens)
    rest = [event.choices[0] for event in stream]
    assert said + "".join(choice.delta.content or "" for choice in rest) == "one two three"
    assert [choice.finish_reason for choice in rest if choice.finish_reason] == ["stop"]


def test_a_stream_whose_engine_fails_says_so_and_ends(serve: Serve) -> None:
    engine = Slow("one two three", fails=True)
    served = serve(engine)
    engine.next.release(20)
    with pytest.raises(openai.APIError, match="the engine has failed"):
        list(served.client().chat.completions.create(model="policy", messages=ASKED, stream=True))
    assert [str(failure) for failure in served.failures] == ["no GPU"]


def test_a_refusal_before_the_first_token_has_its_status(serve: Serve) -> None:
    body = {"messages": ASKED, "stream": True, "max_tokens": MOST}
    assert serve(Recorder("five")).post(CHAT, body).status_code == 400


def test_a_stream_is_under_way_until_its_end_or_until_its_client_has_gone(serve: Serve) -> None:
    engine = Slow("one two three")
    served = serve(engine, requests=1)
    engine.next.release()
    stream = served.client().chat.completions.create(model="policy", messages=ASKED, stream=True)
    next(stream)
    assert served.post("/tokenize", {"prompt": "five"}).status_code == 429
    stream.close()
    engine.next.release(40)
    until = time.monotonic() + 20
    while (status := served.post("/tokenize", {"prompt": "five"}).status_code) == 429:
        assert time.monotonic() < until, "its place is free again"
    assert status == 200
    whole = list(served.client().chat.completions.create(model="policy", messages=ASKED, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in whole) == "one two three"
    assert served.post("/tokenize", {"prompt": "five"}).status_code == 200


def test_tokens_go_in_and_out_as_vllm_has_it(serve: Serve) -> None:
    served = serve(Recorder("five"))
    body = {"token_ids": ids_of(ASKED), "sampling_params": {"logprobs": 1, "max_tokens": 9, "n": 1}, "model": "policy"}
    reply = served.post("/inference/v1/generate", {**body, "request_id": "mine", "return_token_ids": True}).json()
    ids = [*QWEN("five")["input_ids"], QWEN.eos_token_id]
    assert reply["request_id"] == "mine"
    assert reply["prompt_token_ids"] == body["token_ids"]
    [choice] = reply["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids, "stop")
    # renderers 0.1, which verifiers asks with, wants `token`; vLLM 0.32 has `token_id`.
    assert [(e["token"], e["token_id"], e["logprob"]) for e in choice["logprobs"]["content"]] == [
        (f"token_id:{token}", token, 0.0) for token in ids
    ]
    cut = served.post("/inference/v1/generate", {**body, "sampling_params": {"max_tokens": 1}}).json()
    assert (cut["choices"][0]["token_ids"], cut["choices"][0]["finish_reason"]) == (ids[:1], "length")
    assert cut["choices"][0]["logprobs"] is None
    messages = served.post("/tokenize", {"messages": ASKED, "return_token_strs": True}).json()
    assert messages["tokens"] == ids_of(ASKED)
    assert messages["count"] == len(messages["token_strs"]) == len(messages["tokens"])
    assert messages["max_model_len"] == MOST
    assert served.post("/tokenize", {"prompt": "five"}).json()["tokens"] == QWEN("five")["input_ids"]


def test_requests_of_a_tick_are_one_call_of_the_engine_unless_they_are_drawn_otherwise(serve: Serve) -> None:
    """Ten clients at once, eight of which differ in their seeds and lengths only; the engine is busy when they come."""
    engine = Recorder("one", "two")
    served = serve(engine)
    wishes: list[dict[str, Any]] = [{"seed": k, "max_tokens": 3 + k} for k in range(8)]
    wishes += [{"temperature": 0.5}, {"n": 2}]
    replies: list[Any] = []

    def ask(wish: dict[str, Any]) -> None:
        replies.append(served.post(CHAT, {"messages": ASKED, **wish}).json())

    threads = [threading.Thread(target=ask, args=(wish,)) for wish in wishes]
    with served.busy(engine):
        for thread in threads:
            thread.start()
        assert served.have_come(10)
    for thread in threads:
        thread.join(120)
    assert engine.calls[0] == (1, 1, 40)
    assert sorted(engine.calls[1:]) == [(1, 1, 40), (1, 2, 40), (8, 1, 10)]  # the longest of 3 .. 10
    assert len(replies) == 10
    assert all("choices" in reply for reply in replies)


def test_the_tiny_model_answers_as_the_engine_does(
    serve: Serve, backbone: Backbone, make_roles: Callable[..., Roles]
) -> None:
    """The same seed gives the tokens and log-probs that the engine gives by itself; a stop and top_p count."""
    roles = make_roles()
    engine = TransformersGenerator(roles, backbone.tokenizer, torch.device("cpu"), 8)
    served = serve(engine, backbone.tokenizer)
    asked = [{"role": "user", "content": "12 + 30"}]
    wish = {"seed": 7, "n": 2, "max_tokens": 12, "top_p": 0.9, "return_token_ids": True, "logprobs": True}
    reply = served.post(CHAT, {"messages": asked, **wish}).json()
    prompt = Prompt(id="p", messages=tuple(asked), answer="", token_ids=tuple(reply["prompt_token_ids"]))
    [group] = engine.sample([prompt], 2, [7], Sampling(max_tokens=12, temperature=1.0, top_p=0.9))
    for choice, rollout in zip(reply["choices"], group.rollouts, strict=True):
        assert choice["token_ids"] == list(rollout.completion.token_ids)
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert logprobs == list(rollout.completion.logprobs)
        assert any(logprob < 0 for logprob in logprobs)
        assert math.isfinite(sum(logprobs))
    stopped = served.post(CHAT, {"messages": asked, "temperature": 0, "stop": ["<answer>"]}).json()
    assert "<answer>" not in stopped["choices"][0]["message"]["content"]
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_texts_are_continued_and_scored_as_the_trainer_scores_them(
    serve: Serve, backbone: Backbone, make_roles: Callable[..., Roles], make_batch: Callable[..., Batch]
) -> None:
    roles, tokenizer = make_roles(), backbone.tokenizer
    engine = TransformersGenerator(roles, tokenizer, torch.device("cpu"), 8)
    served = serve(engine, tokenizer)
    texts = ["<think>12 + 30 = 42</think>", "12+"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    client = served.client()
    scored = client.completions.create(model="policy", prompt=texts, echo=True, logprobs=1, max_tokens=0)
    row_ids = [token for row in ids for token in row]
    assert scored.usage is not None
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(row_ids), 0)
    expected_BT = roles.logprobs(make_batch([(i, row[:1], row[1:]) for i, row in enumerate(ids)]), None)
    for choice, text, row, expected_T in zip(scored.choices, texts, ids, expected_BT, strict=True):
        assert (choice.text, choice.finish_reason) == (text, "length")
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert "".join(found.tokens or []) == text
        assert found.text_offset == [len("".join((found.tokens or [])[:i])) for i in range(len(row))]
        assert (found.token_logprobs[0], (found.top_logprobs or [0])[0]) == (None, None)
        torch.testing.assert_close(
            torch.tensor(found.token_logprobs[1:]), expected_T[1 : len(row)].detach(), rtol=0, atol=1e-4
        )
        # The most likely token of each place is there, and is the token itself where decoding is greedy.
        with torch.no_grad():
            logits = backbone.model(torch.tensor([row])).logits[0, :-1].float().log_softmax(-1)
        for place, top in enumerate((found.top_logprobs or [])[1:]):
            best = tokenizer.decode([int(logits[place].argmax())])
            assert top.keys() == {best, (found.tokens or [])[place + 1]}
            assert max(top.values()) == pytest.approx(float(logits[place].max()), abs=1e-4)
    wish = {"max_tokens": 5, "seed": 3, "n": 2}
    [first, second, *others] = served.post(COMPLETIONS, {"prompt": ids, "logprobs": 1, **wish}).json()["choices"]
    assert [choice["index"] for choice in (first, second, *others)] == [0, 1, 2, 3]
    prompts = [Prompt(id="p", messages=(), answer="", token_ids=tuple(row)) for row in ids]
    groups = engine.sample(prompts, 2, [3, 3], Sampling(max_tokens=5, temperature=1.0))
    sampled = [rollout for group in groups for rollout in group.rollouts]
    for choice, rollout in zip((first, second, *others), sampled, strict=True):
        assert choice["text"] == rollout.completion.text
        assert choice["logprobs"]["token_logprobs"] == list(rollout.completion.logprobs)
    [echoed] = served.post(COMPLETIONS, {"prompt": texts[0], "echo": True, "logprobs": 1, **wish, "n": 1}).json()[
        "choices"
    ]
    assert echoed["text"] == texts[0] + first["text"]
    assert len(echoed["logprobs"]["tokens"]) == len(ids[0]) + len(first["logprobs"]["tokens"])
    # Sampled alone: products of other shapes round differently.
    assert echoed["logprobs"]["token_logprobs"][len(ids[0]) :] == pytest.approx(
        first["logprobs"]["token_logprobs"], abs=1e-5
    )


# -- what is refused ---------------------------------------------------------------------------------------------------
REFUSED: list[tuple[str, Any, int, str]] = [
    (CHAT, b"{", 400, "the body is no JSON"),
    (CHAT, [], 400, "the body is no JSON object; send one"),
    (CHAT, {}, 400, "messages: field required"),
    (CHAT, {"messages": [{"role": "judge"}]}, 400, "messages.0.role: input should be 'system', 'developer'"),
    (CHAT, {"messages": ASKED, "temperature": -1}, 400, "temperature: input should be greater"),
    (CHAT, {"messages": ASKED, "n": 0}, 400, "n: input should be greater"),
    (CHAT, {"messages": ASKED, "n": 2, "stream": True}, 400, "stream: one answer is streamed"),
    (CHAT, {"messages": ASKED, "frequency_penalty": 1}, 400, "frequency_penalty: is not supported"),
    (CHAT, {"messages": ASKED, "response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHAT, {"messages": ASKED, "tools": [{"type": "web"}]}, 400, "tools.0.type: input should be 'function'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only text"),
    (CHAT, {"messages": ASKED, "model": "gpt"}, 404, "there is no model 'gpt'; there is 'policy'"),
    (CHAT, {"messages": [{"role": "user", "content": "five " * 3000}]}, 400,
     "prompt and answer may have 2000 together; send less, or raise prompts.max_tokens"),
    (CHAT, {"messages": ASKED, "max_tokens": 5000}, 400, "raise generation.max_tokens"),
    (CHAT, {"messages": ASKED, "x": "y" * 200_000}, 413, "more than 100000 bytes; send less, or rai"),
    ("/inference/v1/generate", {"token_ids": [10**6]}, 400, "token_ids: the model has no token 1000000"),
    ("/inference/v1/generate", {"token_ids": [-1]}, 400, "token_ids: the model has no token -1"),
    ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids: list should have at least 1 item"),
    ("/inference/v1/generate", {"token_ids": [1], "stream": True}, 400, "stream: is not supported here; leave it out"),
    ("/tokenize", {}, 400, "prompt: is missing; send a text, or messages"),
    ("/v1/completion", {"prompt": "a"}, 404, "there is no such path here: POST /v1/completion"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt: has no token; send one that has"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt: has no token; send one that has"),
    (COMPLETIONS, {"prompt": [[5], []]}, 400, "prompt: has no token; send one that has"),
    (COMPLETIONS, {"prompt": [10**6]}, 400, "prompt: the model has no token 1000000"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens: 0 needs echo"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 3000}, 400, "raise generation.max_tokens"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 2}, 400, "logprobs: input should be less"),
    (COMPLETIONS, {"prompt": "a", "stream": True}, 400, "stream: is not supported here; leave it out"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix: is not supported"),
    (COMPLETIONS, {"prompt": "1 2", "echo": True, "logprobs": 1, "max_tokens": 0}, 400,
     "echo: with logprobs it needs an engine that gives the most likely tokens of a prompt; serve with"),
]  # fmt: skip


def test_what_cannot_be_served_is_refused_in_openais_shape(serve: Serve) -> None:
    engine = Recorder("five")
    served = serve(engine)
    for path, body, status, message in REFUSED:
        reply = served.post(path, body)
        assert (reply.status_code, message in reply.json()["error"]["message"]) == (status, True), reply.text
        assert reply.headers["x-should-retry"] == "false"
    assert engine.calls == []
    for key in ("wrong", KEY.upper(), KEY[:-1], f"{KEY}x"):
        reply = served.post(CHAT, {"messages": ASKED}, key)
        assert reply.status_code == 401
    with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
        served.client("wrong").models.list()
    assert httpx2.get(f"{served.url}/v1/models").status_code == 401  # no key at all
    assert httpx2.get(f"{served.url}/health").status_code == 200


def test_what_stands_outside_of_a_body_is_refused(serve: Serve) -> None:
    served = serve(Recorder("five"))
    for path in (CHAT, COMPLETIONS, "/tokenize", "/inference/v1/generate"):
        asked = served.post(f"{path}?temperature=0", {"messages": ASKED})
        assert (asked.status_code, asked.json()["error"]["param"]) == (400, "temperature")
        headers = {"authorization": f"Bearer {KEY}", "content-encoding": "gzip"}
        packed = httpx2.post(f"{served.url}{path}", content=gzip.compress(b"{}"), headers=headers, timeout=30)
        assert (packed.status_code, "send it uncompressed" in packed.text) == (415, True)
        wrong = httpx2.get(f"{served.url}{path}", headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_fields_that_ask_for_what_is_not_done_are_refused_by_openais_client(serve: Serve) -> None:
    """And those that ask for nothing are served; all of them are in test_bodies.py."""
    client = serve(Recorder("five")).client()
    for more in (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},  # which this template does not read
        {"extra_body": {"min_tokens": 5}},
        {"extra_body": {"ignore_eos": True}},
        {"extra_body": {"bad_words": ["five"]}},
        {"extra_body": {"guided_choice": ["six"]}},
        {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}},
        {"reasoning_effort": "low"},
        {"frequency_penalty": 0.5},
        {"parallel_tool_calls": False},
        {"store": True},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="policy", messages=ASKED, **more)
        [field] = {str(refused.value.param).partition(".")[0]} & {*more, *more.get("extra_body", {})}
        assert str(refused.value).count(field)
    neutral = {"n": None, "stop": None, "max_tokens": None, "temperature": None, "tools": None, "tool_choice": None}
    plain = {"frequency_penalty": 0, "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    extra = {"min_tokens": 0, "ignore_eos": False, "bad_words": [], "repetition_penalty": 1.0, "best_of": 1}
    reply = client.chat.completions.create(model="policy", messages=ASKED, **neutral, **plain, extra_body=extra)
    assert reply.choices[0].message.content == "five"


def test_variables_of_the_chat_template_are_those_of_the_request_and_of_the_run(serve: Serve) -> None:
    qwen3 = family_tokenizer("qwen3")
    served = serve(Recorder("five", tokenizer=qwen3), qwen3)
    wish = {"messages": ASKED, "return_token_ids": True}
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        reply = served.post(CHAT, {**wish, "chat_template_kwargs": variables}).json()
        expected = qwen3.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False, **variables)
        assert reply["prompt_token_ids"] == list(expected)
        tokens = served.post("/tokenize", {"messages": ASKED, "chat_template_kwargs": variables}).json()["tokens"]
        assert tokens == reply["prompt_token_ids"]
    for more, param in (
        ({"chat_template_kwargs": {"enable_thinking": False, "effort": 1}}, "chat_template_kwargs.effort"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ):
        error = served.post(CHAT, {**wish, **more}).json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
    template = qwen3.chat_template + "{{ reasoning_effort }} {{ style }}"
    qwen3 = with_attributes(qwen3, chat_template=template).with_variables({"style": "plain"})
    served = serve(Recorder("five", tokenizer=qwen3), qwen3)
    for more in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}}):
        reply = served.post(CHAT, {**wish, **more}).json()
        assert qwen3.decode(reply["prompt_token_ids"]).endswith("low plain")


def test_a_message_that_the_template_leaves_out_is_refused_and_the_remedy_works(serve: Serve) -> None:
    deaf = with_attributes(QWEN, chat_template=DEAF)
    engine = Recorder("five", tokenizer=deaf)
    client = serve(engine, deaf).client()
    for role in ("system", "developer"):
        said: list[Any] = [{"role": role, "content": "3"}, *ASKED]  # which is a part of the question
        with pytest.raises(
            openai.BadRequestError, match=r"leaves out the system's message .*user's message"
        ) as refused:
            client.chat.completions.create(model="policy", messages=said)
        assert refused.value.param == "messages"
        said = [{"role": "user", "content": f"3\n\n{ASKED[0]['content']}"}]
        client.chat.completions.create(model="policy", messages=said)
    for field in ("name", "reasoning_content"):
        named: list[Any] = [*ASKED, {"role": "assistant", "content": "5", field: "Ann"}, *ASKED]
        with pytest.raises(openai.BadRequestError, match="of the assistant's message"):
            client.chat.completions.create(model="policy", messages=named)
    assert len(engine.calls) == 2


def test_an_engine_that_fails_is_told_and_the_server_goes_on(serve: Serve) -> None:
    served = serve(Broken("five"))
    for _ in range(2):
        reply = served.post(CHAT, {"messages": ASKED})
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "the engine has failed (RuntimeError: no GPU)"
    assert [str(failure) for failure in served.failures] == ["no GPU", "no GPU"]


def test_one_request_more_than_may_be_under_way_is_told_to_come_again(serve: Serve) -> None:
    engine = Recorder("five")
    served = serve(engine, requests=1)
    with served.busy(engine):
        refused = served.post(CHAT, {"messages": ASKED})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.headers["x-should-retry"] == "true"
    assert "1 request is under way (serve.requests)" in refused.json()["error"]["message"]
    assert served.post(CHAT, {"messages": ASKED}).status_code == 200


def test_a_request_is_answered_within_its_time_or_told_who_did_not(serve: Serve) -> None:
    engine = Recorder("five")
    served = serve(engine, timeout=0.2)
    engine.may.clear()
    refused = served.post(CHAT, {"messages": ASKED})
    engine.may.set()
    assert refused.status_code == 504
    assert "the engine has not answered within serve.timeout=0.2 s" in refused.json()["error"]["message"]
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as slow:  # a body that never comes
        head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 9\r\n\r\n"
        slow.sendall(head.encode())
        assert b" 408 " in slow.recv(100)


def test_a_client_that_goes_away_costs_nothing(serve: Serve) -> None:
    """Two go while the engine is busy with somebody else's request: theirs are never sampled."""
    engine = Recorder("five")
    served = serve(engine)
    body = json.dumps({"messages": ASKED}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    gone = [socket.create_connection(("127.0.0.1", served.server.port), timeout=20) for _ in range(2)]
    with served.busy(engine):
        for client in gone:
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert served.have_come(2)
        for client in gone:
            client.close()
        time.sleep(0.2)  # until the server has seen it
    assert served.have_come(0)
    assert served.post(CHAT, {"messages": ASKED}).status_code == 200
    assert engine.calls == [(1, 1, 40), (1, 1, 40)]  # of the one that stayed, and of the last


@pytest.mark.skipif(sys.platform != "linux", reason="it sets the size of the inbox's pipe")
def test_requests_that_the_inbox_cannot_hold_are_to_come_again() -> None:
    inbox = Inbox()
    room = fcntl.fcntl(inbox._writing, fcntl.F_SETPIPE_SZ, 4096)
    requests = [Request(key=KEY, body=Chat(messages=ASKED)) for _ in range(room + 2)]
    for request in requests:
        inbox.put(request)
    for request in requests[room:]:
        with pytest.raises(Refusal, match=f"^{room} requests wait; ask again later") as told:
            request.reply.result(0)
        assert (told.value.status, told.value.again) == (429, True)
    assert inbox.take() == requests[:room]
    inbox.put(late := Request(key=KEY, body=Chat(messages=ASKED)))
    assert inbox.take() == [late]
    inbox.close()


def test_a_port_in_use_and_an_address_of_others_are_refused_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound("127.0.0.1", 0, "serve") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^serve.port: is in use by another process, got {port}; end that, or"):
            bound("127.0.0.1", port, "serve")
    problem = (
        rf"^environment.host: is no address of this machine \({os.strerror(errno.EADDRNOTAVAIL)}\), got 203.0.113.1"
    )
    with pytest.raises(UserError, match=problem):
        bound("203.0.113.1", 0, "environment")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)  # as where IPv6 is off
    with pytest.raises(UserError, match=r"^serve.host: is no address of this machine \([\w ]+\), got 2001:db8::1; use"):
        bound("2001:db8::1", 0, "serve")
    bound("127.0.0.1", port, "serve").close()  # free again at once


def test_a_server_that_ends_refuses_what_waits(serve: Serve) -> None:
    engine = Recorder("five")
    served = serve(engine)
    served.ends = True
    served.thread.join(120)
    status: list[int] = []
    late = threading.Thread(target=lambda: status.append(served.post(CHAT, {"messages": ASKED}).status_code))
    late.start()
    assert served.have_come(1)
    served.inbox.close()
    late.join(120)
    assert status == [503]
    assert served.post(CHAT, {"messages": ASKED}).status_code == 503  # after the end, too
    assert engine.calls == []


def test_conversations_of_agents_have_no_plain_continuations() -> None:
    limits = Limits(body_bytes=1, requests=1, timeout=1.0, section="environment")
    paths = [
        {
            getattr(route, "path", "")
            for route in make_app(Inbox(), {KEY}, limits, model="m", most_tokens=1, **more).routes
        }
        for more in ({}, {"completes": True})
    ]
    assert paths[1] - paths[0] == {COMPLETIONS}
