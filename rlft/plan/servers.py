"""Requests one score from each reward server before a model is loaded, so that a missing server is refused early."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from rlft.reward.http import ServerKeys, shown_url
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.types import Completion, FinishReason, Group, Prompt, Rollout, Unscored, UserError

TIME_LIMIT_S = 10.0
"""Time limit of that request in seconds, if the reward's own timeout is longer."""


def check_servers(rewards: Mapping[str, RewardSpec], prompt: Prompt) -> None:
    """Asks each reward's server to score one completion of this prompt, its reference answer, without retries.

    Raises:
        UserError: at reward.<name>.url: there was no answer in time, or no score.
    """
    completion = Completion(text=prompt.answer, token_ids=(), logprobs=(), finish_reason=FinishReason.stop)
    group = Group(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, policy_version=None),))
    for name, spec in rewards.items():
        reward = spec.build()
        if not isinstance(reward, ServerKeys) or not reward.try_first:
            continue
        single_attempt = replace(reward, retries=0, timeout=min(reward.timeout, TIME_LIMIT_S))
        try:
            cast("Callable[[Group], Any]", single_attempt)(group)  # whatever has ServerKeys is a reward
        except Unscored as error:
            raise UserError(
                f"reward.{name}.url",
                f"was asked for one score before the start, and {' '.join(str(error).split()).rstrip(',')}",
                got=shown_url(reward.url),
                remedy=f"start the server, correct its keys, or set reward.{name}.try_first=false to begin without it",
            ) from None
