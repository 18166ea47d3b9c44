"""The endpoint as clients see it: OpenAI's own client and bare HTTP against the app, on a port, over an engine."""

import errno
import gzip
import json
import os
import re
import socket
import threading
import time
from contextlib import contextmanager

import httpx2
import openai
import pytest
from endpoint_agents import ADD
from run_processes import happens

from rlft.environment.endpoint.app import Limits, Server, bound, make_app
from rlft.environment.endpoint.service import Inbox, Service, Speech
from rlft.generation.scripted import ScriptedGenerator
from rlft.types import Sampling, UserError
from tests.helpers.family_tokenizers import family_tokenizer

KEY = "a-secret-key"
QWEN = family_tokenizer("qwen2.5")
USUAL = Sampling(max_tokens=40, temperature=1.0)
MOST = 2000
ASKED = [{"role": "user", "content": "2 + 3?"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON_CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
CALL = f"<tool_call>\n{JSON_CALL}\n</tool_call>"


class Recorder(ScriptedGenerator):
    """Canned answers by an engine that keeps what it was asked, and answers once it may, or fails."""

    def __init__(self, *texts, tokenizer=QWEN, fails=False):
        super().__init__({"*": list(texts)}, tokenizer)
        self.fails = fails
        self.calls = []  # prompts, n, the most tokens
        self.may, self.begun = threading.Event(), threading.Event()
        self.may.set()

    def sample(self, prompts, n, seeds, sampling):
        self.begun.set()
        assert self.may.wait(120), "the test lets the engine go on"
        self.calls.append((len(prompts), n, sampling.max_tokens))
        if self.fails:
            raise RuntimeError("no GPU")
        return super().sample(prompts, n, seeds, sampling)


class Served:
    """An endpoint over a generator, whose requests a thread answers."""

    def __init__(self, generator, tokenizer, syntax, limits):
        self.failures = []
        speech = Speech(tokenizer, syntax, "serve.syntax")
        given = {"body_bytes": 100_000, "requests": 32, "timeout": 20.0, "section": "serve", **limits}
        self.inbox = Inbox()
        sizes = {"most_tokens": MOST, "vocabulary": len(tokenizer)}
        self.service = Service(generator, speech, USUAL, model="policy", seed=1, **sizes)
        app = make_app(self.inbox, {KEY}, Limits(**given), model="policy", most_tokens=MOST, completes=True)
        self.server = Server(app, bound("127.0.0.1", 0, "serve"))
        self.url = self.server.address
        self.ends = False
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self):
        while not self.ends:
            self.service.answer(self.inbox.take(wait_s=0.02), self.failures.append)

    def client(self, key=KEY):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def post(self, path, body, key=KEY):
        headers = {"authorization": f"Bearer {key}"}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(f"{self.url}{path}", content=content, headers=headers, timeout=30)

    @contextmanager
    def busy(self, engine):
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

    def have_come(self, number):
        """Waits until so many requests wait."""
        return happens(lambda: len(self.inbox._waiting) == number, within_s=20)

    def close(self):
        self.ends = True
        self.thread.join(120)
        self.inbox.close()
        self.server.close()


def ids_of(messages, **more):
    return list(QWEN.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more))


# -- what is answered --------------------------------------------------------------------------------------------------
def test_a_chat_is_answered_with_text_tokens_and_logprobs(serve):
    client = serve(Recorder("five", "six")).client()
    assert [(model.id, model.max_model_len) for model in client.models.list()] == [("policy", MOST)]
    assert client.models.retrieve("policy").id == "policy"
    wish = {"n": 2, "seed": 0, "logprobs": True, "top_logprobs": 1, "extra_body": {"return_token_ids": True}}
    reply = client.chat.completions.create(model="policy", messages=ASKED, **wish)
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


WAYS_TO_CALL = {
    "as the template has it": ("qwen2.5", "template", CALL, "# Tools", "<tool_response>\n5\n</tool_response>"),
    "where the template cannot show tools": ("smollm2", "json", JSON_CALL, "You can call tools.", "5"),
    "as JSON, though the template knows calls": ("qwen2.5", "json", JSON_CALL, "You can call tools.", "5"),
}
"""{way: (family, syntax, a call as the policy writes it, words of the first prompt, the answer as it is shown)}."""


@pytest.mark.parametrize(("family", "syntax", "written", "told", "shown"), WAYS_TO_CALL.values(), ids=WAYS_TO_CALL)
def test_calls_of_tools_are_read_and_their_answers_are_shown(serve, family, syntax, written, told, shown):
    tokenizer = family_tokenizer(family)
    client = serve(Recorder(f"So:\n{written}", tokenizer=tokenizer), tokenizer, syntax).client()
    asked = {"model": "policy", "tools": [ADD], "extra_body": {"return_token_ids": True}}
    reply = client.chat.completions.create(messages=ASKED, **asked)
    assert told in tokenizer.decode(reply.prompt_token_ids)
    [choice] = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So:")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 2, "b": 3})
    assert re.fullmatch(r"\d{9}", call.id)
    said = choice.message.model_dump(exclude_none=True)
    messages = [*ASKED, said, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    again = client.chat.completions.create(messages=messages, **asked)
    text = tokenizer.decode(again.prompt_token_ids)
    assert text.endswith(f"So:\n{written}<|im_end|>\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n")
    if syntax == "json":
        assert "<tool_call>" not in text
    else:
        made = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        turns = [{"role": "assistant", "content": "So:", "tool_calls": [made]}, {"role": "tool", "content": "5"}]
        assert again.prompt_token_ids == ids_of([*ASKED, *turns], tools=[ADD])
    none = client.chat.completions.create(messages=ASKED, tool_choice="none", **asked)
    assert (none.choices[0].message.tool_calls, none.choices[0].message.content) == (None, f"So:\n{written}")


def test_a_template_that_cannot_show_tools_is_refused_with_the_remedy(serve):
    plain = family_tokenizer("smollm2")
    client = serve(Recorder("five", tokenizer=plain), plain).client()
    with pytest.raises(openai.BadRequestError, match=r"cannot show tools .*; set serve.syntax=json or xml, or"):
        client.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])


def test_a_streamed_chat_says_the_same_in_events(serve):
    served = serve(Recorder(f"Well.\n{CALL}"))
    wish = {"tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
    events = list(served.client().chat.completions.create(model="policy", messages=ASKED, **wish))
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

    def __init__(self, text, *, fails=False):
        super().__init__(text)
        self.next, self.fails_late = threading.Semaphore(0), fails

    def sample(self, prompts, n, seeds, sampling):
        callback, self.token_callback = self.token_callback, None
        groups = super().sample(prompts, n, seeds, sampling)
        for token in groups[0].rollouts[0].completion.token_ids:
            assert self.next.acquire(timeout=20), "the test lets the engine go on"
            if callback is not None:
                callback(0, token)
        if self.fails_late:
            raise RuntimeError("no GPU")
        return groups


def test_a_stream_has_the_text_as_it_is_sampled(serve):
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


def test_a_stream_whose_engine_fails_says_so_and_ends(serve):
    engine = Slow("one two three", fails=True)
    served = serve(engine)
    engine.next.release(20)
    with pytest.raises(openai.APIError, match="the engine has failed"):
        list(served.client().chat.completions.create(model="policy", messages=ASKED, stream=True))
    assert [str(failure) for failure in served.failures] == ["no GPU"]


def test_a_stream_is_under_way_until_its_end_or_until_its_client_has_gone(serve):
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


def test_tokens_go_in_and_out_as_vllm_has_it(serve):
    served = serve(Recorder("five"))
    body = {"token_ids": ids_of(ASKED), "sampling_params": {"logprobs": 1, "max_tokens": 9, "n": 1}, "model": "policy"}
    reply = served.post("/inference/v1/generate", {**body, "request_id": "mine", "return_token_ids": True}).json()
    ids = [*QWEN("five")["input_ids"], QWEN.eos_token_id]
    assert reply["request_id"] == "mine"
    assert reply["prompt_token_ids"] == body["token_ids"]
    [choice] = reply["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids, "stop")
    # renderers 0.1, which verifiers asks with, wants `token`; vLLM 0.32 has `token_id`.
    told = [(token["token"], token["token_id"], token["logprob"]) for token in choice["logprobs"]["content"]]
    assert told == [(f"token_id:{token}", token, 0.0) for token in ids]
    cut = served.post("/inference/v1/generate", {**body, "sampling_params": {"max_tokens": 1}}).json()
    assert (cut["choices"][0]["token_ids"], cut["choices"][0]["finish_reason"]) == (ids[:1], "length")
    assert cut["choices"][0]["logprobs"] is None
    messages = served.post("/tokenize", {"messages": ASKED, "return_token_strs": True}).json()
    assert messages["tokens"] == ids_of(ASKED)
    assert messages["count"] == len(messages["token_strs"]) == len(messages["tokens"])
    assert messages["max_model_len"] == MOST
    assert served.post("/tokenize", {"prompt": "five"}).json()["tokens"] == QWEN("five")["input_ids"]


# -- what is refused ---------------------------------------------------------------------------------------------------
REFUSED = [
    (CHAT, b"{", 400, "the body is no JSON"),
    (CHAT, [], 400, "the body is no JSON object; send one"),
    (CHAT, {}, 400, "messages: field required"),
    (CHAT, {"messages": [{"role": "judge"}]}, 400, "messages.0.role: input should be 'system', 'developer'"),
    (CHAT, {"messages": ASKED, "temperature": -1}, 400, "temperature: input should be greater"),
    (CHAT, {"messages": ASKED, "n": 2, "stream": True}, 400, "stream: one answer is streamed"),
    (CHAT, {"messages": ASKED, "frequency_penalty": 1}, 400, "frequency_penalty: is not supported"),
    (CHAT, {"messages": ASKED, "n": 0}, 400, "n: input should be greater"),
    (CHAT, {"messages": ASKED, "response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHAT, {"messages": ASKED, "tools": [{"type": "web"}]}, 400, "tools.0.type: input should be 'function'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only text"),
    (CHAT, {"messages": ASKED, "model": "gpt"}, 404, "there is no model 'gpt'; there is 'policy'"),
    (CHAT, {"messages": [{"role": "user", "content": "five " * 3000}]}, 400,
     "prompt and answer may have 2000 together; send less, or raise prompts.max_tokens"),
    (CHAT, {"messages": ASKED, "max_tokens": 5000}, 400, "raise generation.max_tokens"),
    (CHAT, {"messages": ASKED, "max_tokens": MOST, "stream": True}, 400, "raise generation.max_tokens"),
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


def test_what_cannot_be_served_is_refused_in_openais_shape(serve):
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


def test_what_stands_outside_of_a_body_is_refused(serve):
    served = serve(Recorder("five"))
    for path in (CHAT, COMPLETIONS, "/tokenize", "/inference/v1/generate"):
        asked = served.post(f"{path}?temperature=0", {"messages": ASKED})
        assert (asked.status_code, asked.json()["error"]["param"]) == (400, "temperature")
        headers = {"authorization": f"Bearer {KEY}", "content-encoding": "gzip"}
        packed = httpx2.post(f"{served.url}{path}", content=gzip.compress(b"{}"), headers=headers, timeout=30)
        assert (packed.status_code, "send it uncompressed" in packed.text) == (415, True)
        wrong = httpx2.get(f"{served.url}{path}", headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_fields_that_ask_for_what_is_not_done_are_refused_by_openais_client(serve):
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


def test_an_engine_that_fails_is_told_and_the_server_goes_on(serve):
    served = serve(Recorder("five", fails=True))
    for _ in range(2):
        reply = served.post(CHAT, {"messages": ASKED})
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "the engine has failed (RuntimeError: no GPU)"
    assert [str(failure) for failure in served.failures] == ["no GPU", "no GPU"]


def test_one_request_more_than_may_be_under_way_is_told_to_come_again(serve):
    engine = Recorder("five")
    served = serve(engine, requests=1)
    with served.busy(engine):
        refused = served.post(CHAT, {"messages": ASKED})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.headers["x-should-retry"] == "true"
    assert "1 request is under way (serve.requests)" in refused.json()["error"]["message"]
    assert served.post(CHAT, {"messages": ASKED}).status_code == 200


def test_a_request_is_answered_within_its_time_or_told_who_did_not(serve):
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


def test_a_client_that_goes_away_costs_nothing(serve):
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


def test_a_port_in_use_and_an_address_of_others_are_refused_by_key(monkeypatch):
    with bound("127.0.0.1", 0, "serve") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^serve.port: is in use by another process, got {port}; end that, or"):
            bound("127.0.0.1", port, "serve")
    problem = os.strerror(errno.EADDRNOTAVAIL)
    told = rf"^environment.host: is no address of this machine \({problem}\), got 203.0.113.1"
    with pytest.raises(UserError, match=told):
        bound("203.0.113.1", 0, "environment")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)  # as where IPv6 is off
    with pytest.raises(UserError, match=r"^serve.host: is no address of this machine \([\w ]+\), got 2001:db8::1; use"):
        bound("2001:db8::1", 0, "serve")
    bound("127.0.0.1", port, "serve").close()  # free again at once


def test_a_server_that_ends_refuses_what_waits(serve):
    engine = Recorder("five")
    served = serve(engine)
    served.ends = True
    served.thread.join(120)
    status = []
    late = threading.Thread(target=lambda: status.append(served.post(CHAT, {"messages": ASKED}).status_code))
    late.start()
    assert served.have_come(1)
    served.inbox.close()
    late.join(120)
    assert status == [503]
    assert served.post(CHAT, {"messages": ASKED}).status_code == 503  # after the end, too
    assert engine.calls == []


def test_conversations_of_agents_have_no_plain_continuations():
    limits = Limits(body_bytes=1, requests=1, timeout=1.0, section="environment")

    def paths(**more):
        app = make_app(Inbox(), {KEY}, limits, model="m", most_tokens=1, **more)
        return {getattr(route, "path", "") for route in app.routes}

    assert paths(completes=True) - paths() == {COMPLETIONS}
