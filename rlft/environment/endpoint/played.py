"""Conversations of agents over any engine: a `Generator` that serves its engine to them while they play.

Workers run the agents, a thread takes their requests, and the thread that samples answers them: all of a tick in one
call of the engine, each as the next turn of its own conversation.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlft.environment.conversations import Conversation, group_of, row_of
from rlft.environment.endpoint import replies
from rlft.environment.endpoint.agents import HOST, SECTION, Endpoint
from rlft.environment.endpoint.bodies import Chat, Generate, Refusal, Tokenize
from rlft.environment.endpoint.inbox import Draw, Inbox, Request, drawn
from rlft.environment.endpoint.server import Server, bound
from rlft.environment.endpoint.service import tokens_of
from rlft.environment.endpoint.speech import Speech
from rlft.environment.endpoint.trajectory import Trajectory
from rlft.environment.pool import EnvironmentPool, Job
from rlft.environment.transcript import Transcript
from rlft.environment.worker import Kind
from rlft.generation.engine import Generator, GeneratorOver
from rlft.tokens.ends import turn_ends
from rlft.types import Adapter, EnvironmentFailure, Group, Prompt, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlft.environment.endpoint.traces import Traces

MODEL = "policy"
"""The model's name in requests."""
AT_ONCE = 4
"""The most requests that an agent may have under way; only one of them is served at a time."""


class AgentGenerator(GeneratorOver):
    """A generator whose conversations are held by agents. Make and use it in the thread that samples.

    Args:
        generator: the engine's; whoever opened it closes it.
        environment: the agents.
        tokenizer: the model's.
        longest_row: the most tokens of a conversation: its first request and all that follows.
        traces: where conversations are recorded, and from which recorded ones are read; None: nowhere.
    """

    def __init__(
        self,
        generator: Generator,
        environment: Endpoint,
        tokenizer: PreTrainedTokenizerBase,
        *,
        longest_row: int,
        traces: Traces | None,
    ) -> None:
        super().__init__(generator)
        self.environment = environment
        self._speech = Speech(tokenizer, environment.syntax, f"{SECTION}.syntax")
        self._longest_row, self._traces = longest_row, traces
        self._version: int | None = None
        self._pool = EnvironmentPool(environment)
        self._inbox = Inbox()
        self._server: Server | None = None
        self._open: dict[str, Trajectory] = {}
        self._keys = itertools.count()

    # -- the interface of a generator ----------------------------------------------------------------------------------
    def load(self, adapter: Adapter) -> None:
        super().load(adapter)
        self._version = adapter.version

    def close(self) -> None:
        """Ends agents and server, not the engine. Safe to call twice."""
        self._pool.close()
        self._inbox.close()
        if self._server is not None:
            self._server.close()

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        """n conversations for each prompt, which agents begin as they like; otherwise like `Conversations.sample`.

        Raises:
            EnvironmentFailure: the workers of the agents cannot start, or no agent has sent a request.
            UserError: the record of these conversations is damaged.
        """
        if self._traces is not None:
            recorded = self._traces.read(self._version, prompts, n, seeds, sampling)
            if recorded is not None:
                return recorded
        groups = [
            [self._new(prompt, seed, index, sampling) for index in range(n)]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        trajectories = [trajectory for group in groups for trajectory in group]
        self._play(trajectories)
        played = [group_of([trajectory.conversation for trajectory in group]) for group in groups]
        if self._traces is not None:
            self._traces.write(self._version, prompts, n, seeds, sampling, played)
        return played

    # -- while agents play ---------------------------------------------------------------------------------------------
    def fileno(self) -> int:
        return self._inbox.fileno()

    def attend(self) -> None:
        """Answers the requests of a tick."""
        draws: list[tuple[Request, Trajectory, Draw]] = []
        for request in self._inbox.take(most=min(self.environment.workers, len(self._open))):
            try:
                draws += self._asked(request)
            except Refusal as refusal:
                request.reply.set_exception(refusal)
        groups = drawn(self.generator, [draw for _, _, draw in draws])
        for (request, trajectory, draw), group in zip(draws, groups, strict=True):
            assert isinstance(request.body, Chat | Generate), "others are answered without the engine"
            request.reply.set_result(trajectory.hear(request.body, draw, group.rollouts[0]))

    def _asked(self, request: Request) -> Iterator[tuple[Request, Trajectory, Draw]]:
        trajectory, body = self._open.get(request.key), request.body
        if trajectory is None:
            raise Refusal(401, "this conversation is over", "invalid_api_key")
        if isinstance(body, Tokenize):
            ids = tokens_of(body, self._speech)
            with_strings = bool(body.return_token_strs)
            tokenizer = self._speech.tokenizer
            request.reply.set_result(replies.tokenized(ids, self._longest_row, tokenizer, with_strings=with_strings))
            return
        assert isinstance(body, Chat | Generate), "there are three kinds of requests"
        yield request, trajectory, trajectory.ask(body)

    def _play(self, trajectories: Sequence[Trajectory]) -> None:
        address = self._address()
        keys = [secrets.token_urlsafe(24) for _ in trajectories]
        jobs = []
        for key, trajectory in zip(keys, trajectories, strict=True):
            conversation = trajectory.conversation
            values = {
                "row": row_of(conversation.data_prompt),
                "base_url": f"{address}/v1",
                "api_key": key,
                "model": MODEL,
            }
            order = conversation.order(Kind.play, values=values)
            jobs.append(Job(key=conversation.key, orders=[order], left_s=conversation.left_s))
        self._open.update(zip(keys, trajectories, strict=True))
        try:
            replies_of_agents = self._pool.run(jobs, beside=self)
        finally:
            self._open.clear()
            self._pool.forget(trajectory.conversation.key for trajectory in trajectories)
        if not any(trajectory.has_begun for trajectory in trajectories):
            first = replies_of_agents[0][0].text or "they said nothing of an error"
            problem = f"environment: none of {len(trajectories)} agents has asked the policy anything ({first})"
            raise EnvironmentFailure(f"{problem}; repair the agent, which has to ask at OPENAI_BASE_URL")
        [end, *_] = (*turn_ends(self._speech.tokenizer, "chat").ids, 0)
        for trajectory, [reply] in zip(trajectories, replies_of_agents, strict=True):
            trajectory.finish(reply, end)

    def _address(self) -> str:
        if self._server is None:
            from rlft.environment.endpoint.app import Limits, make_app

            limits = Limits(
                body_bytes=self.environment.body_bytes,
                requests=AT_ONCE * self.environment.workers,
                timeout=self.environment.timeout,
                section=SECTION,
            )
            app = make_app(self._inbox, self._open, limits, model=MODEL, most_tokens=self._longest_row)
            self._server = Server(app, bound(HOST, self.environment.port, SECTION))
        return self._server.address

    def _new(self, prompt: Prompt, seed: int, index: int, sampling: Sampling) -> Trajectory:
        conversation = Conversation(
            key=next(self._keys),
            data_prompt=prompt,
            opening=prompt,
            transcript=Transcript(prompt.token_ids),
            limit=sampling.max_tokens,
            seed=seed + index,
            group_seed=seed,
            left_s=self.environment.timeout,
        )
        return Trajectory(
            conversation=conversation,
            environment=self.environment,
            speech=self._speech,
            sampling=sampling,
            longest_row=self._longest_row,
            vocabulary=len(self._speech.tokenizer),
            model=MODEL,
        )
