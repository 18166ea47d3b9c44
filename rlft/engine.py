"""From the chosen engine's name to a live generator; a vLLM engine is started once and serves every job of a sweep."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import Slot, TransformersGenerator
from rlft.model.backbone import Backbone, resolve_path
from rlft.roots import SamplingRoot
from rlft.targets import locate
from rlft.types import Generator


class Engines:
    """Opens generators; on leaving the context every process and file of theirs is gone."""

    def __init__(self) -> None:
        self._vllm: dict[tuple[Any, ...], Generator] = {}

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for generator in self._vllm.values():
            generator.close()
        self._vllm.clear()

    def open(self, engine: str, config: SamplingRoot, rank: int, roles: Slot, backbone: Backbone) -> Generator:
        """The generator for this engine: `transformers`, `vllm`, `scripted`, or `module.Class` from outside the tree.

        rank: of the adapters it will be given. roles: where an engine on the trainer's own base keeps its copy.
        A class from outside is called with the keywords config, roles and backbone.
        """
        generation = config.generation
        if engine == "transformers":
            settings = generation.transformers
            return TransformersGenerator(
                roles, backbone.tokenizer, backbone.device, settings.batch_size, weights=settings.weights
            )
        if engine == "scripted":
            return ScriptedGenerator(generation.scripted.answers, backbone.tokenizer)
        if engine == "vllm":
            key = (config.model, rank, config.prompts, generation.max_tokens, generation.vllm)
            if key not in self._vllm:
                self.close()  # two engines do not fit beside each other
                self._vllm[key] = self._start_vllm(config, rank, backbone)
            return self._vllm[key]
        return locate(engine, "generation.engine")(config=config, roles=roles, backbone=backbone)

    def _start_vllm(self, config: SamplingRoot, rank: int, backbone: Backbone) -> Generator:
        from rlft.generation.vllm import VLLMGenerator

        settings = config.generation.vllm
        return VLLMGenerator(
            model_path=resolve_path(config.model.path),
            dtype=str(backbone.model.dtype).removeprefix("torch."),
            trust_remote_code=config.model.trust_remote_code,
            revision=config.model.revision,
            quantization=config.model.quantization,
            max_lora_rank=rank,
            max_sequence_tokens=config.prompts.max_tokens + config.generation.max_tokens,
            max_num_seqs=settings.max_num_seqs,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            sleep=settings.sleep,
            enforce_eager=settings.enforce_eager,
            seed=config.seed,
        )
