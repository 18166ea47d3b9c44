"""Tries before a run the environment that answers: one conversation with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from rlft.environment.protocol import Environment
from rlft.tokens.ends import turn_ends
from rlft.tokens.text import RunTokenizer
from rlft.types import EnvironmentFailure, Prompt, Sampling, Schema

if TYPE_CHECKING:
    from rlft.environment.endpoint.agents import Endpoint

ROOM = 10_000  # the most tokens of the conversation, so large that the trial does not reach its limits
MADE_UP: Mapping[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "null": None}
"""{type of a parameter: an argument}; a parameter of any other type gets the prompt's reference answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTrial:
    """A conversation with the environment, or the error that prevented one."""

    prompt: str  # id of the prompt that the conversation began with
    opening: str = ""  # text that the environment added to the prompt
    said: Sequence[tuple[str, str]] = ()  # (what the policy said, what the environment answered) for each turn
    failed: Sequence[str] = ()  # the cause of each failed call
    reward: float | None = None  # the sum of the environment's rewards; None if it gave none
    finish: str = ""  # why the conversation ended
    error: str | None = None  # of an environment that failed


def try_environment(environment: Environment, tokenizer: RunTokenizer, prompt: Prompt) -> EnvironmentTrial:
    """Has a scripted policy call the first tool, then answer, in the environment's own processes and time limits."""
    from rlft.environment.conversations import Conversations
    from rlft.environment.endpoint.played import AgentGenerator
    from rlft.environment.turn_template import Dialect
    from rlft.generation.scripted import ScriptedGenerator

    script, ends = ["done"], turn_ends(tokenizer, "chat")
    environment_alone = replace(environment, workers=1, turn_tokens=None)
    if environment.plays_itself:
        policy = ScriptedGenerator({"*": script}, tokenizer, ends)
        agents = cast("Endpoint", environment_alone)
        played = AgentGenerator(policy, agents, tokenizer, longest_row=2 * ROOM, traces=None)
    else:
        if not environment.plays_a_game:
            dialect, schema = Dialect(environment, tokenizer, prompt.messages), environment.schemas()[0]
            script.insert(0, dialect.written(schema["function"]["name"], made_up(schema, prompt)))
        policy = ScriptedGenerator({"*": [script]}, tokenizer, ends)
        played = Conversations(policy, environment_alone, tokenizer, at_once=None, longest_row=2 * ROOM)
    try:
        with closing(played):
            [group] = played.sample([prompt], 1, [0], Sampling(max_tokens=ROOM, temperature=1.0))
    except EnvironmentFailure as failure:
        return EnvironmentTrial(prompt=prompt.id, error=str(failure))
    completion = group.rollouts[0].completion
    prompt_text, opened_text = prompt.messages[-1]["content"], group.prompt.messages[-1]["content"]
    rewards = [turn.reward for turn in completion.turns if turn.reward is not None]
    return EnvironmentTrial(
        prompt=prompt.id,
        opening=opened_text.rpartition(prompt_text)[2].strip() if opened_text != prompt_text else "",
        said=[(turn.text, turn.answer) for turn in completion.turns],
        failed=[call.cause for turn in completion.turns for call in turn.calls if call.failed],
        reward=sum(rewards) if rewards else None,
        finish=str(completion.finish_reason),
    )


def made_up(schema: Schema, prompt: Prompt) -> dict[str, Any]:
    """Arguments of the right types for a tool."""
    parameters = schema["function"]["parameters"].get("properties", {})
    return {name: MADE_UP.get(str(of.get("type")), prompt.answer or "1") for name, of in parameters.items()}
