"""Opens and closes generators, and a teacher in vLLM; those that are slow to start serve every job of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch

from rlft.config.generation import GenerationConfig, section_of
from rlft.config.model import LoraSettings, ModelConfig, teacher_settings
from rlft.generation.engine import BaseLender, Engine, Opening
from rlft.generation.vllm.teacher import TeacherSettings, VLLMTeacher
from rlft.loop.base_loading import load_teacher
from rlft.model.adapter_folder import POLICY, adapted_modules
from rlft.model.backbone import (
    Adopt,
    Backbone,
    ends_of,
    load_tokenizer,
    read_config,
    resolve_device,
    resolve_dtype,
    resolve_path,
)
from rlft.model.forward import Forward
from rlft.model.roles import Roles
from rlft.plan.adapters import modules_to_adapt
from rlft.plan.run_plan import Plan
from rlft.system.out_of_memory import Largest
from rlft.types import Generator

if TYPE_CHECKING:
    from rlft.config.schema import PromptsConfig, RunConfig, SamplingRoot


class Engines:
    """Opens generators and closes each of them once: those that several jobs share at the end of the context."""

    def __init__(self) -> None:
        self._shared: tuple[object, Generator] | None = None
        self._teacher: VLLMTeacher | None = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the shared generator and the teacher."""
        self._close_teacher()
        self._close_generator()

    def teacher(self, settings: TeacherSettings | None) -> VLLMTeacher | None:
        """The teacher in vLLM with these settings, an earlier job's if it has the same; None if `settings` is None.

        A teacher that the job does not use is closed, to free its memory.
        """
        if self._teacher is not None and self._teacher.settings != settings:
            self._close_teacher()
        if self._teacher is None and settings is not None:
            self._teacher = VLLMTeacher(settings)
        return self._teacher

    def _close_teacher(self) -> None:
        if self._teacher is not None:
            teacher, self._teacher = self._teacher, None
            teacher.close()

    def _close_generator(self) -> None:
        if self._shared is not None:
            (_, generator), self._shared = self._shared, None
            generator.close()

    @contextmanager
    def opened(self, engine: Engine, opening: Opening) -> Iterator[Generator]:
        """Yields the engine's generator, and closes it afterwards unless other jobs may share it."""
        if engine.shared:
            yield self._shared_by_jobs(engine, opening)
            return
        generator = engine.open(opening)
        try:
            yield generator
        finally:
            generator.close()

    def adopting(self, engine: Engine, opening: Opening) -> Adopt | None:
        """The function that puts the trainer's base on the engine's storage; None where each holds its own base.

        The engine is opened first, so that the device never holds two bases. Jobs of a sweep that share the engine get
        the same function, and so the same base.
        """
        if why_two_bases(engine, opening) is not None:
            return None
        assert engine.shared, "only an engine that stays open for all jobs can hold the base that they share"
        return cast(BaseLender, self._shared_by_jobs(engine, opening)).adopt

    def _shared_by_jobs(self, engine: Engine, opening: Opening) -> Generator:
        key = (engine, opening.of_the_engine)
        if self._shared is None or self._shared[0] != key:
            self._close_generator()  # two engines would not fit at the same time
            self._shared = (key, engine.open(opening))
        return self._shared[1]


def opened_teacher(engines: Engines, config: RunConfig, row_tokens: int) -> Forward | VLLMTeacher | None:
    """The teacher of this run if it is a separate model: its forward in transformers, or the vLLM that computes it.

    Args:
        engines: opens the teacher in vLLM.
        config: the run's config.
        row_tokens: number of tokens of the longest row that it will read.
    """
    settings = teacher_settings(config.snapshot, config.model)
    if settings is None or config.snapshot.teacher_engine == "transformers":
        engines.teacher(None)
        return load_teacher(config.snapshot, config.model)
    device = resolve_device(settings.device)
    return engines.teacher(
        TeacherSettings(
            model_path=str(resolve_path(settings.path)),
            dtype=str(resolve_dtype(settings.dtype, device)).removeprefix("torch."),
            trust_remote_code=settings.trust_remote_code,
            quantization=settings.quantization,
            row_tokens=row_tokens,
            gpu_memory_utilization=config.snapshot.teacher_gpu_memory_utilization,
            batch_invariant=config.generation.engines["vllm"].batch_invariant,
        )
    )


def largest_of(plan: Plan) -> dict[str, Largest]:
    """{stage: the engine's largest allocation in it}, for the message of a memory error; empty without an engine."""
    if plan.engine is None:
        return {}
    name, engine = plan.engine, plan.config.generation.named(plan.engine)
    return {
        stage: Largest(
            what=what,
            key=f"generation.{section_of(name)}.{key}",
            value=getattr(engine, key),
            may_change=key in engine.may_change,
        )
        for stage, (what, key) in engine.grows.items()
    }


def why_two_bases(engine: Engine, opening: Opening) -> str | None:
    """Why this engine holds a base of its own beside the trainer's; None where one copy serves both."""
    itemsize, quantized = getattr(torch, opening.dtype).itemsize, opening.quantization is not None
    return engine.why_two_bases(device=str(opening.device), itemsize=itemsize, quantized=quantized)


def adopting_of(engines: Engines, config: SamplingRoot, lora: LoraSettings, engine: str | None) -> Adopt | None:
    """As `Engines.adopting`, for the engine of this name in this config, before its base is loaded."""
    if engine is None:
        return None
    model, device = config.model, resolve_device(config.model.device)
    dtype = str(resolve_dtype(model.dtype, device)).removeprefix("torch.")
    chosen, itemsize = config.generation.named(engine), getattr(torch, dtype).itemsize
    if (
        chosen.why_two_bases(device=str(device), itemsize=itemsize, quantized=model.quantization is not None)
        is not None
    ):
        return None
    tokenizer = load_tokenizer(model)
    opening = _opening(None, tokenizer, device, dtype, model, config.prompts, config.generation, lora.rank, config.seed)
    return engines.adopting(chosen, replace(opening, lora_modules=_modules_of(lora, model)))


def opening_of(config: SamplingRoot, rank: int, slot: Any, backbone: Backbone) -> Opening:
    """The arguments for opening the engine of this run.

    Args:
        config: the run's config.
        rank: the rank of the adapters that the engine will load.
        slot: usually a `Roles`, whose base is shared by an engine in this process, and whose adapters it loads.
        backbone: the trainer's base.
    """
    return opening_on(backbone, config.model, config.prompts, config.generation, slot=slot, rank=rank, seed=config.seed)


def opening_on(
    backbone: Backbone,
    model: ModelConfig,
    prompts: PromptsConfig,
    generation: GenerationConfig,
    *,
    slot: Any,
    rank: int,
    seed: int,
) -> Opening:
    """As `opening_of`, from single sections of a config."""
    dtype = str(backbone.model.dtype).removeprefix("torch.")
    opening = _opening(slot, backbone.tokenizer, backbone.device, dtype, model, prompts, generation, rank, seed)
    if not isinstance(slot, Roles):
        return opening
    return replace(opening, lora_modules=_last_parts(adapted_modules(slot.weights(POLICY))))


def opening_apart(
    model: ModelConfig, prompts: PromptsConfig, generation: GenerationConfig, *, lora: LoraSettings, seed: int
) -> Opening:
    """As `opening_of`, for an engine in a process without the trainer's base."""
    device = resolve_device(model.device)
    dtype = str(resolve_dtype(model.dtype, device)).removeprefix("torch.")
    opening = _opening(None, load_tokenizer(model), device, dtype, model, prompts, generation, lora.rank, seed)
    return replace(opening, lora_modules=_modules_of(lora, model))


def _modules_of(lora: LoraSettings, model: ModelConfig) -> frozenset[str]:
    """`Opening.lora_modules` for adapters of these settings, without the base."""
    return _last_parts(modules_to_adapt(lora, model, read_config(model)))


def _last_parts(modules: Iterable[str]) -> frozenset[str]:
    return frozenset(name.rpartition(".")[2] for name in modules)


def _opening(
    slot: Any,
    tokenizer: Any,
    device: torch.device,
    dtype: str,
    model: ModelConfig,
    prompts: PromptsConfig,
    generation: GenerationConfig,
    rank: int,
    seed: int,
) -> Opening:
    return Opening(
        slot=slot,
        tokenizer=tokenizer,
        ends=ends_of(model, prompts.style, tokenizer),
        device=device,
        model_path=str(resolve_path(model.path)),
        revision=model.revision,
        dtype=dtype,
        quantization=model.quantization,
        trust_remote_code=model.trust_remote_code,
        lora_rank=rank,
        max_sequence_tokens=prompts.max_tokens + generation.max_tokens,
        seed=seed,
    )
