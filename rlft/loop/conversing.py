"""Conversations over a run's engine, where the run has an environment."""

from __future__ import annotations

from typing import Any, Protocol

from rlft.cluster.engine_pool import EnginePool
from rlft.environment.conversations import Conversations
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
    generator: Generator, engine: Engine, environment: Environment | None, tokenizer: Any, longest_row: int
) -> Generator:
    """The generator, or conversations over it, whose `close` ends the environment's workers alone."""
    if environment is None:
        return generator
    at_once = None if engine.divisible else engine.at_once
    return Conversations(generator, environment, tokenizer, at_once=at_once, longest_row=longest_row)


def conversing_here(plan: SamplingPlan, generator: Generator, tokenizer: Any) -> Generator:
    """As `conversing`, for what samples in this process; engines of a pool have conversations of their own."""
    if isinstance(generator, EnginePool) or plan.engine is None:
        return generator
    config = plan.config
    longest = config.prompts.max_tokens + config.generation.max_tokens
    return conversing(generator, config.generation.named(plan.engine), plan.environment, tokenizer, longest)
