"""One agent's conversation: its requests gathered into one row of tokens.

Ids are concatenated and never made from text again: if a request continues the conversation, only its new messages are
rendered. A request that does not, since the agent has cut or rewritten earlier messages, makes a branch of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlft.environment.conversations import Conversation, Transcript, say, tool_call
from rlft.environment.endpoint.agents import Endpoint
from rlft.environment.endpoint.bodies import Chat, Generate, Refusal, Said, arguments_of, as_message, unfit
from rlft.environment.endpoint.fields import Message as Sent
from rlft.environment.endpoint.service import Draw, check_ids, reply_of
from rlft.environment.endpoint.speech import Message, Speech
from rlft.environment.pool import Reply
from rlft.environment.protocol import Cause
from rlft.system.seeds import derive
from rlft.tokens.text import decode
from rlft.types import FinishReason, NextTurn, Rollout, Sampling, counted

DOES_NOT_CONTINUE = "does_not_continue"  # the code for a request that cannot be the next turn of its conversation
OVER = "conversation_over"  # the code for a request after a limit has ended the conversation
AGENT = "agent"  # the name under which an agent's failure stands among the calls of tools


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """A conversation while its agent plays."""

    conversation: Conversation  # its state, as for other environments; the opening is that of the first request
    environment: Endpoint
    speech: Speech
    sampling: Sampling
    longest_row: int  # the most tokens of the opening and all that follows
    model: str
    has_begun: bool = False
    known: list[Message] | None = None  # messages so far, the policy's included; None after a request of tokens
    shown: tuple[Any, Any] = ([], {})  # tools and variables of the last request
    is_asked: bool = False  # whether a request of it is being sampled
    last: Sequence[int] = ()  # token ids of the last turn
    was_cut: bool = False  # whether a limit ended the last turn

    def ask(self, body: Chat | Generate) -> Draw:
        """What a request needs from the engine; the transcript then holds what the policy reads before its turn.

        Refusal: it requests too much, cannot continue this conversation, or a limit has ended the conversation.
        """
        conversation = self.conversation
        if self.is_asked:
            problem = "another request of this conversation is under way; send one after the other"
            raise Refusal(409, problem, DOES_NOT_CONTINUE)
        if body.drawn.n != 1:
            raise unfit("n", "a conversation continues from one answer; leave it out", "unsupported_value")
        if len(conversation.turns) == self.environment.max_turns:
            conversation.end = FinishReason.turns
        if conversation.end is not None:
            raise self._over(conversation.end)
        messages = [message.plain for message in body.messages] if isinstance(body, Chat) else None
        context, answers = self._read(body, messages)
        if not self.has_begun:
            self._begin(context, messages)
        left = self._set_context(context)
        self._note_answers(answers)
        self.known, self.is_asked = messages, True
        self.shown = _shown(body) if isinstance(body, Chat) else ([], {})
        limit = min(filter(None, (left, self.environment.turn_tokens, body.most_tokens)))
        turn, seed = len(conversation.turns), conversation.seed
        check_ids(body.drawn.stop_token_ids or (), len(self.speech.tokenizer), "stop_token_ids")
        next_turn = NextTurn(turn=turn, seed=seed, max_tokens=limit)
        read = tuple(conversation.transcript.context)
        return Draw(
            prompt=replace(conversation.opening, token_ids=read, next_turn=next_turn),
            n=1,
            seed=derive(seed, turn, "turn") if turn else seed,
            sampling=body.drawn.with_stops(self.sampling, limit),
        )

    def add_turn(self, body: Chat | Generate, draw: Draw, rollout: Rollout) -> dict[str, Any]:
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
        reply, messages = reply_of(body, self.model, self.speech, draw, [completion])
        for said in messages:
            self._note_calls(said)
            assert self.known is not None, "a chat has messages"
            self.known.append(Sent.model_validate(as_message(said, draw.seed)).plain)
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
    def _read(self, body: Chat | Generate, messages: list[Message] | None) -> tuple[Sequence[int], Sequence[Message]]:
        """(all tokens that the policy reads before its turn, the messages of them that are new)."""
        if isinstance(body, Generate):
            return check_ids(body.token_ids, len(self.speech.tokenizer)), []
        assert messages is not None, "a chat has messages"
        spoken = self.speech.of(body)
        new = self._continued_by(messages) if _shown(body) == self.shown else None
        if new is not None and spoken.has_suffix(new):
            return (*self.conversation.transcript.context, *spoken.suffix(self.last, new)), new
        return spoken.prompt(messages), messages[-1:] if new is None else new

    def _continued_by(self, messages: list[Message]) -> list[Message] | None:
        """The messages after the conversation so far; None if these messages do not continue it."""
        known = self.known
        if known is None or len(messages) <= len(known):
            return None
        same = all(_alike(a, b) for a, b in zip(known, messages, strict=False))
        return messages[len(known) :] if same else None

    def _begin(self, context: Sequence[int], messages: list[Message] | None) -> None:
        conversation = self.conversation
        room = self.longest_row - len(context)
        if room < 1:
            problem = f"the first request has {counted(len(context), 'token')}, and with what follows there may be"
            remedy = "send less, or raise prompts.max_tokens"
            raise Refusal(400, f"{problem} {self.longest_row}; {remedy}", "context_length_exceeded")
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
            raise Refusal(409, f"{problem}; go on where it stands", DOES_NOT_CONTINUE) from None
        return left

    # -- what is recorded of turns -------------------------------------------------------------------------------------
    def _note_calls(self, said: Said) -> None:
        answers = [(f"Error: {call.problem}", Cause.malformed) if call.problem else ("", None) for call in said.calls]
        pairs = zip(said.calls, answers, strict=True)
        calls = tuple(tool_call(call.name, arguments_of(call), *answer) for call, answer in pairs)
        conversation = self.conversation
        conversation.turns[-1] = replace(conversation.turns[-1], calls=calls)
        conversation.calls += len(calls)
        limit = self.environment.max_tool_calls
        if limit is not None and conversation.calls > limit:
            conversation.end = conversation.end or FinishReason.calls

    def _note_answers(self, messages: Sequence[Message]) -> None:
        """Records that the last turn was answered with these messages."""
        turns = self.conversation.turns
        if not turns or not messages:
            return
        answers = [message["content"] for message in messages]
        calls = turns[-1].calls
        answered = [replace(call, answer=answer) for call, answer in zip(calls, answers, strict=False)]
        calls = (*answered, *calls[len(answered) :])
        turns[-1] = replace(turns[-1], calls=calls, answer="\n".join(answers))

    def _over(self, end: FinishReason) -> Refusal:
        key = {
            FinishReason.turns: f"environment.max_turns={self.environment.max_turns}",
            FinishReason.calls: f"environment.max_tool_calls={self.environment.max_tool_calls}",
        }.get(end, f"generation.max_tokens={self.sampling.max_tokens}, of all turns together")
        return Refusal(400, f"this conversation is over ({key}); end it, or raise that", OVER)


def _shown(body: Chat) -> tuple[Any, Any]:
    return body.shown_tools, body.variables


def _alike(known: Message, sent: Message) -> bool:
    """Whether an agent has sent a message again unchanged but for ids; clients may leave out empty fields."""
    one, other = ({**each, "content": each["content"].strip()} for each in (known, sent))
    for each in (one, other):
        each.pop("tool_call_id", None)
        each["tool_calls"] = [call["function"] for call in each.get("tool_calls", ())]
    return one == other
