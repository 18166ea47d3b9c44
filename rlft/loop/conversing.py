"""Conversations over a run's engine, where the run has an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from rlft.cluster.engine_pool import EnginePool
from rlft.environment.conversations import Conversations
from rlft.environment.endpoint.agents import Endpoint
from rlft.environment.endpoint.played import PlayedByAgents
from rlft.environment.endpoint.traces import Traces
from rlft.environment.protocol import Environment
from rlft.generation.engine import Engine
from rlft.types import Generator


class SamplingPlan(Protocol):
    """What a plan that samples says of engine and environment."""

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
    """The generator, or conversations over it, whose `close` ends the environment's workers alone."""
    if environment is None:
        return generator
    if environment.plays_itself:
        agents = cast(Endpoint, environment)
        return PlayedByAgents(generator, agents, tokenizer, longest_row=longest_row, traces=traces)
    at_once = None if engine.divisible else engine.at_once
    return Conversations(generator, environment, tokenizer, at_once=at_once, longest_row=longest_row)


def conversing_here(plan: SamplingPlan, generator: Generator, tokenizer: Any, folder: Path | None = None) -> Generator:
    """As `conversing`, for what samples in this process; engines of a pool have conversations of their own.

    folder: of a run whose resume repeats steps, and so what agents from outside did in them; None for any other.
    """
    if isinstance(generator, EnginePool) or plan.engine is None:
        return generator
    config = plan.config
    traces = None if folder is None else Traces(folder, versions_to_keep(config.checkpoint.every))
    longest = config.prompts.max_tokens + config.generation.max_tokens
    return conversing(generator, config.generation.named(plan.engine), plan.environment, tokenizer, longest, traces)


def versions_to_keep(every: int) -> int | None:
    """How many versions of the policy a resume may go back, even from one checkpoint that is damaged; None: all."""
    return 2 * every + 2 if every else None
