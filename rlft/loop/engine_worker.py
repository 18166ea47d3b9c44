"""An engine in a member of the cluster: it loads a base of its own, and answers the calls of the pool."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rlft.config.model import LoraSettings, ModelConfig
from rlft.config.schema import GenerationConfig, PromptsConfig
from rlft.environment.protocol import Environment
from rlft.generation.engine import Engine, EngineArgs
from rlft.generation.vllm.guest import DEAD_ENGINE
from rlft.loop.driver import deterministic_on_cpu
from rlft.loop.engines import engine_args, wrap_with_environment
from rlft.model.backbone import load_backbone, resolve_device
from rlft.model.roles import policy_alone
from rlft.types import Adapter, Prompt, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings that a member opens its engine with; `engine` is the engine's name in `generation`."""

    engine: str
    gpus: int
    model: ModelConfig
    lora: LoraSettings
    prompts: PromptsConfig
    generation: GenerationConfig
    token_budget: int
    seed: int
    environment: Environment | None = None


class EngineWorker:
    """The object of a member (`rlft.system.process.member`)."""

    def __init__(self, settings: EngineSettings) -> None:
        self._stack = ExitStack()
        device = resolve_device(settings.model.device)
        self._stack.enter_context(deterministic_on_cpu(device))
        engine: Engine = settings.generation.named(settings.engine).standalone().with_gpus(settings.gpus)
        args = self._args(engine, settings)
        self._engine = engine.open(args)
        # Conversations are held here: each group continues with its own engine, without waiting for other engines.
        self._generator = wrap_with_environment(self._engine, engine, settings.environment, args)
        self._version: int | None = None

    def load(self, version: int, config: Mapping[str, Any], sha256: str, weights: bytes) -> tuple[int, str]:
        """Loads an adapter from the bytes of a safetensors file if their checksum is right.

        Returns (version, sha256 of the bytes that arrived).
        """
        from safetensors.torch import load

        actual = hashlib.sha256(weights).hexdigest()
        if actual == sha256:
            self._generator.load(Adapter(version=version, weights=load(weights), config=config))
            self._version = version
        return version, actual

    def sample(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> tuple[int | None, list[list[tuple[Any, ...]]], list[Prompt | None]]:
        """(version, completions of each prompt, each prompt if an environment has changed it, else None).

        Completions are plain tuples, which are sent faster than objects.
        """
        try:
            groups = self._generator.sample(prompts, n, seeds, sampling)
        except Exception as error:
            _end_if_dead(error)
            raise
        versions = {rollout.policy_version for group in groups for rollout in group.rollouts}
        [version] = versions or {self._version}
        completions = [[rollout.completion.as_tuple() for rollout in group.rollouts] for group in groups]
        opened = [None if g.prompt is prompt else g.prompt for g, prompt in zip(groups, prompts, strict=True)]
        return version, completions, opened

    def sample_alone(
        self, prompts: Sequence[Prompt], n: int, seeds: Sequence[int], sampling: Sampling
    ) -> list[list[tuple[Any, ...]]]:
        """The completions of each prompt, as plain tuples, by the engine without conversations over it."""
        groups = self._engine.sample(prompts, n, seeds, sampling)
        return [[rollout.completion.as_tuple() for rollout in group.rollouts] for group in groups]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        try:
            return self._generator.score(sequences)
        except Exception as error:
            _end_if_dead(error)
            raise

    def rehearse(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> None:
        self._generator.rehearse(prompts, n, max_tokens)

    def sleep(self) -> None:
        self._generator.sleep()

    def started(self) -> None:
        """Returns once the engine is open; the call fails if opening it failed."""

    def close(self) -> None:
        if self._generator is not self._engine:
            self._generator.close()
        self._engine.close()
        self._stack.close()

    def _args(self, engine: Engine, settings: EngineSettings) -> EngineArgs:
        if not engine.on_trainers_base:
            return engine_args(settings, settings.lora)
        # The adapter's weights arrive with the first version.
        roles = policy_alone(
            load_backbone(settings.model),
            replace(settings.lora, path=None),
            token_budget=settings.token_budget,
            seed=settings.seed,
            temperature=settings.generation.temperature,
        )
        self._stack.callback(roles.close)
        return engine_args(settings, settings.lora, roles)


def _end_if_dead(error: Exception) -> None:
    """Ends the process if its engine is dead: an actor of Ray would live on, and fail every call."""
    if any(kind.__name__ == DEAD_ENGINE for kind in type(error).__mro__):
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)
