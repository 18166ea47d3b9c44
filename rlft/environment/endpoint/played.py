"""Conversations of agents over any engine: a `Generator` that serves its engine to them while they play.

Workers run the agents, a thread takes their requests, and the thread that samples answers them: all of a tick in one
call of the engine, each as the next turn of its own conversation.

An agent may depend on the clock or on the world, and is not a function of seeds. So the conversations of each call of
`sample` are recorded in the run's folder (`Traces`) before anything is learned from them. A resume reads them when it
repeats steps after its checkpoint.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlft.environment.conversations import Conversation, group_of, row_of, unbegun
from rlft.environment.endpoint.agents import HOST, SECTION, Endpoint
from rlft.environment.endpoint.app import Limits, Server, bound, make_app
from rlft.environment.endpoint.bodies import Chat, Generate, Refusal, Tokenize
from rlft.environment.endpoint.service import Draw, Inbox, Request, drawn, tokenized
from rlft.environment.endpoint.speech import Speech
from rlft.environment.endpoint.trajectory import Trajectory
from rlft.environment.pool import EnvironmentPool, Job
from rlft.generation.engine import Generator, GeneratorOver
from rlft.runs.lines import completion_of, conversation_fields
from rlft.system import digests
from rlft.system.files import write_atomically
from rlft.tokens.ends import turn_ends
from rlft.tokens.text import RunTokenizer
from rlft.types import Adapter, EnvironmentFailure, Group, Prompt, Rollout, Sampling, UserError

MODEL = "policy"  # the model's name in requests
FOLDER = "traces"
FORMAT = 1
_NAME = re.compile(r"version_(\d+)-[0-9a-f]{16}\.json")
AT_ONCE = 4  # the most requests that an agent may have under way; only one of them is served at a time


class AgentGenerator(GeneratorOver):
    """A generator whose conversations are held by agents. Make and use it in the thread that samples."""

    def __init__(
        self,
        generator: Generator,  # the engine's; whoever opened it closes it
        environment: Endpoint,
        tokenizer: RunTokenizer,
        *,
        longest_row: int,  # the most tokens of a conversation: its first request and all that follows
        traces: Traces | None,  # where conversations are recorded, and from which recorded ones are read; None: nowhere
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

        EnvironmentFailure: workers cannot start, or no agent has sent a request. UserError: the record is damaged.
        """
        sampling = replace(sampling, drafts=None)  # their history would depend on the order of agents' requests

        def play() -> list[Group]:
            groups = unbegun(self.environment, self._keys, prompts, n, seeds, sampling)
            self._play([conversation for group in groups for conversation in group], sampling)
            return [group_of(group) for group in groups]

        if self._traces is None:
            return play()
        return self._traces.recorded(self._version, prompts, n, seeds, sampling, play)

    # -- while agents play ---------------------------------------------------------------------------------------------
    def fileno(self) -> int:
        return self._inbox.fileno()

    def attend(self) -> None:
        asked: list[tuple[Request, Trajectory, Chat | Generate, Draw]] = []
        for request in self._inbox.take(most=min(self.environment.workers, len(self._open))):
            trajectory, body = self._open.get(request.key), request.body
            try:
                if trajectory is None:
                    raise Refusal(401, "this conversation is over", "invalid_api_key")
                if isinstance(body, Tokenize):
                    request.reply.set_result(tokenized(body, self._speech, self._longest_row))
                    continue
                assert isinstance(body, Chat | Generate), "there are three kinds of requests"
                asked.append((request, trajectory, body, trajectory.ask(body)))
            except Refusal as refusal:
                request.reply.set_exception(refusal)
        groups = drawn(self.generator, [draw for *_, draw in asked])
        for (request, trajectory, body, draw), group in zip(asked, groups, strict=True):
            request.reply.set_result(trajectory.add_turn(body, draw, group.rollouts[0]))

    def _play(self, conversations: Sequence[Conversation], sampling: Sampling) -> None:
        url, jobs, trajectories = f"{self._address()}/v1", [], dict[str, Trajectory]()
        for conversation in conversations:
            key = secrets.token_urlsafe(24)
            trajectories[key] = Trajectory(
                conversation=conversation,
                environment=self.environment,
                speech=self._speech,
                sampling=sampling,
                longest_row=self._longest_row,
                model=MODEL,
            )
            values = {"row": row_of(conversation.data_prompt), "base_url": url, "api_key": key, "model": MODEL}
            order = conversation.order("play", values=values)
            jobs.append(Job(key=conversation.key, orders=[order], left_s=conversation.left_s))
        self._open.update(trajectories)
        try:
            replies_of_agents = self._pool.run(jobs, beside=self)
        finally:
            self._open.clear()
            self._pool.forget(conversation.key for conversation in conversations)
        if not any(trajectory.has_begun for trajectory in trajectories.values()):
            first = replies_of_agents[0][0].text or "they said nothing of an error"
            problem = f"environment: none of {len(trajectories)} agents has asked the policy anything ({first})"
            raise EnvironmentFailure(f"{problem}; repair the agent, which has to ask at OPENAI_BASE_URL")
        [end, *_] = (*turn_ends(self._speech.tokenizer, "chat").ids, 0)
        for trajectory, [reply] in zip(trajectories.values(), replies_of_agents, strict=True):
            trajectory.finish(reply, end)

    def _address(self) -> str:
        if self._server is None:
            limits = Limits(
                body_bytes=self.environment.body_bytes,
                requests=AT_ONCE * self.environment.workers,
                timeout=self.environment.timeout,
                section=SECTION,
            )
            app = make_app(self._inbox, self._open, limits, model=MODEL, most_tokens=self._longest_row)
            self._server = Server(app, bound(HOST, self.environment.port, SECTION))
        return self._server.address


# -- records -----------------------------------------------------------------------------------------------------------
class Traces:
    """Records in a run's folder; those of the `kept` newest versions of the policy may be needed, None: all."""

    def __init__(self, folder: Path, kept: int | None) -> None:
        self.folder, self._kept = folder / FOLDER, kept

    def recorded(
        self,
        version: int | None,
        prompts: Sequence[Prompt],
        n: int,
        seeds: Sequence[int],
        sampling: Sampling,
        play: Callable[[], list[Group]],
    ) -> list[Group]:
        """The groups that are recorded for these arguments of `sample`; else what `play` returns, which is recorded.

        Records that no resume can need are then removed. UserError: the record is damaged. DiskError: it cannot be
        written.
        """
        asked = [[prompt.id, list(prompt.token_ids)] for prompt in prompts]
        inputs = json.dumps([version, asked, n, list(seeds), sampling.settings]).encode()
        file = self.folder / f"version_{version or 0:06d}-{digests.of_bytes(inputs)[:16]}.json"
        if file.is_file():
            return [_group_of(values, prompt) for values, prompt in zip(_read(file), prompts, strict=True)]
        groups = play()
        self.folder.mkdir(parents=True, exist_ok=True)
        payload = json.dumps([_values_of(group) for group in groups]).encode()
        head = json.dumps({"format": FORMAT, "sha256": digests.of_bytes(payload)}).encode()
        write_atomically(file, head + b"\n" + payload)
        if self._kept is not None and version is not None:
            for old in self.folder.iterdir():
                match = _NAME.fullmatch(old.name)
                if match and int(match[1]) < version - self._kept:
                    old.unlink()
        return groups


def _read(file: Path) -> Any:
    """The groups in a record, as JSON. Raises UserError if it is damaged."""
    head, _, payload = file.read_bytes().partition(b"\n")
    try:
        header = json.loads(head)
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']}, and not {FORMAT}")
        if header["sha256"] != digests.of_bytes(payload):
            raise ValueError("its content is not what was written")
        return json.loads(payload)
    except (ValueError, KeyError, TypeError) as error:
        remedy = "restore it from a copy; or delete it: agents then play these conversations again, and differently"
        raise UserError("environment", f"a recorded trace is damaged ({error})", got=file, remedy=remedy) from None


def _values_of(group: Group) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in group.prompt.messages],
        "token_ids": list(group.prompt.token_ids),
        "rollouts": [
            {
                "completion": rollout.completion.text,
                "token_ids": list(rollout.completion.token_ids),
                "logprobs": list(rollout.completion.logprobs),
                "finish_reason": str(rollout.completion.finish_reason),
                "policy_version": rollout.policy_version,
                **conversation_fields(rollout.completion),
            }
            for rollout in group.rollouts
        ],
    }


def _group_of(values: Mapping[str, Any], data_prompt: Prompt) -> Group:
    prompt = replace(data_prompt, messages=tuple(values["messages"]), token_ids=tuple(values["token_ids"]))
    return Group(
        prompt=prompt,
        rollouts=tuple(
            Rollout(prompt=prompt, completion=completion_of(line), policy_version=line["policy_version"])
            for line in values["rollouts"]
        ),
    )
