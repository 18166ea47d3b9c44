"""What the images of prompts take on the trainer's device, beside their tokens: the vision tower, its pass, vectors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.initialization import no_init_weights

from rlft.data.prompts import PromptSet
from rlft.generation.memory import MemoryPart, When
from rlft.model.images import KEPT_BYTES, read_image, tower_class, tower_config
from rlft.tokens.images import processor_of
from rlft.tokens.text import RunTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerDemand:
    """Memory demand of a vision tower and of images, in bytes."""

    weights: int  # of the tower
    reading: int  # the most that is alive beside the weights while an image goes through it
    vectors: int  # of a prompt's images
    num_prompts: int  # number of prompts whose images are read in a run

    def parts(
        self, device: str, *, prompts_per_step: int, trained_at_once: int, sampled_at_once: int, towers: int = 1
    ) -> list[MemoryPart]:
        """The parts of the trainer's device.

        Vectors stay in main memory, those of a step once more. To a GPU go those of a micro-batch, twice: with its rows
        and with its packed row, and those of prompts that are decoded together.

        Args:
            trained_at_once: number of prompts in a micro-batch.
            sampled_at_once: number of prompts that are decoded together on this device, whose vectors the engine gets.
            towers: how many processes on this device have one: the trainer's, and engines with bases of their own.
        """
        copies = 2 if device != "cpu" else 1
        needs = [
            MemoryPart(name="vision tower", bytes=towers * self.weights, when=When.always, key="model.dtype"),
            MemoryPart(name="an image in the tower", bytes=towers * self.reading, when=When.reading),
            MemoryPart(
                name="vectors of images",
                bytes=copies * trained_at_once * self.vectors,
                when=When.updating,
                key="token_budget",
            ),
            MemoryPart(
                name="vectors of images that are sampled from",
                bytes=(device != "cpu") * sampled_at_once * self.vectors,
                when=When.sampling,
                key="prompts_per_step",
            ),
        ]
        if device == "cpu":
            kept = towers * min(KEPT_BYTES, self.num_prompts * self.vectors) + prompts_per_step * self.vectors
            needs.append(MemoryPart(name="vectors that are kept", bytes=kept, when=When.always, key="prompts_per_step"))
        return needs


def tower_demand(
    config: Any, dtype: torch.dtype, sets: Iterable[PromptSet | None], num_prompts: int, tokenizer: RunTokenizer
) -> TowerDemand | None:
    """The demand of the longest prompt's images, by an empty tower of the model's `config`; None if none has any."""
    places = [(each.prompts, each.longest_with_images) for each in sets if each is not None]
    shown = [prompts[index] for prompts, index in places if index is not None]
    if not shown:
        return None
    longest = max(shown, key=lambda prompt: len(prompt.token_ids))
    with no_init_weights():
        tower = tower_class(config)._from_config(tower_config(config), dtype=dtype).eval().base_model
    reading, vectors = 0, 0
    for image in longest.images:
        inputs = processor_of(tokenizer).tensors(image)
        with torch.no_grad(), LiveBytes(hollow=True) as alive:
            encoded = read_image(tower, inputs, torch.device("cpu"))
        reading = max(reading, alive.peak + sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor)))
        vectors += encoded.num_bytes
    weights = sum(x.nbytes for x in (*tower.parameters(), *tower.buffers()))
    return TowerDemand(weights=weights, reading=reading, vectors=vectors, num_prompts=num_prompts)


class LiveBytes(TorchDispatchMode):
    """Inside, `now` and `peak` are the bytes alive of storages that operations make; those of arguments do not count.

    hollow: whether parameters, and what is made of them, stand for any numbers: results are memory of their shape,
    and nothing is computed. Other arguments keep their numbers, since shapes may depend on them: towers leave
    out parts of an image that are padding.
    """

    def __init__(self, *, hollow: bool = False) -> None:
        super().__init__()
        self._hollow = hollow
        self._sizes: dict[int, int] = {}
        self._without_numbers: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = _tensors((args, kwargs))
        for tensor in arguments:
            self._note(tensor, 0, self._hollow and isinstance(tensor, torch.nn.Parameter))
        is_hollow = any(x.untyped_storage()._cdata in self._without_numbers for x in arguments)
        made = _shaped(func, args, kwargs or {}) if is_hollow else func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._note(tensor, tensor.untyped_storage().nbytes(), is_hollow)
        return made

    def _note(self, tensor: Tensor, size: int, is_hollow: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)
        if is_hollow and tensor.is_floating_point():
            self._without_numbers.add(storage._cdata)

    def _gone(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)
        self._without_numbers.discard(storage)


def _shaped(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A result of the operation's shape; the operation's own where that is a view, or its shape depends on numbers."""
    if any(returned.alias_info for returned in func._schema.returns):
        return func(*args, **kwargs)
    try:
        shapes = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))
        made = func(*shapes[0], **shapes[1])
    except RuntimeError:  # the shape depends on numbers, or torch has no rule for it
        return func(*args, **kwargs)
    return tree_map_only(Tensor, _without_numbers, made)


def _without_numbers(shape: Tensor) -> Tensor:
    """Memory of a shape; indices and conditions, on which later shapes may depend, are zeros."""
    memory = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
    return memory if shape.is_floating_point() else memory.zero_()


def _tensors(things: Any) -> list[Tensor]:
    return [x for x in tree_leaves(things) if isinstance(x, Tensor)]
