"""Conversations over any engine: a `Generator` whose completions have as many turns as the environment lets them have.

The engine is asked a round at a time, for the next turn of all conversations that go on. Token ids are concatenated
and never made again from text; what stands between turns is the chat template's suffix. The first round is that of a
run without an environment, and the seed of each later turn derives from that of the first and the turn's number, so
that a conversation is a function of (version of the policy, prompt, seed), as a completion is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlft.environment.dialect import Dialect
from rlft.environment.pool import EnvironmentFailure, EnvironmentPool, Job
from rlft.environment.protocol import Call, Cause, Environment
from rlft.environment.transcript import Transcript
from rlft.environment.worker import Kind, Order, Reply
from rlft.ops.seeds import derive
from rlft.types import (
    Adapter,
    Branch,
    Completion,
    FinishReason,
    Generator,
    Group,
    Ongoing,
    Prompt,
    Rollout,
    Sampling,
    ToolCall,
    Turn,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One conversation while it goes on.

    Args:
        key: names it to the workers.
        data_prompt: the prompt as the data has it.
        opening: what the policy reads first: the prompt, and what the environment has put behind it.
        opened_with: that, as text.
        transcript: the tokens behind the opening.
        history: of each turn the token ids, and what it was answered.
        limit: the most tokens behind the opening.
        seed: of its first turn.
        group_seed: of the first of its siblings.
        left_s: seconds that the environment may still take.
        orders: so many orders there have been.
    """

    key: int
    data_prompt: Prompt
    opening: Prompt
    transcript: Transcript
    limit: int
    seed: int
    group_seed: int
    left_s: float
    opened_with: str = ""
    history: list[tuple[Sequence[int], Sequence[tuple[str, str]]]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    calls: int = 0
    orders: int = 0
    version: int | None = None
    text: str = ""
    end: FinishReason | None = None

    def order(self, kind: Kind, *, seed: int | None = None, **values: object) -> Order:
        """The next order to its environment; random numbers derive from the conversation's seed and its number."""
        self.orders += 1
        own = derive(self.seed, self.orders, "environment")
        return Order(kind=kind, seed=own if seed is None else seed, **values)  # type: ignore[arg-type]


class Conversations:
    """A generator whose conversations go on over several turns. Make and use it in the thread that samples.

    Args:
        generator: the engine's; whoever opened it closes it.
        environment: which is acted in.
        tokenizer: the model's.
        at_once: completions that the engine computes together, where what they are depends on that
            (`Engine.divisible`): whole groups of so many are then played one after the other. None: all together.
        longest_row: the most tokens of a prompt, with what the environment has put behind it, and its completion.
    """

    def __init__(
        self,
        generator: Generator,
        environment: Environment,
        tokenizer: PreTrainedTokenizerBase,
        *,
        at_once: int | None,
        longest_row: int,
    ) -> None:
        self.generator, self.environment, self._tokenizer = generator, environment, tokenizer
        self._at_once, self._longest_row = at_once, longest_row
        self._pool = EnvironmentPool(environment)
        self._known_dialect: Dialect | None = None
        self._keys = itertools.count()

    # -- the interface of a generator ----------------------------------------------------------------------------------
    def load(self, adapter: Adapter) -> None:
        self.generator.load(adapter)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.generator.score(sequences)

    def rehearse(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> None:
        self.generator.rehearse(prompts, n, max_tokens)

    def sleep(self) -> None:
        self.generator.sleep()

    def close(self) -> None:
        """Ends the workers, not the engine. Safe to call twice."""
        self._pool.close()

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        """n conversations for each prompt, as completions with `mask` and `turns`.

        A prompt behind which the environment puts text has other tokens and messages in its group; where that text is
        not the same for all siblings, what differs stands at the beginning of their completions, masked.

        Raises:
            EnvironmentFailure: the environment cannot begin a conversation, or cannot say its reward.
        """
        if not prompts:
            return []
        self._known_dialect = self._known_dialect or Dialect(self.environment, self._tokenizer, prompts[0].messages)
        size = len(prompts) if self._at_once is None else max(1, self._at_once // n)
        parts = (slice(start, start + size) for start in range(0, len(prompts), size))
        return [group for part in parts for group in self._played(prompts[part], n, seeds[part], sampling)]

    # -- rounds --------------------------------------------------------------------------------------------------------
    def _played(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        groups = [
            [self._new(prompt, seed, i, sampling) for i in range(n)]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        everyone = [conversation for group in groups for conversation in group]
        try:
            self._open(everyone)
            self._first_round(groups, sampling)
            while going := [conversation for conversation in everyone if conversation.end is None]:
                self._round(going, sampling)
            self._add_rewards(everyone)
            self._write_texts(everyone)
        finally:
            self._pool.forget(conversation.key for conversation in everyone)
        return [group_of(group) for group in groups]

    def _new(self, prompt: Prompt, seed: int, index: int, sampling: Sampling) -> Conversation:
        return Conversation(
            key=next(self._keys),
            data_prompt=prompt,
            opening=prompt,
            transcript=Transcript(prompt.token_ids),
            limit=sampling.max_tokens,
            seed=seed + index,
            group_seed=seed,
            left_s=self.environment.timeout,
        )

    def _open(self, conversations: Sequence[Conversation]) -> None:
        """Begins each in its environment, and puts what that says behind the prompt."""
        if not self.environment.keeps_state:
            return
        orders = [
            [c.order(Kind.reset, seed=derive(c.group_seed, 0, "reset"), values=row_of(c.data_prompt))]
            for c in conversations
        ]
        for conversation, [reply] in zip(conversations, self._replies(conversations, orders), strict=True):
            if reply.cause is not None:
                problem = (
                    f"environment: cannot begin a conversation of prompt {conversation.data_prompt.id!r} ({reply.text})"
                )
                raise EnvironmentFailure(f"{problem}; repair its reset")
            if reply.text:
                prompt = conversation.data_prompt
                messages, ids = self._dialect.opened(prompt.messages, reply.text)
                conversation.opening = replace(prompt, messages=tuple(messages), token_ids=ids)
                conversation.opened_with, conversation.transcript = reply.text, Transcript(ids)
                conversation.limit = min(conversation.limit, self._longest_row - len(ids))
                if conversation.limit < 1:
                    problem = f"environment: what it puts behind prompt {prompt.id!r} leaves no token for an answer"
                    raise EnvironmentFailure(f"{problem}; raise prompts.max_tokens by {1 - conversation.limit} or more")

    def _first_round(self, groups: Sequence[Sequence[Conversation]], sampling: Sampling) -> None:
        """As without an environment where all siblings read the same: each prompt is computed once for its group."""
        alike, others = [], []
        for group in groups:
            same = all(c.opening.token_ids == group[0].opening.token_ids for c in group)
            (alike if same else others).append(group)
        if alike:
            self._sample(alike, sampling)
        if others:
            self._sample([[conversation] for group in others for conversation in group], sampling)
        self._answer([conversation for group in groups for conversation in group])

    def _round(self, going: Sequence[Conversation], sampling: Sampling) -> None:
        """The next turn of each, and what it is answered."""
        self._sample([[conversation] for conversation in going], sampling)
        self._answer(going)

    def _sample(self, groups: Sequence[Sequence[Conversation]], sampling: Sampling) -> None:
        """A turn of each conversation; those of one group read the same."""
        prompts, seeds = [], []
        for group in groups:
            first = group[0]
            left = first.limit - len(first.transcript.token_ids)
            tokens = min(left, self.environment.turn_tokens or sampling.max_tokens)
            ongoing = Ongoing(turn=len(first.turns), seed=first.seed, max_tokens=max(1, tokens))
            prompts.append(replace(first.opening, token_ids=tuple(first.transcript.context), ongoing=ongoing))
            seeds.append(first.seed if not first.turns else derive(first.seed, len(first.turns), "turn"))
        longest = max(sampling.tokens_of(prompt) for prompt in prompts)
        sampled = self.generator.sample(prompts, len(groups[0]), seeds, replace(sampling, max_tokens=longest))
        for group, prompt, answer in zip(groups, prompts, sampled, strict=True):
            for conversation, rollout in zip(group, answer.rollouts, strict=True):
                say(conversation, rollout, sampling.tokens_of(prompt))

    def _answer(self, conversations: Sequence[Conversation]) -> None:
        """What the environment answers to the turn that each has just had, and whether it goes on."""
        if self.environment.plays_a_game:
            self._answer_moves(conversations)
        else:
            self._answer_calls(conversations)

    # -- tools ---------------------------------------------------------------------------------------------------------
    def _answer_calls(self, conversations: Sequence[Conversation]) -> None:
        calls = [[] if c.end is FinishReason.length else self._dialect.calls(_turn_ids(c)) for c in conversations]
        orders: list[list[Order]] = []
        most = self.environment.max_tool_calls
        for conversation, made in zip(conversations, calls, strict=True):
            if most is not None and conversation.calls + len(made) > most:
                conversation.end = FinishReason.calls
            elif not made:
                conversation.end = conversation.end or FinishReason.stop
            conversation.calls += len(made)
            possible = [] if conversation.end else [call for call in made if not call.problem]
            orders.append([conversation.order(Kind.call, name=c.name, values=c.arguments) for c in possible])
        replies = self._replies(conversations, orders)
        for conversation, made, given in zip(conversations, calls, replies, strict=True):
            answered = list(_told(made, iter(given), ended=conversation.end))
            conversation.turns[-1] = replace(
                conversation.turns[-1], calls=tuple(answered), answer="\n".join(call.answer for call in answered)
            )
            self._go_on(conversation, [(call.name, call.answer) for call in answered])

    # -- games ---------------------------------------------------------------------------------------------------------
    def _answer_moves(self, conversations: Sequence[Conversation]) -> None:
        """Also of a turn that the limit cut: it is a move, if only the last one."""
        orders = [[c.order(Kind.step, text=c.turns[-1].text)] for c in conversations]
        for conversation, [reply] in zip(conversations, self._replies(conversations, orders), strict=True):
            if reply.done and not conversation.end:
                conversation.end = FinishReason.stop
            turn = replace(conversation.turns[-1], answer=reply.text, reward=reply.reward)
            if reply.cause is not None:
                call = ToolCall(name="step", arguments="", answer=reply.text, failed=True, cause=str(reply.cause))
                turn = replace(turn, calls=(call,))
            conversation.turns[-1] = turn
            self._go_on(conversation, [("", reply.text)])

    # -- details -------------------------------------------------------------------------------------------------------
    @property
    def _dialect(self) -> Dialect:
        assert self._known_dialect is not None, "it is known from the first call on"
        return self._known_dialect

    def _go_on(self, conversation: Conversation, answers: Sequence[tuple[str, str]]) -> None:
        """Puts the answers behind the turn, unless a limit ends the conversation here."""
        if conversation.end is None and conversation.left_s <= 0:
            conversation.end = FinishReason.time
        if conversation.end is None and len(conversation.turns) == self.environment.max_turns:
            conversation.end = FinishReason.turns
        if conversation.end is not None:
            return
        transcript, turn = conversation.transcript, _turn_ids(conversation)
        conversation.history.append((turn, answers))
        if self._dialect.rewrites:
            read = self._dialect.rewritten(
                conversation.data_prompt.messages, conversation.opened_with, conversation.history
            )
        else:
            read = (*transcript.context, *self._dialect.suffix(turn, answers))
        if len(transcript.token_ids) + transcript.added_by(read) >= conversation.limit:  # none is left for the policy
            conversation.end = FinishReason.length
            return
        transcript.turn_to(read)

    def _replies(
        self, conversations: Sequence[Conversation], orders: Sequence[Sequence[Order]]
    ) -> Iterator[Sequence[Reply]]:
        """What the environment answers to the orders of each conversation, whose time that takes."""
        ordered = [(c, own) for c, own in zip(conversations, orders, strict=True) if own]
        replies = iter(self._pool.run([Job(key=c.key, orders=own, left_s=c.left_s) for c, own in ordered]))
        for conversation, own in zip(conversations, orders, strict=True):
            own_replies = next(replies) if own else ()
            conversation.left_s -= sum(reply.seconds for reply in own_replies)
            yield own_replies

    def _add_rewards(self, conversations: Sequence[Conversation]) -> None:
        """What the environment gives for each conversation as a whole is a reward of its last turn."""
        if self.environment.plays_a_game or not self.environment.rewards_turns:
            return
        jobs = [
            Job(key=c.key, orders=[c.order(Kind.reward)], left_s=self.environment.call_timeout) for c in conversations
        ]
        for conversation, [reply] in zip(conversations, self._pool.run(jobs), strict=True):
            if reply.cause is not None:
                problem = f"environment: cannot say the reward of prompt {conversation.data_prompt.id!r} ({reply.text})"
                raise EnvironmentFailure(f"{problem}; repair its get_reward")
            if reply.reward is not None:
                conversation.turns[-1] = replace(conversation.turns[-1], reward=reply.reward)

    def _write_texts(self, conversations: Sequence[Conversation]) -> None:
        """The text of each: of a single turn as the engine gave it, else of all that stands behind the opening."""
        for conversation in conversations:
            said = conversation.transcript
            single = len(conversation.turns) == 1 and all(said.mask)
            conversation.text = conversation.turns[0].text if single else self._dialect.text(said.token_ids)


def row_of(prompt: Prompt) -> dict[str, object]:
    """The prompt as a row of data, whose columns `reset` gets."""
    messages = [dict(message) for message in prompt.messages]
    return {**prompt.metadata, "prompt": messages, "id": prompt.id, "answer": prompt.answer}


def say(conversation: Conversation, rollout: Rollout, limit: int) -> None:
    """Adds a turn that was sampled; of an engine that does not know the limit, what is within it."""
    completion = rollout.completion
    ids = [int(token) for token in completion.token_ids[:limit]]
    is_cut = len(completion.token_ids) > limit or completion.finish_reason.is_limit
    conversation.transcript.say(ids, completion.logprobs[:limit])
    conversation.turns.append(Turn(end=len(conversation.transcript.token_ids), text=completion.text))
    conversation.version = rollout.policy_version
    conversation.end = FinishReason.length if is_cut else None


def _turn_ids(conversation: Conversation) -> Sequence[int]:
    """The tokens of the last turn."""
    said = conversation.transcript
    before = said.mask[::-1].index(False) if False in said.mask else len(said.mask)
    return said.token_ids[len(said.token_ids) - before :]


def _told(calls: Sequence[Call], replies: Iterator[Reply], *, ended: FinishReason | None) -> Iterator[ToolCall]:
    """The calls with what they are answered; where the conversation has ended, none was made."""
    for call in calls:
        if call.problem:
            text, cause = f"Error: {call.problem}", Cause.malformed
        elif ended is not None:
            text, cause = "", Cause.limit
        else:
            reply = next(replies)
            text, cause = reply.text, reply.cause
        failed = cause is not None
        yield ToolCall(
            name=call.name, arguments=call.written, answer=text, failed=failed, cause=str(cause) if cause else ""
        )


def group_of(conversations: Sequence[Conversation]) -> Group:
    """The group of siblings; what is not the same in their openings becomes part of their completions."""
    openings = [conversation.opening for conversation in conversations]
    common = _common([opening.token_ids for opening in openings])
    first = openings[0]
    prompt = first if len(common) == len(first.token_ids) else replace(conversations[0].data_prompt, token_ids=common)
    rollouts = []
    for conversation in conversations:
        rest = conversation.opening.token_ids[len(common) :]
        said = conversation.transcript
        mask = (*[False] * len(rest), *said.mask)
        completion = Completion(
            text=conversation.text,
            token_ids=(*rest, *said.token_ids),
            logprobs=(*[0.0] * len(rest), *said.logprobs),
            finish_reason=conversation.end or FinishReason.stop,
            mask=None if all(mask) else mask,
            turns=tuple(replace(turn, end=turn.end + len(rest)) for turn in conversation.turns),
            branches=tuple(Branch(start=b.start + len(rest), after=b.after + len(rest)) for b in said.branches),
        )
        rollouts.append(Rollout(prompt=prompt, completion=completion, policy_version=conversation.version))
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def _common(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tokens that all rows begin with."""
    columns = zip(*rows, strict=False)
    return tuple(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
