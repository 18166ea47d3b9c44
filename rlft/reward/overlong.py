"""DAPO's soft penalty for completions that come close to the length limit (arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from dataclasses import dataclass

from rlft.config.bounds import PositiveInt
from rlft.types import Group, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """The penalty of each completion by its tokens, its end token included: max_tokens is L_max, cache L_cache.

    It is 0 up to max_tokens - cache tokens, from there linearly down to -1 at max_tokens, and -1 beyond.
    """

    max_tokens: PositiveInt
    cache: int | None

    def __post_init__(self) -> None:
        is_valid = self.cache is None or 0 < self.cache <= self.max_tokens
        problem = f"must be from 1 to max_tokens={self.max_tokens} tokens"
        require(is_valid, "cache", problem, got=self.cache, remedy="try a fifth of max_tokens")

    def __call__(self, group: Group) -> list[float]:
        lengths = [rollout.completion.num_sampled for rollout in group.rollouts]
        cache = max(1, round(self.max_tokens / 5)) if self.cache is None else self.cache
        over = [max(0, length - (self.max_tokens - cache)) for length in lengths]
        return [-min(tokens, cache) / cache if tokens else 0.0 for tokens in over]
