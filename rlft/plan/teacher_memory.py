"""The memory that a teacher that is a separate model takes on the trainer's device, in transformers or vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlft.generation.memory import EngineMemory, MemoryPart, ModelSizes, When
from rlft.generation.vllm import memory as vllm_memory

TEACHER_SHARE = vllm_memory.TEACHER_SHARE_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDemand:
    """Memory demand of a teacher.

    Attributes:
        model: the sizes of its model.
        row_tokens: number of tokens of the longest row that it may read.
        prompt_tokens: number of prompt tokens, the hint included, of the longest row that it reads.
        share: the share of a GPU's memory that vLLM gets for it; None where transformers computes it.
    """

    model: ModelSizes
    row_tokens: int
    prompt_tokens: int
    share: float | None

    def memory(self, device: str, device_memory: int, *, beside_vllm: bool) -> EngineMemory:
        """The parts of its memory, with their full keys.

        Args:
            device: "cpu" or "cuda".
            device_memory: bytes of a GPU's memory; 0 if unknown.
            beside_vllm: whether the policy is sampled with vLLM, whose libraries are counted there.
        """
        if self.share is None:
            part = MemoryPart(name="teacher", bytes=self.model.base_bytes, when=When.always, key="snapshot.teacher")
            return EngineMemory(parts=(part,))
        if device == "cpu":
            return vllm_memory.teacher_on_a_cpu(self.model, self.row_tokens, libraries=not beside_vllm)
        return vllm_memory.teacher_on_a_gpu(self.model, self.row_tokens, device_memory, self.share)

    def other_shares(self, device_memory: int, room: int) -> Iterator[TeacherDemand]:
        """The same teacher with a share in which vLLM starts, or with a smaller one that leaves room for the rest.

        Args:
            device_memory: bytes of the GPU's memory.
            room: bytes of it that the rest of the run leaves free.
        """
        if self.share is None or not device_memory:
            return
        least_bytes = vllm_memory.teacher_least_bytes(self.model, self.row_tokens, device_memory)
        least = vllm_memory.share_of(least_bytes, device_memory)
        fitting = int(100 * room / device_memory) / 100
        if self.share < least:
            yield replace(self, share=least)
        elif least <= fitting < self.share:
            yield replace(self, share=fitting)
