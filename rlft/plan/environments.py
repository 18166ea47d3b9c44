"""Checks of the `environment` section, without torch, the model or the data; and what prompts show of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlft.config.instantiate import instantiate
from rlft.config.schema import RunConfig, SamplingRoot
from rlft.environment.protocol import Environment
from rlft.types import NOTHING, Prompt, Shown, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECTION = "environment"


def environment_of(config: SamplingRoot) -> Environment | None:
    """The environment that the config names; None for completions of a single turn.

    Raises:
        UserError: its keys are wrong, or its class is not an Environment.
    """
    return read_environment(config.environment)


def read_environment(section: Mapping[str, Any] | None) -> Environment | None:
    """As `environment_of`, from the section alone."""
    if not section:
        return None
    environment = instantiate(section, SECTION)
    if not isinstance(environment, Environment):
        remedy = "make it a subclass of rlft.environment.protocol.Environment, or use environment=class"
        raise UserError(f"{SECTION}._target_", "is no environment", got=section["_target_"], remedy=remedy)
    return environment


def check_rewarded(config: SamplingRoot) -> None:
    """Refuses a run in which neither rewards nor the environment would score completions."""
    environment = environment_of(config)
    if not config.reward and (environment is None or not environment.rewards_turns):
        raise UserError("reward", "is empty: nothing would be learned", remedy="try reward=[exact_match,format]")


def check_environment(config: SamplingRoot) -> None:
    """Refuses an environment whose keys are wrong, or whose limits do not fit those of the run."""
    environment = environment_of(config)
    if environment is None:
        return
    environment.check()
    generation, turn_tokens = config.generation, environment.turn_tokens
    if turn_tokens is not None and turn_tokens > generation.max_tokens:
        raise UserError(
            f"{SECTION}.turn_tokens",
            f"is more than all turns have together (generation.max_tokens={generation.max_tokens})",
            got=turn_tokens,
            remedy=f"set it to {generation.max_tokens} or less, or raise generation.max_tokens",
        )
    if environment.timeout < environment.call_timeout:
        raise UserError(
            f"{SECTION}.timeout",
            f"is less than a single call may take (environment.call_timeout={environment.call_timeout:g})",
            got=f"{environment.timeout:g}",
            remedy=f"raise it to {environment.call_timeout:g} or more, or lower environment.call_timeout",
        )
    if config.prompts.style == "raw":
        raise UserError(
            "prompts.style",
            "has no turns: only a chat template says how the policy's turns and the answers to them are separated",
            got="raw",
            remedy="set prompts.style=chat, or environment=null",
        )
    if isinstance(config, RunConfig) and config.cluster.engines and environment.plays_itself:
        raise UserError(
            "cluster.engines",
            "agents of environment=endpoint speak to the engine of the run's own process",
            got=config.cluster.engines,
            remedy="set it to 0, or use another environment",
        )
    if isinstance(config, RunConfig) and config.cluster.engines and environment.timeout >= config.cluster.timeout:
        raise UserError(
            f"{SECTION}.timeout",
            f"leaves an engine no time: one that has not answered for cluster.timeout={config.cluster.timeout:g} is"
            " taken for dead",
            got=f"{environment.timeout:g}",
            remedy=f"lower it, or raise cluster.timeout above {environment.timeout:g}",
        )


def prompt_additions(
    environment: Environment | None, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> Shown:
    """What prompts show of the environment, for `rlft.data.prompts.scan`; nothing without one.

    Raises:
        UserError: a tool has no types or docstring, or the chat template cannot hold such conversations.
    """
    if environment is None or not len(prompts):
        return NOTHING
    from rlft.environment.turn_template import Dialect, TurnTemplate

    if environment.plays_itself:
        TurnTemplate(tokenizer, {"user"}, opening=prompts[0].messages)
        return NOTHING
    return Dialect(environment, tokenizer, prompts[0].messages).shown
