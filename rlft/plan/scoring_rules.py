"""Rules for rewards and the environment, without torch, the model or the data; and what prompts show of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlft.config.instantiate import instantiate, locate
from rlft.config.model import is_adapter
from rlft.config.schema import GenerationConfig, RunConfig, SamplingRoot, ScoringConfig
from rlft.environment.protocol import Environment
from rlft.reward.workers.reward_spec import RewardSpec
from rlft.types import NOTHING, Prompt, Shown, UserError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_time_limits(rewards: Mapping[str, Any], scoring: ScoringConfig) -> None:
    """Refuses a reward whose group_timeout is longer than the scorer's time limit."""
    for name, keys in rewards.items():
        group_timeout = keys.get("group_timeout") if isinstance(keys, Mapping) else None
        if isinstance(group_timeout, int | float) and group_timeout > scoring.timeout:
            problem = f"exceeds scoring.timeout={scoring.timeout:g}, which cuts the reward off"
            remedy = f"leave it out and set scoring.timeout={group_timeout:g}"
            raise UserError(f"reward.{name}.group_timeout", problem, got=f"{group_timeout:g}", remedy=remedy)


def check_stops_and_rewards(generation: GenerationConfig, rewards: Mapping[str, RewardSpec]) -> None:
    """Refuses a stop string that is cut off the text although a reward looks for it, such as a closing tag."""
    sampling = generation.sampling
    if sampling.include_stop_str_in_output:
        return
    for name, spec in rewards.items():
        for closing in (f"</{tag}>" for tag in _tags(spec.kwargs)):
            for stop in (stop for stop in sampling.stop if stop in closing or closing in stop):
                problem = f"is cut off the text, in which reward.{name} looks for {closing}"
                remedy = "set generation.include_stop_str_in_output=true, or use another stop string"
                raise UserError("generation.stop", problem, got=stop, remedy=remedy)


def _tags(kwargs: Mapping[str, Any]) -> Sequence[str]:
    """The names of the tags that a reward with these keys looks for."""
    tags = kwargs.get("tags") if kwargs.get("pattern") is None else None
    if isinstance(tags, Sequence) and not isinstance(tags, str):
        return tags
    location = kwargs.get("answer_in", kwargs.get("program_in"))
    return [kwargs["tag"]] if location == "tag" and isinstance(kwargs.get("tag"), str) else []


def check_metadata(rewards: Mapping[str, RewardSpec], prompt: Prompt) -> None:
    """Checks that the prompt's metadata have the fields that a reward reads (`needs_metadata`, `metadata_keys`)."""
    kept = f"the data keep no such field with their prompts, only {list(prompt.metadata) or 'none'}"
    for name, spec in rewards.items():
        needed = getattr(locate(spec.target, f"reward.{name}._target_"), "needs_metadata", None)
        if needed is not None and needed not in prompt.metadata:
            problem = f"scores prompts of data={needed} only"
            remedy = f"use data={needed}, or another reward"
            raise UserError(f"reward.{name}", problem, got=f"prompt {prompt.id}", remedy=remedy)
        for column in (column for column in spec.columns if column not in prompt.metadata):
            problem = f"{spec.target} takes {column}, and {kept}"
            remedy = f"set data.metadata_fields=[{column}], or give it a value in the reward's YAML"
            raise UserError(f"reward.{name}", problem, remedy=remedy)
        for key in getattr(locate(spec.target, f"reward.{name}._target_"), "metadata_keys", ()):
            field = spec.kwargs.get(key)
            if field is not None and field not in prompt.metadata:
                remedy = f"set data.metadata_fields=[{field}]"
                raise UserError(f"reward.{name}.{key}", kept, got=field, remedy=remedy)


SECTION = "environment"


def read_environment(section: Mapping[str, Any] | None) -> Environment | None:
    """The environment of this section of a config; None for completions of a single turn."""
    if not section:
        return None
    environment = instantiate(section, SECTION)
    if not isinstance(environment, Environment):
        remedy = "make it a subclass of rlft.environment.protocol.Environment, or use environment=class"
        raise UserError(f"{SECTION}._target_", "is no environment", got=section["_target_"], remedy=remedy)
    return environment


def check_rewarded(config: SamplingRoot) -> None:
    """Refuses a run in which neither rewards nor the environment would score completions."""
    environment = read_environment(config.environment)
    if not config.reward and (environment is None or not environment.rewards_turns):
        raise UserError("reward", "is empty: nothing would be learned", remedy="try reward=[exact_match,format]")


def check_environment(config: SamplingRoot) -> None:
    """Refuses an environment whose keys are wrong, or whose limits do not fit those of the run."""
    environment = read_environment(config.environment)
    if environment is None:
        return
    environment.check()
    generation, turn_tokens = config.generation, environment.turn_tokens
    if turn_tokens is not None and turn_tokens > generation.max_tokens:
        problem = f"is more than all turns have together (generation.max_tokens={generation.max_tokens})"
        remedy = f"set it to {generation.max_tokens} or less, or raise generation.max_tokens"
        raise UserError(f"{SECTION}.turn_tokens", problem, got=turn_tokens, remedy=remedy)
    if environment.timeout < environment.call_timeout:
        problem = f"is less than a single call may take (environment.call_timeout={environment.call_timeout:g})"
        remedy = f"raise it to {environment.call_timeout:g} or more, or lower environment.call_timeout"
        raise UserError(f"{SECTION}.timeout", problem, got=f"{environment.timeout:g}", remedy=remedy)
    problem = "has no turns: only a chat template says how the policy's turns and the answers to them are separated"
    remedy = "set prompts.style=chat, or environment=null"
    require(config.prompts.style != "raw", "prompts.style", problem, got="raw", remedy=remedy)
    if isinstance(config, RunConfig) and environment.plays_itself:
        problem = "a resume repeats conversations of environment=endpoint from a record, which holds no experts"
        by_engine = config.snapshot.routing == "engine"
        require(not by_engine, "snapshot.routing", problem, got="engine", remedy="use old or free")
    if isinstance(config, RunConfig) and config.cluster.engines:
        problem = "agents of environment=endpoint speak to the engine of the run's own process"
        remedy = "set it to 0, or use another environment"
        require(not environment.plays_itself, "cluster.engines", problem, got=config.cluster.engines, remedy=remedy)
        limit, timeout = config.cluster.timeout, f"{environment.timeout:g}"
        problem = f"leaves an engine no time: one that has not answered for cluster.timeout={limit:g} is taken for dead"
        remedy = f"lower it, or raise cluster.timeout above {timeout}"
        require(environment.timeout < limit, f"{SECTION}.timeout", problem, got=timeout, remedy=remedy)


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


def check_learned(rewards: Mapping[str, RewardSpec]) -> None:
    """Refuses a learned reward without a folder, in a run that does not train it."""
    for spec in rewards.values():
        if spec.runs_in_trainer and spec.kwargs["path"] is None:
            problem = "an untrained head scores every completion 0, and nothing trains it here"
            remedy = "give it a folder, such as a run of rlft rm"
            raise UserError(f"reward.{spec.name}.path", problem, got="null", remedy=remedy)


def check_classifiers(rewards: Mapping[str, RewardSpec]) -> dict[str, str]:
    """The fingerprints of reward models with a network of their own; refuses one whose
    output is not a single score, or that lacks tensors."""
    from rlft.model.identity import of_source
    from rlft.model.reward_model import check_classifier, classifier_source, read_classifier

    found: dict[str, str] = {}
    for spec in rewards.values():
        if spec.runs_in_trainer and not is_adapter(path := spec.kwargs["path"]):
            key = f"reward.{spec.name}.path"
            check_classifier(path, key)
            found |= of_source(classifier_source(path), read_classifier(path, key), key, key)
    return found
