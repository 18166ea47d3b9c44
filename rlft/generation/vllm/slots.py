"""Reads back what vLLM holds of an adapter: the tensors that its kernels multiply with.

vLLM rounds A and B to one dtype, multiplies B by the adapter's scale, fills both up with zeros to `max_lora_rank`, and
keeps layers that read the same input (q, k and v; gate and up) as slices of one layer. Matrices of experts lie
otherwise, and are not read. This relies on the source of vLLM 0.26 to 0.33: `LoRAModelManager` and its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlft.generation.loaded_adapter import DOWN, PREFIX, UP
from rlft.generation.shared_base import name_in

EXPERTS = ".experts"


class UnknownLayoutError(Exception):
    """This vLLM keeps adapters, or its prefix cache, in another way; the text says what was missing."""


@contextmanager
def known_layout() -> Iterator[None]:
    """Inside, what is read of vLLM's private attributes has to be there, and of the form that it has up to 0.33."""
    try:
        yield
    except (AttributeError, TypeError, IndexError, KeyError) as error:
        raise UnknownLayoutError(f"{type(error).__name__}: {error}") from error


@known_layout()
def read_slots(model: nn.Module, lora_id: int, rows: Mapping[str, int]) -> dict[str, Tensor]:
    """{PEFT's name: A `[rank, in]` or s B `[out, rank]`} of the adapter with this id; empty if it is in no slot.

    A layer whose slices differ in A is left out.

    lora_id: the id by which the adapter was loaded.
    rows: {the adapted module in PEFT's names: number of rows of its B}.

    Raises UnknownLayoutError: this vLLM keeps adapters in another way.
    """
    manager: Any = model.lora_manager
    if lora_id not in manager.lora_index_to_id:
        return {}
    index = manager.lora_index_to_id.index(lora_id)
    modules = {name_in(model, module.removeprefix(PREFIX)): module for module in rows if EXPERTS not in module}
    tensors: dict[str, Tensor] = {}
    for name, layer in manager.modules.items():
        parts = [modules.get(part) for part in manager.packed_modules.get(name, [name])]
        if not any(parts):
            continue
        downs, ups = (
            [_of_slot(each, index) for each in stacked] for stacked in (layer.lora_a_stacked, layer.lora_b_stacked)
        )
        first = 0
        for module in parts:
            last = first + 1
            # A module may have several slices, as q, k and v of a linear attention that reads them by one projection.
            while module is not None and last < len(ups) and sum(map(len, ups[first:last])) < rows[module]:
                last += 1
            if module is not None and all(torch.equal(downs[first], other) for other in downs[first + 1 : last]):
                tensors |= {module + DOWN: downs[first], module + UP: torch.cat(ups[first:last])}
            first = last
    return tensors


def _of_slot(stacked: Tensor, slot: int) -> Tensor:
    """`[rank, in]` or `[out, rank]` of `[slots, 1, ..]`."""
    if stacked.dim() != 4 or stacked.shape[1] != 1:
        raise UnknownLayoutError(f"tensors of an adapter have the shape {tuple(stacked.shape)}")
    return stacked[slot, 0]


@known_layout()
def num_cached_blocks(engine: Any) -> int:
    """Number of blocks in which the engine (vLLM's `LLMEngine`) would find beginnings of prompts again."""
    return len(engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)
