"""What a conversation has come to as tokens, while it goes on: what the policy read, and what it said.

Token ids are concatenated. Where the policy is to read something that does not continue what it has read and said so
far, because an agent or the chat template has written history anew, a branch begins: only what differs is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rlft.types import Branch


class Transcript:
    """The tokens behind a prompt.

    Args:
        prompt: token ids that the policy reads first, at least one.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.context: list[int] = list(prompt)
        """What the policy has read and said, in its order: a new turn is sampled behind it."""
        self._places = list(range(-len(self.context), 0))  # of each of these among the completion's tokens
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[bool] = []
        self.branches: list[Branch] = []

    def say(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Adds what was sampled."""
        self._add(token_ids, logprobs, sampled=True)

    def hear(self, token_ids: Sequence[int]) -> None:
        """Adds what the policy reads next."""
        self._add(token_ids, [0.0] * len(token_ids), sampled=False)

    def added_by(self, context: Sequence[int]) -> int:
        """Tokens that `turn_to` would add."""
        return len(context) - self._shared(context)

    def turn_to(self, context: Sequence[int]) -> None:
        """The policy reads this next, from its beginning; what is there already is not added again.

        Raises:
            ValueError: not even the first token is the one that the policy has read first.
        """
        shared = self._shared(context)
        if not shared:
            raise ValueError("a conversation goes on from none of its tokens")
        if shared < len(self.context):
            self.context, self._places = self.context[:shared], self._places[:shared]
            if self.branches and self.branches[-1].start == len(self.token_ids):  # nothing stands in it
                self.branches.pop()
            self.branches.append(Branch(start=len(self.token_ids), after=self._places[-1]))
        self.hear(context[shared:])

    def _shared(self, context: Sequence[int]) -> int:
        pairs = zip(self.context, context, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self._places += range(len(self.token_ids), len(self.token_ids) + len(token_ids))
        self.context += token_ids
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.mask += [sampled] * len(token_ids)
