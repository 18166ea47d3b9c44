"""What is tried of rewards, their servers and the reference answers before any run that scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from rlft.config.schema import SamplingRoot
from rlft.data.lazy import joined
from rlft.data.prompts import PromptSet, untokenised
from rlft.plan.rewards.references import check_references
from rlft.plan.rewards.writer import Writer, group_of
from rlft.plan.rules import check_metadata
from rlft.reward.http import ServerKeys, shown_url
from rlft.reward.workers.reward_spec import RewardSpec, check_with_rewards
from rlft.types import Completion, FinishReason, Group, Prompt, Unscored, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlft.tokens.ends import TurnEnds

TIME_LIMIT_S = 10.0
"""Time limit of a server's one request in seconds, if the reward's own timeout is longer."""


def check_scoring(
    config: SamplingRoot,
    rewards: Mapping[str, RewardSpec],
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    ends: TurnEnds,
    held_out: PromptSet | None = None,
) -> tuple[str, ...]:
    """Notes about the rewards and the prompts whose completions they score, after all that can be tried beforehand."""
    first = prompts.prompts[0]
    check_metadata(rewards, first)
    texts = joined(untokenised(prompts), untokenised(held_out) if held_out else ())
    writer = Writer(tokenizer, ends, config.generation.sampling)
    notes = (*check_with_rewards(rewards, texts), *check_references(config, rewards, texts, writer))
    check_servers(rewards, first)
    return notes


def check_servers(rewards: Mapping[str, RewardSpec], prompt: Prompt) -> None:
    """Asks each reward's server to score one completion of this prompt, its reference answer, without retries."""
    completion = Completion(text=prompt.answer, token_ids=(), logprobs=(), finish_reason=FinishReason.stop)
    group = group_of(prompt, [completion])
    for name, spec in rewards.items():
        reward = spec.build()
        if not isinstance(reward, ServerKeys) or not reward.try_first:
            continue
        single_attempt = replace(reward, retries=0, timeout=min(reward.timeout, TIME_LIMIT_S))
        try:
            cast("Callable[[Group], Any]", single_attempt)(group)  # whatever has ServerKeys is a reward
        except Unscored as error:
            problem = f"was asked for one score before the start, and {' '.join(str(error).split()).rstrip(',')}"
            remedy = f"start the server, correct its keys, or set reward.{name}.try_first=false to begin without it"
            raise UserError(f"reward.{name}.url", problem, got=shown_url(reward.url), remedy=remedy) from None
