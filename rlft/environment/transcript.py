"""The tokens of a conversation so far: what the policy has read, and what it has said.

Token ids are concatenated. Where the next context does not continue what the policy has read and said so far, because
an agent or the chat template has rewritten the history, a branch begins: only what differs is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rlft.types import Branch


class Transcript:
    """The tokens after a prompt.

    Args:
        prompt: token ids that the policy reads first, at least one.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.context: list[int] = list(prompt)
        """What the policy has read and said, in this order: its next turn is sampled after this context."""
        self._places = list(range(-len(self.context), 0))  # each token's index in the completion
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
        """The number of tokens that `turn_to` would add."""
        return len(context) - self._shared(context)

    def turn_to(self, context: Sequence[int]) -> None:
        """Makes this the context of the policy's next turn; only what differs from the current context is added.

        Raises:
            ValueError: not even the first token is the same.
        """
        shared = self._shared(context)
        if not shared:
            raise ValueError("a conversation goes on from none of its tokens")
        if shared < len(self.context):
            self.context, self._places = self.context[:shared], self._places[:shared]
            if self.branches and self.branches[-1].start == len(self.token_ids):  # the branch is empty
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
