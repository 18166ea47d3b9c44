"""The terms in which a run's memory is counted: parts of a device, sizes of a base, what an engine decodes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlft.types import Sampling

FLOAT32, INT64, FLOAT64 = 4, 8, 8  # bytes
PLAIN = Sampling(max_tokens=1, temperature=1.0)
TEACHER_SHARE = "snapshot.teacher_gpu_memory_utilization"


class When(StrEnum):
    """When a part is in use; all but `always` are never at the same time."""

    always = "always"
    reading = "reading images"  # while an image goes through a vision tower, before a step's other passes
    sampling = "sampling"
    annotating = "annotating"  # during the passes without gradient over a step's rows, before its updates
    updating = "updating"
    stepping = "stepping"  # while the optimizer changes the weights, after an update's passes
    publishing = "publishing"  # while engines get a version, after a step's updates


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """Bytes on one device."""

    name: str
    bytes: int
    when: When
    key: str | None = None  # the key to lower if the part is too large; None where nothing helps


def peak(parts: Sequence[MemoryPart]) -> int:
    """The most bytes that are in use at the same time."""
    by_time = bytes_by_time(parts)
    return by_time[When.always] + by_time[busiest(parts)]


def busiest(parts: Sequence[MemoryPart]) -> When:
    """When the most bytes are in use, besides those that always are."""
    by_time = bytes_by_time(parts)
    return max((when for when in When if when is not When.always), key=lambda when: by_time[when])


def bytes_by_time(parts: Sequence[MemoryPart]) -> dict[When, int]:
    """{when: bytes of the parts that are in use only then}"""
    return {when: sum(part.bytes for part in parts if part.when is when) for when in When}


def in_words(size: int) -> str:
    """A size in GiB or MiB, for people.

    >>> in_words(1610612736), in_words(3 * 2**20)
    ('1.50 GiB', '3 MiB')
    """
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:,.0f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What is known of a base, and of an adapter on it, from its config.json."""

    parameters: int  # number of the base's parameters
    base_bytes: int  # bytes of its weights as they are held
    itemsize: int  # bytes of a weight and of an activation
    lora: int  # number of one adapter's parameters
    adapted: int  # number of weights in the linear layers that the adapter lies on
    largest_adapted: int = 0  # number of weights in the largest of these
    adapter: Any  # what these layers keep of a token (rlft.model.activations.AdapterLayers)
    key_size: int  # elements of one token's keys and values in all layers
    config: Any  # transformers' config of the text model
    padded: str  # why prompts are not shared, and rows are padded; "" where they are packed
    kernels: Any  # what it will be computed with (rlft.model.kernels.selection.Decision)
    modules: Any  # what its decoder layers consist of (rlft.model.activations.LayerModules)
    linear: int = 0  # number of weights in its linear layers without the output head
    layers: tuple[int, ...] = ()  # number of weights in each decoder layer, if ranks can divide the layers; else empty
    # Which layers have an adapter, which have none, and the number of weights of the former.
    layer_kinds: tuple[str, str, int] = ("", "", 0)
    widest_mlp: int = 0  # elements of the gate of its widest MLP; 0 if it is the config's intermediate_size
    # Number of trained weights in matrices that map vectors to vectors (rlft.trainer.optimizer.is_matrix).
    matrices: int = 0
    trained: tuple[int, ...] = ()  # number of elements of each weight, where all are trained; else empty

    @property
    def packed(self) -> bool:
        """Whether prompts are shared and nothing is padded."""
        return not self.padded

    def divided_bytes(self, ranks: int) -> int:
        """Bytes of the base on rank 0's device where `ranks` ranks divide its layers (rlft.trainer.sharded_base).

        Rank 0 holds all weights outside layers, its own layers, and two buffers in which the other layers take turns.
        """
        own_layers = self.layers[::ranks] if ranks > 1 else ()
        return self.base_bytes + self.itemsize * (sum(own_layers) + 2 * max(self.layers) - sum(self.layers))

    @property
    def quantized(self) -> bool:
        """Whether some of its weights are held in fewer bits than `itemsize` says."""
        return self.base_bytes < self.parameters * self.itemsize

    @property
    def plain(self) -> bool:
        return self.kernels.choice == "plain"

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    @property
    def mlp_width(self) -> int:
        return self.widest_mlp or getattr(self.config, "intermediate_size", None) or 4 * self.hidden

    @property
    def layer_width(self) -> int:
        """Elements per token that are alive at once in a layer: its gated MLP's, and the hidden states around it."""
        return 3 * self.mlp_width + 3 * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The decoding of `samples` completions for each of `num_prompts` prompts."""

    num_prompts: int
    samples: int
    longest: tuple[int, ...]  # token ids of the longest prompt
    sampling: Sampling = PLAIN  # how they are drawn; `Load` has their length


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run has its engine do, and where."""

    decodings: tuple[Decoding, ...]  # that of a step and that of an evaluation, which happen one after the other
    max_tokens: int  # the most tokens of a completion
    max_sequence_tokens: int  # the most tokens of a prompt and its completion together
    device: str  # the trainer's device in torch's words, such as "cpu", "cuda" or "cuda:1"
    device_memory: int = 0  # bytes of a GPU's memory, 0 where they are not known
    draft_rows: int = 0  # the most rows that are sampled with drafts (`generation.drafts`)
    tower: int = 0  # bytes of the weights of a vision tower, which an engine with a base of its own holds as well


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLoad:
    """What a run has an engine do as its teacher, and where; `device` and its memory as in `Load`."""

    row_tokens: int  # the most tokens of a row
    device: str
    device_memory: int
    share: float  # share of a GPU's memory that the engine gets for it (TEACHER_SHARE)
    libraries: bool  # whether the engine's libraries are counted here, and not with the one that samples


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine takes of the trainer's device."""

    parts: tuple[MemoryPart, ...] = ()  # parts whose keys are the engine's own, such as `batch_size`
    # Bytes of the largest tensor that is freed in the trainer's process when sampling ends: an update that makes larger
    # tensors cannot use that room.
    freed_block: int = 0
    lacks: int = 0  # bytes by which the engine's own share of the device is too small for it to start
