"""Answers to the requests of `rlft serve`, which are independent: each holds its whole conversation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rlft.environment.endpoint import replies
from rlft.environment.endpoint.bodies import Chat, Generate, Refusal, Tokenize, normal
from rlft.environment.endpoint.inbox import Draw, Request, drawn
from rlft.environment.endpoint.speech import Speech
from rlft.generation.engine import Generator
from rlft.generation.stops import ShownText, plain_decoder
from rlft.system.seeds import derive
from rlft.types import Group, Prompt, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

ID = "endpoint"
"""The id of prompts that come with requests."""


class Service:
    """Answers requests with an engine. Made and used in the thread that samples.

    Args:
        generator: the engine's.
        speech: what conversations look like.
        sampling: how answers are sampled where a request does not say so.
        model: the model's name in replies.
        most_tokens: the most tokens of a prompt and its completion together.
        vocabulary: token ids are below this.
        seed: seeds of requests that have none derive from it and the number of the request.
        ends: the tokens that end a turn, which are not shown.
    """

    def __init__(
        self,
        generator: Generator,
        speech: Speech,
        sampling: Sampling,
        *,
        model: str,
        most_tokens: int,
        vocabulary: int,
        seed: int,
        ends: Collection[int] = (),
    ) -> None:
        self._generator, self._speech, self._sampling = generator, speech, sampling
        self._model, self._most_tokens, self._vocabulary, self._seed = model, most_tokens, vocabulary, seed
        self._ends, self._num_requests = ends, 0

    def answer(self, requests: Sequence[Request], failed: Callable[[Exception], None]) -> None:
        """Answers all requests of a tick; those that are sampled alike are sampled together.

        Args:
            requests: the requests.
            failed: called with an error of the engine, which also becomes the reply to all requests that needed it.
        """
        draws: list[tuple[Request, Draw]] = []
        for request in requests:
            try:
                draw = self._draw(request)
            except Refusal as refusal:
                request.reply.set_exception(refusal)
            else:
                draws += [(request, draw)] if draw is not None else []
        if not draws:
            return
        try:
            on_token = {
                i: pieces
                for i, request_and_draw in enumerate(draws)
                if (pieces := self._pieces(*request_and_draw)) is not None
            }
            groups = drawn(self._generator, [draw for _, draw in draws], on_token)
        except Exception as error:  # whatever the engine raises is reported to the clients and to the caller
            failed(error)
            problem = f"the engine has failed ({type(error).__name__}: {error})"
            for request, _ in draws:
                request.reply.set_exception(Refusal(500, problem, "engine_failed"))
            return
        for (request, draw), group in zip(draws, groups, strict=True):
            request.reply.set_result(self._reply(request, draw, group))

    def _draw(self, request: Request) -> Draw | None:
        """What a request needs from the engine; None if it is answered without the engine.

        Raises:
            Refusal: it cannot be answered.
        """
        body = request.body
        if isinstance(body, Tokenize):
            request.reply.set_result(self._tokenized(body))
            return None
        assert isinstance(body, Chat | Generate), "there are three kinds of requests"
        if isinstance(body, Chat):
            messages = normal(body.messages)
            ids = self._speech.of(body.shown_tools).prompt(messages)
        else:
            messages, ids = [], check_ids(body.token_ids, self._vocabulary)
        room = self._most_tokens - len(ids)
        if room < 1:
            problem = f"the prompt has {len(ids)} tokens, and prompt and answer may have {self._most_tokens} together"
            remedy = "send less, or raise prompts.max_tokens"
            raise Refusal(400, f"{problem}; {remedy}", "context_length_exceeded")
        limit = body.most_tokens
        if limit is not None and limit > room:
            problem = f"max_tokens: {limit} tokens and the prompt's {len(ids)} are more than {self._most_tokens}"
            raise Refusal(400, f"{problem}; ask for fewer, or raise generation.max_tokens", "context_length_exceeded")
        self._num_requests += 1
        seed = body.drawn.seed
        seed = derive(self._seed, self._num_requests, "endpoint") if seed is None else seed % 2**63
        return Draw(
            prompt=Prompt(id=ID, messages=tuple(messages), answer="", token_ids=ids),
            n=body.drawn.n,
            seed=seed,
            sampling=body.drawn.sampling(self._sampling, limit or min(room, self._sampling.max_tokens)),
            first_seed=seed,
        )

    def _pieces(self, request: Request, draw: Draw) -> Callable[[int], None] | None:
        """Passes the tokens of a reply on as text; None if nobody listens, or the reply can only be sent as a whole.

        It is sent as a whole where calls of tools have to be told from text, and where it includes log-probs.
        """
        body, on_text = request.body, request.on_text
        if on_text is None or not isinstance(body, Chat) or body.shown_tools or body.logprobs:
            return None
        text = ShownText(plain_decoder(self._speech.tokenizer), draw.sampling, self._ends)

        def add(token: int) -> None:
            if piece := text.add(token):
                on_text(piece)

        return add

    def _reply(self, request: Request, draw: Draw, group: Group) -> dict[str, Any]:
        body, completions = request.body, [rollout.completion for rollout in group.rollouts]
        if isinstance(body, Generate):
            return replies.generated(body, self._model, completions)
        assert isinstance(body, Chat), "others are answered without the engine"
        spoken = self._speech.of(body.shown_tools)
        said = [spoken.said(completion.token_ids, completion.text) for completion in completions]
        tokenizer = self._speech.tokenizer
        return replies.chat(body, self._model, draw.prompt.token_ids, completions, said, draw.seed, tokenizer)

    def _tokenized(self, body: Tokenize) -> dict[str, Any]:
        ids = tokens_of(body, self._speech)
        with_strings = bool(body.return_token_strs)
        return replies.tokenized(ids, self._most_tokens, self._speech.tokenizer, with_strings=with_strings)


def tokens_of(body: Tokenize, speech: Speech) -> Sequence[int]:
    """The tokens of a text or of messages. Raises Refusal if the request has neither."""
    if body.messages is not None:
        return speech.of(body.tools or []).prompt(normal(body.messages), start=body.add_generation_prompt)
    if body.prompt is None:
        raise Refusal(400, "prompt: is missing; send a text, or messages", "invalid_value")
    with_special = True if body.add_special_tokens is None else body.add_special_tokens
    text = body.prompt.encode("utf-8", "replace").decode()
    return speech.tokenizer(text, add_special_tokens=with_special)["input_ids"]  # type: ignore[return-value]


def check_ids(ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """The token ids of a request. Raises Refusal for one that the model does not have."""
    unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
    if unknown is not None:
        problem = f"token_ids: the model has no token {unknown}; its tokens are 0 .. {vocabulary - 1}"
        raise Refusal(400, problem, "invalid_value")
    return tuple(ids)
