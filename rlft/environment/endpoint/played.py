"""Conversations of agents over any engine: a `Generator` that serves its engine to them while they play.

Workers run the agents, a thread takes their requests, and the thread that samples answers them: all of a tick in one
call of the engine, each as the next turn of its own conversation. The requests of a conversation are gathered into one
row of tokens. Ids are concatenated and never made from text again: if a request continues the conversation, only its
new messages are rendered. A request that does not, since the agent has cut or rewritten earlier messages, makes a
branch of the row.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlft.environment.conversations import Conversation, Transcript, group_of, row_of, say, tool_call, unbegun
from rlft.environment.endpoint import bodies, service
from rlft.environment.endpoint.agents import HOST, SECTION, Endpoint
from rlft.environment.endpoint.app import Limits, Server, bound, make_app
from rlft.environment.pool import EnvironmentPool, Job, Reply
from rlft.environment.protocol import Cause
from rlft.generation.engine import Generator, GeneratorOver
from rlft.runs.lines import completion_of, conversation_fields
from rlft.system.files import digest_of_bytes, write_atomically
from rlft.system.seeds import derive
from rlft.tokens.text import RunTokenizer, decode, turn_ends
from rlft.types import (
    Adapter,
    EnvironmentFailure,
    FinishReason,
    Group,
    NextTurn,
    Prompt,
    Rollout,
    Sampling,
    UserError,
    counted,
)

DOES_NOT_CONTINUE = "does_not_continue"  # the code for a request that cannot be the next turn of its conversation
OVER = "conversation_over"  # the code for a request after a limit has ended the conversation
AGENT = "agent"  # the name under which an agent's failure stands among the calls of tools


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """A conversation while its agent plays."""

    conversation: Conversation  # its state, as for other environments; the opening is that of the first request
    environment: Endpoint
    speech: service.Speech
    sampling: Sampling
    longest_row: int  # the most tokens of the opening and all that follows
    model: str
    has_begun: bool = False
    known: list[service.Message] | None = None  # messages so far, the policy's included; None after a request of tokens
    shown: tuple[Any, Any] = ([], {})  # tools and variables of the last request
    is_asked: bool = False  # whether a request of it is being sampled
    last: Sequence[int] = ()  # token ids of the last turn
    was_cut: bool = False  # whether a limit ended the last turn

    def ask(self, body: bodies.Chat | bodies.Generate) -> service.Draw:
        """What a request needs from the engine; the transcript then holds what the policy reads before its turn.

        Refusal: it requests too much, cannot continue this conversation, or a limit has ended the conversation.
        """
        conversation = self.conversation
        if self.is_asked:
            problem = "another request of this conversation is under way; send one after the other"
            raise bodies.Refusal(409, problem, DOES_NOT_CONTINUE)
        if body.drawn.n != 1:
            raise bodies.unfit("n", "a conversation continues from one answer; leave it out", "unsupported_value")
        if len(conversation.turns) == self.environment.max_turns:
            conversation.end = FinishReason.turns
        if conversation.end is not None:
            raise self._over(conversation.end)
        messages = [message.plain for message in body.messages] if isinstance(body, bodies.Chat) else None
        context, answers = self._read(body, messages)
        if not self.has_begun:
            self._begin(context, messages)
        left = self._set_context(context)
        self._note_answers(answers)
        self.known, self.is_asked = messages, True
        self.shown = _shown(body) if isinstance(body, bodies.Chat) else ([], {})
        limit = min(filter(None, (left, self.environment.turn_tokens, body.most_tokens)))
        turn, seed = len(conversation.turns), conversation.seed
        service.check_ids(body.drawn.stop_token_ids or (), len(self.speech.tokenizer), "stop_token_ids")
        next_turn = NextTurn(turn=turn, seed=seed, max_tokens=limit)
        read = tuple(conversation.transcript.context)
        return service.Draw(
            prompt=replace(conversation.opening, token_ids=read, next_turn=next_turn),
            n=1,
            seed=derive(seed, turn, "turn") if turn else seed,
            sampling=body.drawn.with_stops(self.sampling, limit),
        )

    def add_turn(self, body: bodies.Chat | bodies.Generate, draw: service.Draw, rollout: Rollout) -> dict[str, Any]:
        """Adds what the policy has said, and returns the reply."""
        conversation, limit = self.conversation, draw.sampling.max_tokens
        say(conversation, rollout, limit)
        self.was_cut, conversation.end = conversation.end is not None, None
        if len(conversation.transcript.token_ids) >= conversation.limit:
            conversation.end = FinishReason.length
        self.is_asked = False
        completion = replace(
            rollout.completion,
            token_ids=tuple(rollout.completion.token_ids[:limit]),
            logprobs=tuple(rollout.completion.logprobs[:limit]),
            finish_reason=FinishReason.length if self.was_cut else FinishReason.stop,
        )
        self.last = completion.token_ids
        reply, messages = service.reply_of(body, self.model, self.speech, draw, [completion])
        for said in messages:
            self._note_calls(said)
            assert self.known is not None, "a chat has messages"
            self.known.append(bodies.Message.model_validate(bodies.as_message(said, draw.seed)).plain)
        return reply

    def finish(self, reply: Reply, end_token: int) -> None:
        """Ends the conversation as the worker replied; one without a request gets this end token, not sampled."""
        conversation = self.conversation
        if reply.cause is Cause.time:
            conversation.end = FinishReason.time
        if not conversation.turns:
            conversation.transcript.add([end_token])
            conversation.end = conversation.end or FinishReason.stop
            return
        last = conversation.turns[-1]
        if reply.cause is not None:
            last = replace(last, calls=(*last.calls, tool_call(AGENT, "", reply.text, reply.cause)))
        conversation.turns[-1] = replace(last, reward=reply.reward)
        if conversation.end is None:
            conversation.end = FinishReason.length if self.was_cut else FinishReason.stop
        single = len(conversation.turns) == 1
        conversation.text = last.text if single else decode(self.speech.tokenizer, conversation.transcript.token_ids)

    # -- what the policy reads -----------------------------------------------------------------------------------------
    def _read(
        self, body: bodies.Chat | bodies.Generate, messages: list[service.Message] | None
    ) -> tuple[Sequence[int], Sequence[service.Message]]:
        """(all tokens that the policy reads before its turn, the messages of them that are new)."""
        if isinstance(body, bodies.Generate):
            return service.check_ids(body.token_ids, len(self.speech.tokenizer)), []
        assert messages is not None, "a chat has messages"
        spoken = self.speech.of(body)
        new = self._continued_by(messages) if _shown(body) == self.shown else None
        if new is not None and spoken.has_suffix(new):
            return (*self.conversation.transcript.context, *spoken.suffix(self.last, new)), new
        return spoken.prompt(messages), messages[-1:] if new is None else new

    def _continued_by(self, messages: list[service.Message]) -> list[service.Message] | None:
        """The messages after the conversation so far; None if these messages do not continue it."""
        known = self.known
        if known is None or len(messages) <= len(known):
            return None
        same = all(_alike(a, b) for a, b in zip(known, messages, strict=False))
        return messages[len(known) :] if same else None

    def _begin(self, context: Sequence[int], messages: list[service.Message] | None) -> None:
        conversation = self.conversation
        room = self.longest_row - len(context)
        if room < 1:
            problem = f"the first request has {counted(len(context), 'token')}, and with what follows there may be"
            remedy = "send less, or raise prompts.max_tokens"
            raise bodies.Refusal(400, f"{problem} {self.longest_row}; {remedy}", "context_length_exceeded")
        shown = tuple({"role": m["role"], "content": m["content"]} for m in messages or ())
        prompt = conversation.data_prompt
        tail = prompt.tail if decode(self.speech.tokenizer, context).endswith(prompt.tail) else ""
        conversation.opening = replace(prompt, messages=shown or prompt.messages, token_ids=tuple(context), tail=tail)
        conversation.transcript = Transcript(context)
        conversation.limit = min(conversation.limit, room)
        self.has_begun = True

    def _set_context(self, context: Sequence[int]) -> int:
        """Lets the policy read this context; returns the number of tokens that are left for its turn."""
        conversation, transcript = self.conversation, self.conversation.transcript
        left = conversation.limit - len(transcript.token_ids) - transcript.added_by(context)
        if left < 1:
            conversation.end = FinishReason.length
            raise self._over(FinishReason.length)
        try:
            transcript.set_context(context)
        except ValueError:
            problem = "the request shares not even its first token with this conversation"
            raise bodies.Refusal(409, f"{problem}; go on where it stands", DOES_NOT_CONTINUE) from None
        return left

    # -- what is recorded of turns -------------------------------------------------------------------------------------
    def _note_calls(self, said: bodies.Said) -> None:
        answers = [(f"Error: {call.problem}", Cause.malformed) if call.problem else ("", None) for call in said.calls]
        pairs = zip(said.calls, answers, strict=True)
        calls = tuple(tool_call(call.name, bodies.arguments_of(call), *answer) for call, answer in pairs)
        conversation = self.conversation
        conversation.turns[-1] = replace(conversation.turns[-1], calls=calls)
        conversation.calls += len(calls)
        limit = self.environment.max_tool_calls
        if limit is not None and conversation.calls > limit:
            conversation.end = conversation.end or FinishReason.calls

    def _note_answers(self, messages: Sequence[service.Message]) -> None:
        """Records that the last turn was answered with these messages."""
        turns = self.conversation.turns
        if not turns or not messages:
            return
        answers = [message["content"] for message in messages]
        calls = turns[-1].calls
        answered = [replace(call, answer=answer) for call, answer in zip(calls, answers, strict=False)]
        calls = (*answered, *calls[len(answered) :])
        turns[-1] = replace(turns[-1], calls=calls, answer="\n".join(answers))

    def _over(self, end: FinishReason) -> bodies.Refusal:
        key = {
            FinishReason.turns: f"environment.max_turns={self.environment.max_turns}",
            FinishReason.calls: f"environment.max_tool_calls={self.environment.max_tool_calls}",
        }.get(end, f"generation.max_tokens={self.sampling.max_tokens}, of all turns together")
        return bodies.Refusal(400, f"this conversation is over ({key}); end it, or raise that", OVER)


def _shown(body: bodies.Chat) -> tuple[Any, Any]:
    return body.shown_tools, body.variables


def _alike(known: service.Message, sent: service.Message) -> bool:
    """Whether an agent has sent a message again unchanged but for ids; clients may leave out empty fields."""
    one, other = ({**each, "content": each["content"].strip()} for each in (known, sent))
    for each in (one, other):
        each.pop("tool_call_id", None)
        each["tool_calls"] = [call["function"] for call in each.get("tool_calls", ())]
    return one == other


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
        self._speech = service.Speech(tokenizer, environment.syntax, f"{SECTION}.syntax")
        self._longest_row, self._traces = longest_row, traces
        self._version: int | None = None
        self._pool = EnvironmentPool(environment)
        self._inbox = service.Inbox()
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
    def _attend(self) -> None:
        """Answers the requests that have come."""
        asked: list[tuple[service.Request, Trajectory, bodies.Chat | bodies.Generate, service.Draw]] = []
        for request in self._inbox.take(most=min(self.environment.workers, len(self._open))):
            trajectory, body = self._open.get(request.key), request.body
            try:
                if trajectory is None:
                    raise bodies.Refusal(401, "this conversation is over", "invalid_api_key")
                if isinstance(body, bodies.Tokenize):
                    request.reply.set_result(service.tokenized(body, self._speech, self._longest_row))
                    continue
                assert isinstance(body, bodies.Chat | bodies.Generate), "there are three kinds of requests"
                asked.append((request, trajectory, body, trajectory.ask(body)))
            except bodies.Refusal as refusal:
                request.reply.set_exception(refusal)
        groups = service.drawn(self.generator, [draw for *_, draw in asked])
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
            replies_of_agents = self._pool.run(jobs, meanwhile=(self._inbox.fileno(), self._attend))
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
        file = self.folder / f"version_{version or 0:06d}-{digest_of_bytes(inputs)[:16]}.json"
        if file.is_file():
            return [_group_of(values, prompt) for values, prompt in zip(_read(file), prompts, strict=True)]
        groups = play()
        self.folder.mkdir(parents=True, exist_ok=True)
        payload = json.dumps([_values_of(group) for group in groups]).encode()
        head = json.dumps({"format": FORMAT, "sha256": digest_of_bytes(payload)}).encode()
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
        if header["sha256"] != digest_of_bytes(payload):
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
