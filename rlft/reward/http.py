"""The score that a reward server gives: a model or a sandbox that runs elsewhere, requested over HTTP.

Each request is about completions of one prompt; its lists have an entry for each completion, in order:

    POST <url>
    {"ids": ["gsm8k-17", ...],                                              the prompt's id
     "prompts": [[{"role": "user", "content": "What is 8 + 10?"}], ...],    its chat messages
     "answers": ["18", ...],                                                its reference answer, or ""
     "completions": ["It is 18.", ...],                                     what the model said
     "metadata": [{...}, ...]}                                              with send_metadata=true only

    200 {"scores": [1.0, ...]}      a finite number for each completion

A server may answer 429 or 503 with `Retry-After: <seconds>` to get the request again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlft.config.bounds import PositiveInt
from rlft.reward.remote import Request, ServerKeys, scores_in
from rlft.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Http(ServerKeys):
    """The server's score of each completion, unchanged.

    The other keys say how requests are sent (ServerKeys).

    Attributes:
        batch_size: the most completions in one request; None for the whole group.
        send_metadata: whether requests include the prompt's metadata, which must then be plain JSON.
    """

    batch_size: PositiveInt | None
    send_metadata: bool

    def __call__(self, group: Group) -> list[float]:
        indices = range(len(group.rollouts))
        size = self.batch_size or len(indices)
        batches = [indices[first : first + size] for first in indices[::size]]
        return self.ask([self._request(group, batch) for batch in batches], scores_in)

    def _request(self, group: Group, batch: Sequence[int]) -> Request:
        prompt, num = group.prompt, len(batch)
        body: dict[str, Any] = {
            "ids": [prompt.id] * num,
            "prompts": [[dict(message) for message in prompt.messages]] * num,
            "answers": [prompt.answer] * num,
            "completions": [group.rollouts[index].completion.text for index in batch],
        }
        if self.send_metadata:
            body["metadata"] = [dict(prompt.metadata)] * num
        return Request(body=body, completions=batch)
