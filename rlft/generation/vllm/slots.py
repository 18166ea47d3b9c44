"""Reads back what vLLM holds of an adapter, and writes versions into it: the tensors that its kernels multiply with.

vLLM rounds A and B to one dtype, multiplies B by the adapter's scale, fills both up with zeros to `max_lora_rank`, and
keeps layers that read the same input (q, k and v; gate and up) as slices of one layer. Matrices of experts lie
otherwise, and are not read. This relies on the source of vLLM 0.26 to 0.33: `LoRAModelManager` and its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlft.generation.loaded_adapter import DOWN, PREFIX, UP
from rlft.generation.shared_base import name_in
from rlft.system.device import copy_each, zero_each

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
    tensors: dict[str, Tensor] = {}
    for module, downs, ups in _layers(model, lora_id, rows):
        if all(torch.equal(downs[0], other) for other in downs[1:]):
            tensors |= {module + DOWN: downs[0], module + UP: ups[0] if len(ups) == 1 else torch.cat(ups)}
    return tensors


class Slots(NamedTuple):
    """The places of an adapter in vLLM, each with the tensor that goes there: A, and rows of B with their scale."""

    whole: list[Tensor]
    down_places: list[Tensor]
    downs: list[Tensor]
    up_places: list[Tensor]
    ups: list[Tensor]
    scales: list[float]


@torch.no_grad()
def write_slots(model: nn.Module, lora_id: int, weights: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
    """Writes A and s B of another version into the slot of the adapter with this id, as vLLM rounds and multiplies.

    Args:
        lora_id: the id by which an adapter with the same layers and shapes was loaded.
        weights: {PEFT's name: A or B}.
        scales: {the adapted module in PEFT's names: s}.

    Raises UnknownLayoutError: this vLLM keeps adapters in another way, or has no such slot; nothing has been written.
    """
    slots = _slots_of(model, lora_id, weights, scales)
    ups = _scaled(slots.ups, slots.scales, slots.whole[0].dtype)
    zero_each(slots.whole)  # also what fills up the rank
    copy_each(slots.down_places + slots.up_places, slots.downs + ups)


@known_layout()
def _slots_of(model: nn.Module, lora_id: int, weights: Mapping[str, Tensor], scales: Mapping[str, float]) -> Slots:
    slots, unwritten = Slots([], [], [], [], [], []), set(weights)
    rows = {module: len(weights[module + UP]) for module in scales}
    for module, of_down, of_up in _layers(model, lora_id, rows):
        down, up = weights[module + DOWN], weights[module + UP]
        if sum(map(len, of_up)) != len(up) or any(slot.is_inference() for slot in of_down + of_up):
            raise UnknownLayoutError(f"its slots for {module} are others")
        slots.whole.extend(of_down + of_up)
        slots.down_places.extend(slot[: len(down)] for slot in of_down)
        slots.downs.extend([down] * len(of_down))
        slots.up_places.extend(slot[:, : up.shape[1]] for slot in of_up)
        slots.ups.extend(up.split([len(slot) for slot in of_up]))
        slots.scales.extend([scales[module]] * len(of_up))
        unwritten -= {module + DOWN, module + UP}
    if unwritten:
        raise UnknownLayoutError(f"there is no slot for {min(unwritten)}")
    return slots


def _scaled(ups: list[Tensor], scales: list[float], dtype: torch.dtype) -> list[Tensor]:
    """Each B rounded to the dtype, then times its scale and rounded again; all at once if they have one scale."""
    if len(set(scales)) > 1:
        return [up.to(dtype) * scale for up, scale in zip(ups, scales, strict=True)]
    flat = torch.cat([up.reshape(-1) for up in ups]).to(dtype) * scales[0]
    return [part.view_as(up) for part, up in zip(flat.split([up.numel() for up in ups]), ups, strict=True)]


def _layers(
    model: nn.Module, lora_id: int, rows: Mapping[str, int]
) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """(the adapted module in PEFT's names, the slots of its A, those of its B one below the other) of each module.

    A module may have several slices, as q, k and v of a linear attention that reads them by one projection.
    """
    manager: Any = model.lora_manager
    if lora_id not in manager.lora_index_to_id:
        return
    index = manager.lora_index_to_id.index(lora_id)
    modules = {name_in(model, module.removeprefix(PREFIX)): module for module in rows if EXPERTS not in module}
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
            while module is not None and last < len(ups) and sum(map(len, ups[first:last])) < rows[module]:
                last += 1
            if module is not None:
                yield module, downs[first:last], ups[first:last]
            first = last


def _of_slot(stacked: Tensor, slot: int) -> Tensor:
    """`[rank, in]` or `[out, rank]` of `[slots, 1, ..]`."""
    if stacked.dim() != 4 or stacked.shape[1] != 1:
        raise UnknownLayoutError(f"tensors of an adapter have the shape {tuple(stacked.shape)}")
    return stacked[slot, 0]


@known_layout()
def num_cached_blocks(engine: Any) -> int:
    """Number of blocks in which the engine (vLLM's `LLMEngine`) would find beginnings of prompts again."""
    return len(engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)
