"""What the service of an endpoint makes of requests: calls of the engine, rendered prompts, and queues."""

import fcntl
import math
import sys
import threading

import openai
import pytest
import torch

from rlft.environment.endpoint.bodies import Chat, Refusal
from rlft.environment.endpoint.service import Inbox, Request
from rlft.generation.transformers import TransformersGenerator
from rlft.types import Prompt, Sampling
from tests.environment.endpoint.test_app import ASKED, CHAT, COMPLETIONS, KEY, QWEN, Recorder
from tests.helpers.family_tokenizers import family_tokenizer, with_attributes

DEAF = """{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that leaves system messages out."""


def test_requests_of_a_tick_are_one_call_of_the_engine_unless_they_are_drawn_otherwise(serve):
    """Ten clients at once, eight of which differ in their seeds and lengths only; the engine is busy when they come."""
    engine = Recorder("one", "two")
    served = serve(engine)
    wishes = [{"seed": k, "max_tokens": 3 + k} for k in range(8)]
    wishes += [{"temperature": 0.5}, {"n": 2}]
    replies = []

    def ask(wish):
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


def test_the_tiny_model_answers_as_the_engine_does(serve, backbone, make_roles):
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


def test_texts_are_continued_and_scored_as_the_trainer_scores_them(serve, backbone, make_roles, make_batch):
    roles, tokenizer = make_roles(), backbone.tokenizer
    engine = TransformersGenerator(roles, tokenizer, torch.device("cpu"), 8)
    served = serve(engine, tokenizer)
    texts = ["<think>12 + 30 = 42</think>", "12+"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    client = served.client()
    scored = client.completions.create(model="policy", prompt=texts, echo=True, logprobs=1, max_tokens=0)
    row_ids = [token for row in ids for token in row]
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(row_ids), 0)
    expected_BT = roles.logprobs(make_batch([(i, row[:1], row[1:]) for i, row in enumerate(ids)]), None)
    for choice, text, row, expected_T in zip(scored.choices, texts, ids, expected_BT, strict=True):
        assert (choice.text, choice.finish_reason) == (text, "length")
        found = choice.logprobs
        assert "".join(found.tokens) == text
        assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(row))]
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        expected_T = expected_T[1 : len(row)].detach()
        torch.testing.assert_close(torch.tensor(found.token_logprobs[1:]), expected_T, rtol=0, atol=1e-4)
        # The most likely token of each place is there, and is the token itself where decoding is greedy.
        with torch.no_grad():
            logits = backbone.model(torch.tensor([row])).logits[0, :-1].float().log_softmax(-1)
        for place, top in enumerate(found.top_logprobs[1:]):
            best = tokenizer.decode([int(logits[place].argmax())])
            assert top.keys() == {best, found.tokens[place + 1]}
            assert max(top.values()) == pytest.approx(float(logits[place].max()), abs=1e-4)
    wish = {"max_tokens": 5, "seed": 3, "n": 2}
    choices = served.post(COMPLETIONS, {"prompt": ids, "logprobs": 1, **wish}).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    prompts = [Prompt(id="p", messages=(), answer="", token_ids=tuple(row)) for row in ids]
    groups = engine.sample(prompts, 2, [3, 3], Sampling(max_tokens=5, temperature=1.0))
    sampled = [rollout for group in groups for rollout in group.rollouts]
    for choice, rollout in zip(choices, sampled, strict=True):
        assert choice["text"] == rollout.completion.text
        assert choice["logprobs"]["token_logprobs"] == list(rollout.completion.logprobs)
    reply = served.post(COMPLETIONS, {"prompt": texts[0], "echo": True, "logprobs": 1, **wish, "n": 1}).json()
    [echoed], first = reply["choices"], choices[0]
    assert echoed["text"] == texts[0] + first["text"]
    assert len(echoed["logprobs"]["tokens"]) == len(ids[0]) + len(first["logprobs"]["tokens"])
    # Sampled alone: products of other shapes round differently.
    expected = pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-5)
    assert echoed["logprobs"]["token_logprobs"][len(ids[0]) :] == expected


def test_variables_of_the_chat_template_are_those_of_the_request_and_of_the_run(serve):
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


def test_a_message_that_the_template_leaves_out_is_refused_and_the_remedy_works(serve):
    deaf = with_attributes(QWEN, chat_template=DEAF)
    engine = Recorder("five", tokenizer=deaf)
    client = serve(engine, deaf).client()
    for role in ("system", "developer"):
        said = [{"role": role, "content": "3"}, *ASKED]  # which is a part of the question
        told = r"leaves out the system's message .*user's message"
        with pytest.raises(openai.BadRequestError, match=told) as refused:
            client.chat.completions.create(model="policy", messages=said)
        assert refused.value.param == "messages"
        said = [{"role": "user", "content": f"3\n\n{ASKED[0]['content']}"}]
        client.chat.completions.create(model="policy", messages=said)
    for field in ("name", "reasoning_content"):
        named = [*ASKED, {"role": "assistant", "content": "5", field: "Ann"}, *ASKED]
        with pytest.raises(openai.BadRequestError, match="of the assistant's message"):
            client.chat.completions.create(model="policy", messages=named)
    assert len(engine.calls) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="it sets the size of the inbox's pipe")
def test_requests_that_the_inbox_cannot_hold_are_to_come_again():
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
