"""Conversations over a run's engine, where the run has an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from rlft.environment.conversations import Conversations
from rlft.environment.endpoint.agents import Endpoint
from rlft.environment.endpoint.played import PlayedByAgents
from rlft.environment.endpoint.traces import Traces
from rlft.environment.protocol import Environment
from rlft.generation.engine import Engine
from rlft.generation.pool import EnginePool
from rlft.types import Generator


class SamplingPlan(Protocol):
    """The fields of a plan that name its engine and environment."""

    @property
    def config(self) -> Any: ...
    @property
    def engine(self) -> str | None: ...
    @property
    def environment(self) -> Environment | None: ...


def conversing(
    generator: Generator,
    engine: Engine,
    environment: Environment | None,
    tokenizer: Any,
    longest_row: int,
    traces: Traces | None = None,
) -> Generator:
    """The generator itself, or conversations over it; closing these ends the environment's workers only."""
    if environment is None:
        return generator
    if environment.plays_itself:
        agents = cast(Endpoint, environment)
        return PlayedByAgents(generator, agents, tokenizer, longest_row=longest_row, traces=traces)
    at_once = None if engine.divisible else engine.at_once
    return Conversations(generator, environment, tokenizer, at_once=at_once, longest_row=longest_row)


def conversing_here(plan: SamplingPlan, generator: Generator, tokenizer: Any, folder: Path | None = None) -> Generator:
    """As `conversing`, for a generator in this process; the engines of a pool hold their conversations themselves.

    Args:
        plan: the plan of the run.
        generator: the run's generator.
        tokenizer: the base's tokenizer.
        folder: the run's folder, where traces of outside agents are kept so that a resume can repeat steps; None for
            a run that is not resumed.
    """
    if isinstance(generator, EnginePool) or plan.engine is None:
        return generator
    config = plan.config
    traces = None if folder is None else Traces(folder, versions_to_keep(config.checkpoint.every))
    longest = config.prompts.max_tokens + config.generation.max_tokens
    return conversing(generator, config.generation.named(plan.engine), plan.environment, tokenizer, longest, traces)


def versions_to_keep(every: int) -> int | None:
    """How many versions of the policy a resume may go back, even if one checkpoint is damaged; None for all."""
    return 2 * every + 2 if every else None
