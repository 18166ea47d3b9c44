"""What plans find out about the embedded task once in a process, where each plan finds it out anew: half a second.

The answers are kept by all that they depend on; other tasks and tokenizers are read each time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from rlft.data import prompts as data_prompts
from rlft.data.arithmetic import Arithmetic
from rlft.plan.rewards import references, tester
from rlft.plan.rewards.tester import Writer
from rlft.types import Split

MANY, SMALL = 100, 1000
"""Only so many prompts at once, of a tokenizer with fewer tokens: fewer may be those of a test of these functions."""

PURE = ("rlft.reward.exact_match.ExactMatch", "rlft.reward.format.Format")
"""Rewards whose scores depend on their keys and the texts alone."""


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arithmetic, "load", once(Arithmetic.load, of_task))
    patch.setattr(data_prompts, "_tokenise", once(data_prompts._tokenise, of_tokens))
    patch.setattr(references, "_scored", once(references._scored, of_scores))
    patch.setattr(tester, "try_rewards", once(tester.try_rewards, of_trials))
    patch.setattr(tester, "paid_for", once(tester.paid_for, of_paid))


def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gives a shallow copy of what it gave before for the same key; a key of None is not kept."""
    found: dict[Any, Any] = {}

    @wraps(function)
    def cached(*args: Any) -> Any:
        if (known := key(*args)) is None:
            return function(*args)
        if known not in found:
            found[known] = function(*args)
        return copy.copy(found[known])

    return cached


def of_task(task: Arithmetic, split: Split) -> Any:
    return repr(task), split


def of_tokens(prompts: Any, tokenizer: Any, style: str, shown: Any) -> Any:
    contents = tuple(tuple((m["role"], m["content"]) for m in prompt.messages) for prompt in prompts)
    return of_prompts(contents, tokenizer, repr((style, shown)))


def of_scores(judge: Any, prompts: Any, limit_s: float, title: str) -> Any:
    contents = tuple((prompt.tail, prompt.answer, prompt.token_ids) for prompt in prompts)
    writer = judge.writer
    settings = repr((judge.reward, writer.sampling, writer.ends, judge.each_s, limit_s))
    return of_prompts(contents, writer.tokenizer, settings)


def of_trials(config: Any, rewards: Any, prompts: Any, writer: Writer) -> Any:
    if not all(spec.target in PURE for spec in rewards.values()):
        return None
    contents = tuple((prompt.messages, prompt.tail, prompt.answer, prompt.metadata) for prompt in prompts)
    words = writer.tokenizer.backend_tokenizer.to_str()
    return words, repr((rewards, contents, writer.sampling, writer.ends, config.scoring, config.allows_unscorable))


def of_paid(config: Any, rewards: Any, prompts: Any, writer: Writer) -> Any:
    known = of_trials(config, rewards, prompts, writer)
    return known and (known, repr(config.environment))


def of_prompts(contents: tuple[Any, ...], tokenizer: Any, settings: str) -> Any:
    if len(contents) < MANY or len(tokenizer) >= SMALL or " at 0x" in settings:  # an address says nothing of an object
        return None
    return tokenizer.backend_tokenizer.to_str(), repr(tokenizer.chat_template), settings, contents
