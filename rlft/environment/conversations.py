"""Conversations over any engine: a `Generator` whose completions have as many turns as the environment allows.

In each round the engine samples the next turn of every unfinished conversation. Token ids are concatenated and never
made from text again; what stands between turns is the chat template's suffix. The first round is the same as in a run
without an environment, and the seed of each later turn derives from the first turn's and the turn's number, so that a
conversation is a function of (version of the policy, prompt, seed), as a completion is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlft.environment.pool import EnvironmentPool, Job, Kind, Order, Reply
from rlft.environment.protocol import Call, Cause, Environment
from rlft.environment.turn_template import Dialect
from rlft.generation.engine import Generator, GeneratorOver
from rlft.system.seeds import derive
from rlft.tokens.text import RunTokenizer, decode, num_common
from rlft.types import (
    Branch,
    Completion,
    EnvironmentFailure,
    FinishReason,
    Group,
    NextTurn,
    Prompt,
    Rollout,
    Sampling,
    ToolCall,
    Turn,
)

if TYPE_CHECKING:
    from numpy import ndarray


class Transcript:
    """The tokens of a conversation so far: what the policy has read, at least one token, and what it has said.

    Token ids are concatenated. Where the next context does not continue what the policy has read and said so far,
    because an agent or the chat template has rewritten the history, a branch begins: only what differs is added.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.context: list[int] = list(prompt)
        """What the policy has read and said, in this order: its next turn is sampled after this context."""
        self._places = list(range(-len(self.context), 0))  # each token's index in the completion
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[bool] = []
        self.branches: list[Branch] = []
        self._opening = len(self.context)
        self.experts: ndarray | None = None
        """As `Completion.experts`, of the opening and all tokens after it, as far as an engine has noted them."""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Adds tokens: those that the policy has said, with their log-probs, or else those that it reads."""
        self._places += range(len(self.token_ids), len(self.token_ids) + len(token_ids))
        self.context += token_ids
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids) if logprobs is None else logprobs
        self.mask += [logprobs is not None] * len(token_ids)

    def note_experts(self, experts: ndarray) -> None:
        """Notes the experts `[tokens, layers, k]` of the context's tokens; those that are known already stay."""
        import numpy as np

        unknown = np.iinfo(experts.dtype).max
        noted = np.full((self._opening + len(self.token_ids), *experts.shape[1:]), unknown, experts.dtype)
        if self.experts is not None:
            noted[: len(self.experts)] = self.experts
        places = np.array(self._places[: len(experts)]) + self._opening
        new = (noted[places] == unknown).all((1, 2))
        noted[places[new]] = experts[new]
        self.experts = noted

    def added_by(self, context: Sequence[int]) -> int:
        """The number of tokens that `set_context` would add."""
        return len(context) - num_common(self.context, context)

    def set_context(self, context: Sequence[int]) -> None:
        """Makes this the context of the policy's next turn; only what differs from the current context is added.

        ValueError: not even the first token is the same.
        """
        shared = num_common(self.context, context)
        if not shared:
            raise ValueError("a conversation continues from none of its tokens")
        if shared < len(self.context):
            self.context, self._places = self.context[:shared], self._places[:shared]
            if self.branches and self.branches[-1].start == len(self.token_ids):  # the branch is empty
                self.branches.pop()
            self.branches.append(Branch(start=len(self.token_ids), after=self._places[-1]))
        self.add(context[shared:])


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The state of a conversation."""

    key: int
    data_prompt: Prompt  # the prompt as in the data
    opening: Prompt  # what the policy reads first: the prompt, and what the environment has added to it
    transcript: Transcript  # the tokens after the opening
    limit: int  # the most tokens after the opening
    seed: int  # seed of its first turn
    group_seed: int  # seed of the first turn of the first conversation in its group
    left_s: float  # seconds that the environment may still take
    opened_with: str = ""  # the text that the environment has added to the prompt
    history: list[tuple[Sequence[int], Sequence[tuple[str, str]]]] = field(default_factory=list)  # turns and answers
    turns: list[Turn] = field(default_factory=list)
    calls: int = 0  # how many so far
    orders: int = 0  # likewise
    version: int | None = None
    text: str = ""
    end: FinishReason | None = None

    def order(self, kind: Kind, *, seed: int | None = None, **values: object) -> Order:
        """The next order to its environment, whose seed derives from the conversation's and the number of the order."""
        self.orders += 1
        order_seed = derive(self.seed, self.orders, "environment")
        return Order(kind=kind, seed=order_seed if seed is None else seed, **values)  # type: ignore[arg-type]


class Conversations(GeneratorOver):
    """A generator of conversations with several turns. Make and use it in the thread that samples."""

    def __init__(
        self,
        generator: Generator,  # the engine's; whoever opened it closes it
        environment: Environment,
        tokenizer: RunTokenizer,
        *,
        # The most completions that the engine computes together, if its results depend on that (`Engine.divisible`):
        # whole groups with that many are then played one after the other. None: all together.
        at_once: int | None,
        longest_row: int,  # the most tokens of a prompt, with what the environment has added to it, and its completion
    ) -> None:
        super().__init__(generator)
        self.environment, self._tokenizer = environment, tokenizer
        self._at_once, self._longest_row = at_once, longest_row
        self._pool = EnvironmentPool(environment)
        self._known_dialect: Dialect | None = None
        self._keys = itertools.count()
        self._answer = self._answer_moves if environment.plays_a_game else self._answer_calls
        """Has the environment answer the turn that each has just had, and decides whether it goes on."""

    # -- the interface of a generator ----------------------------------------------------------------------------------
    def close(self) -> None:
        """Ends the workers, not the engine. Safe to call twice."""
        self._pool.close()

    def sample(self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling) -> list[Group]:
        """n conversations for each prompt, as completions with `mask` and `turns`.

        If the environment adds text to a prompt, the group's prompt includes it, in its tokens and messages; where that
        text is not the same for all siblings, what differs stands at the beginning of their completions, masked.
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
        groups = unbegun(self.environment, self._keys, prompts, n, seeds, sampling)
        conversations = [conversation for group in groups for conversation in group]
        try:
            self._open(conversations)
            # Where all siblings read the same at first, a prompt is computed once for its group, as usual.
            alike, others = list[list[Conversation]](), list[list[Conversation]]()
            for group in groups:
                is_alike = len({conversation.opening.token_ids for conversation in group}) == 1
                (alike if is_alike else others).extend([group] if is_alike else [[each] for each in group])
            for together in filter(None, (alike, others)):
                self._sample(together, sampling)
            self._answer(conversations)
            while unfinished := [conversation for conversation in conversations if conversation.end is None]:
                self._sample([[conversation] for conversation in unfinished], sampling)
                self._answer(unfinished)
            self._add_rewards(conversations)
            self._write_texts(conversations)
        finally:
            self._pool.forget(conversation.key for conversation in conversations)
        return [group_of(group) for group in groups]

    def _open(self, conversations: Sequence[Conversation]) -> None:
        """Begins each conversation in its environment, and adds what the environment says to the prompt."""
        if not self.environment.keeps_state:
            return
        orders = [
            [c.order("reset", seed=derive(c.group_seed, 0, "reset"), values=row_of(c.data_prompt))]
            for c in conversations
        ]
        for conversation, [reply] in zip(conversations, self._replies(conversations, orders), strict=True):
            prompt = conversation.data_prompt
            if reply.cause is not None:
                problem = f"environment: cannot begin a conversation of prompt {prompt.id!r} ({reply.text})"
                raise EnvironmentFailure(f"{problem}; repair its reset")
            if reply.text:
                messages, ids = self._dialect.opened(prompt.messages, reply.text)
                conversation.opening = replace(prompt, messages=tuple(messages), token_ids=ids)
                conversation.opened_with, conversation.transcript = reply.text, Transcript(ids)
                conversation.limit = min(conversation.limit, self._longest_row - len(ids))
                if conversation.limit < 1:
                    problem = f"environment: what it puts behind prompt {prompt.id!r} leaves no token for an answer"
                    raise EnvironmentFailure(f"{problem}; raise prompts.max_tokens by {1 - conversation.limit} or more")

    def _sample(self, groups: Sequence[Sequence[Conversation]], sampling: Sampling) -> None:
        """Samples a turn of each conversation; those in one group read the same."""
        prompts, seeds = [], []
        for group in groups:
            first = group[0]
            left = first.limit - len(first.transcript.token_ids)
            tokens = min(left, self.environment.turn_tokens or sampling.max_tokens)
            next_turn = NextTurn(turn=len(first.turns), seed=first.seed, max_tokens=max(1, tokens))
            prompts.append(replace(first.opening, token_ids=tuple(first.transcript.context), next_turn=next_turn))
            seeds.append(first.seed if not first.turns else derive(first.seed, len(first.turns), "turn"))
        longest = max(sampling.tokens_of(prompt) for prompt in prompts)
        sampled = self.generator.sample(prompts, len(groups[0]), seeds, replace(sampling, max_tokens=longest))
        for group, prompt, answer in zip(groups, prompts, sampled, strict=True):
            for conversation, rollout in zip(group, answer.rollouts, strict=True):
                say(conversation, rollout, sampling.tokens_of(prompt))

    # -- tools ---------------------------------------------------------------------------------------------------------
    def _answer_calls(self, conversations: Sequence[Conversation]) -> None:
        calls = [[] if c.end is FinishReason.length else self._dialect.calls(_turn_ids(c)) for c in conversations]
        orders: list[list[Order]] = []
        limit = self.environment.max_tool_calls
        for conversation, turn_calls in zip(conversations, calls, strict=True):
            if limit is not None and conversation.calls + len(turn_calls) > limit:
                conversation.end = FinishReason.calls
            elif not turn_calls:
                conversation.end = conversation.end or FinishReason.stop
            conversation.calls += len(turn_calls)
            possible = [] if conversation.end else [call for call in turn_calls if not call.problem]
            orders.append([conversation.order("call", name=c.name, values=c.arguments) for c in possible])
        replies = self._replies(conversations, orders)
        for conversation, turn_calls, turn_replies in zip(conversations, calls, replies, strict=True):
            answered = list(_answered_calls(turn_calls, iter(turn_replies), ended=conversation.end))
            conversation.turns[-1] = replace(
                conversation.turns[-1], calls=tuple(answered), answer="\n".join(call.answer for call in answered)
            )
            self._go_on(conversation, [(call.name, call.answer) for call in answered])

    # -- games ---------------------------------------------------------------------------------------------------------
    def _answer_moves(self, conversations: Sequence[Conversation]) -> None:
        """A turn that the limit has cut is answered, too: it is a move, though the last one."""
        orders = [[c.order("step", text=c.opening.tail + c.turns[-1].text)] for c in conversations]
        for conversation, [reply] in zip(conversations, self._replies(conversations, orders), strict=True):
            if reply.done and not conversation.end:
                conversation.end = FinishReason.stop
            turn = replace(conversation.turns[-1], answer=reply.text, reward=reply.reward)
            if reply.cause is not None:
                turn = replace(turn, calls=(tool_call("step", "", reply.text, reply.cause),))
            conversation.turns[-1] = turn
            self._go_on(conversation, [("", reply.text)])

    # -- details -------------------------------------------------------------------------------------------------------
    @property
    def _dialect(self) -> Dialect:
        assert self._known_dialect is not None, "it is known from the first call on"
        return self._known_dialect

    def _go_on(self, conversation: Conversation, answers: Sequence[tuple[str, str]]) -> None:
        """Adds the answers after the turn, unless a limit ends the conversation here."""
        if conversation.end is None and conversation.left_s <= 0:
            conversation.end = FinishReason.time
        if conversation.end is None and len(conversation.turns) == self.environment.max_turns:
            conversation.end = FinishReason.turns
        if conversation.end is not None:
            return
        transcript, turn = conversation.transcript, _turn_ids(conversation)
        conversation.history.append((turn, answers))
        if self._dialect.rewrites:
            context = self._dialect.rewritten(
                conversation.data_prompt.messages, conversation.opened_with, conversation.history
            )
        else:
            context = (*transcript.context, *self._dialect.suffix(turn, answers))
        # Whether no token is left for the policy's next turn.
        if len(transcript.token_ids) + transcript.added_by(context) >= conversation.limit:
            conversation.end = FinishReason.length
            return
        transcript.set_context(context)

    def _replies(
        self, conversations: Sequence[Conversation], orders: Sequence[Sequence[Order]]
    ) -> Iterator[Sequence[Reply]]:
        """The environment's replies to the orders of each conversation, which are counted in its time."""
        jobs = [
            Job(key=conversation.key, orders=conversation_orders, left_s=conversation.left_s)
            for conversation, conversation_orders in zip(conversations, orders, strict=True)
            if conversation_orders
        ]
        replies = iter(self._pool.run(jobs))
        for conversation, conversation_orders in zip(conversations, orders, strict=True):
            conversation_replies = next(replies) if conversation_orders else ()
            conversation.left_s -= sum(reply.seconds for reply in conversation_replies)
            yield conversation_replies

    def _add_rewards(self, conversations: Sequence[Conversation]) -> None:
        """Gives the environment's reward for each conversation as a whole to its last turn."""
        if self.environment.plays_a_game or not self.environment.rewards_turns:
            return
        jobs = [Job(key=c.key, orders=[c.order("reward")], left_s=self.environment.call_timeout) for c in conversations]
        for conversation, [reply] in zip(conversations, self._pool.run(jobs), strict=True):
            if reply.cause is not None:
                problem = f"environment: cannot say the reward of prompt {conversation.data_prompt.id!r} ({reply.text})"
                raise EnvironmentFailure(f"{problem}; repair its get_reward")
            if reply.reward is not None:
                conversation.turns[-1] = replace(conversation.turns[-1], reward=reply.reward)

    def _write_texts(self, conversations: Sequence[Conversation]) -> None:
        """Sets each text: that of a single turn as the engine gave it, else that of all tokens after the opening."""
        for conversation in conversations:
            transcript = conversation.transcript
            single = len(conversation.turns) == 1 and all(transcript.mask)
            conversation.text = conversation.turns[0].text if single else decode(self._tokenizer, transcript.token_ids)


def unbegun(
    environment: Environment,
    keys: Iterator[int],
    prompts: Sequence[Prompt],
    n: int,
    seeds: Sequence[int],
    sampling: Sampling,
) -> list[list[Conversation]]:
    """For each prompt n conversations in which nothing has been said."""
    return [
        [
            Conversation(
                key=next(keys),
                data_prompt=prompt,
                opening=prompt,
                transcript=Transcript(prompt.token_ids),
                limit=sampling.max_tokens,
                seed=seed + index,
                group_seed=seed,
                left_s=environment.timeout,
            )
            for index in range(n)
        ]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def row_of(prompt: Prompt) -> dict[str, object]:
    """The prompt as a row of data, whose columns `reset` gets."""
    messages = [dict(message) for message in prompt.messages]
    return {**prompt.metadata, "prompt": messages, "id": prompt.id, "answer": prompt.answer}


def say(conversation: Conversation, rollout: Rollout, limit: int) -> None:
    """Adds a sampled turn, cut at the limit in case the engine does not know it."""
    completion = rollout.completion
    ids = [int(token) for token in completion.token_ids[:limit]]
    is_cut = len(completion.token_ids) > limit or completion.finish_reason.is_limit
    transcript = conversation.transcript
    transcript.add(ids, completion.logprobs[:limit])
    if completion.experts is not None:
        transcript.note_experts(completion.experts[: len(transcript.context)])
    conversation.turns.append(Turn(end=len(transcript.token_ids), text=completion.text))
    conversation.version = rollout.policy_version
    conversation.end = FinishReason.length if is_cut else None


def _turn_ids(conversation: Conversation) -> Sequence[int]:
    transcript = conversation.transcript
    num_sampled = transcript.mask[::-1].index(False) if False in transcript.mask else len(transcript.mask)
    return transcript.token_ids[len(transcript.token_ids) - num_sampled :]


def _answered_calls(
    calls: Sequence[Call], replies: Iterator[Reply], *, ended: FinishReason | None
) -> Iterator[ToolCall]:
    """The calls with their answers; where the conversation has ended, none was made."""
    for call in calls:
        if call.problem:
            text, cause = f"Error: {call.problem}", Cause.malformed
        elif ended is not None:
            text, cause = "", Cause.limit
        else:
            reply = next(replies)
            text, cause = reply.text, reply.cause
        yield tool_call(call.name, call.written, text, cause)


def tool_call(name: str, arguments: str, answer: str, cause: Cause | None) -> ToolCall:
    """A call as it is recorded; with a cause it has failed."""
    return ToolCall(name=name, arguments=arguments, answer=answer, failed=cause is not None, cause=str(cause or ""))


def group_of(conversations: Sequence[Conversation]) -> Group:
    """The group of siblings; the parts of their openings that differ become parts of their completions."""
    openings = [conversation.opening for conversation in conversations]
    first = openings[0]
    common = first.token_ids[: min(num_common(first.token_ids, opening.token_ids) for opening in openings)]
    prompt = first if len(common) == len(first.token_ids) else replace(conversations[0].data_prompt, token_ids=common)
    rollouts = []
    for conversation in conversations:
        extra = conversation.opening.token_ids[len(common) :]
        transcript = conversation.transcript
        mask = (*[False] * len(extra), *transcript.mask)
        completion = Completion(
            text=conversation.text,
            token_ids=(*extra, *transcript.token_ids),
            logprobs=(*[0.0] * len(extra), *transcript.logprobs),
            finish_reason=conversation.end or FinishReason.stop,
            mask=None if all(mask) else mask,
            turns=tuple(replace(turn, end=turn.end + len(extra)) for turn in conversation.turns),
            branches=tuple(Branch(start=b.start + len(extra), after=b.after + len(extra)) for b in transcript.branches),
            experts=transcript.experts,
        )
        rollouts.append(Rollout(prompt=prompt, completion=completion, policy_version=conversation.version))
    return Group(prompt=prompt, rollouts=tuple(rollouts))
