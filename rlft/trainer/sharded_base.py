"""The base's decoder layers divided among the ranks: each holds some of them, and gets the others as it needs them.

Layer i is held by rank i % ranks. When a pass reaches a layer, forward or backward, all ranks announce which one they
need, and its holder sends its weights to all into a buffer of theirs. The exchange is over before anything is computed
with the layer. A rank that has no passes left takes part until all are done.

The graph of a pass never keeps the weights themselves, but which layer they are of, and gets them again when its
backward reaches them: so no buffer is read after another layer has been put into it. Inside a checkpointed layer
(`model.gradient_checkpointing`) they are kept for the backward of that layer alone, whose forward is made anew first.

Weights have two dimensions and more; norms and biases, embeddings, the final norm and the LM head are whole everywhere.
Adapters lie beside the weights, and are nothing to this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlft.model.backbone import decoder_layers, layer_weights
from rlft.trainer.ranks import Exchange

ALIGNMENT = 256
"""Bytes between the beginnings of weights in a buffer are a multiple of it, as where each has memory of its own."""
NUM_BUFFERS = 2
"""The layer in use, and the one before it: with gradient checkpointing a layer's graph has its weights themselves."""
NONE_LEFT = -1
"""What a rank announces that makes no more passes."""


@dataclass(slots=True, kw_only=True)
class Layer:
    """The weights of one layer in a row, as they are sent.

    Args:
        flat: where they are on the device: this rank's own memory, or a buffer that layers take turns in.
        buffer: the number of that buffer; None where the memory is this rank's own.
        copy: in main memory, of a layer that this rank does not hold; None where it keeps none.
    """

    flat: Tensor
    buffer: int | None = None
    copy: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a graph keeps in the place of a weight of a layer, or of a view of it."""

    layer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ShardedLayers:
    """The layers of one base, on one rank.

    Args:
        rank: of this process.
        ranks: that divide the layers; a single one has them all in main memory.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._layers: list[Layer] = []
        self._in_buffer: list[int | None] = [None] * NUM_BUFFERS
        self._layer_at: dict[int, int] = {}  # by the address of its memory, of layers that this rank holds
        self._buffer_at: dict[int, int] = {}
        self._current: int | None = None  # the layer whose exchange was the last
        self._exchange: Exchange | None = None

    # -- how the base comes to lie so ----------------------------------------------------------------------------------
    def adopt(self, model: PreTrainedModel, device: torch.device) -> None:
        """Puts a model that was read into main memory on its device; layers that others hold stay in main memory."""
        weights = [layer_weights(layer) for layer in decoder_layers(model)]
        flats = [_in_a_row(of_layer) for of_layer in weights]
        shapes = [[weight.shape for weight in of_layer] for of_layer in weights]
        for of_layer in weights:
            for weight in of_layer:
                weight.data = weight.data.new_empty(0)
        model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
        largest, dtype = max(len(flat) for flat in flats), flats[0].dtype
        buffers = [torch.zeros(largest, dtype=dtype, device=device) for _ in range(NUM_BUFFERS)]
        self._buffer_at = {buffer.data_ptr(): number for number, buffer in enumerate(buffers)}
        num_elsewhere = 0
        for index in range(len(flats)):
            flat, flats[index] = flats[index], flats[index][:0]  # so that no layer is in main memory and on the device
            if self._ranks > 1 and index % self._ranks == self._rank:
                layer = Layer(flat=flat.to(device))
                self._layer_at[layer.flat.data_ptr()] = index
            else:
                number = num_elsewhere % NUM_BUFFERS
                num_elsewhere += 1
                copy = flat.pin_memory() if device.type == "cuda" else flat
                layer = Layer(flat=buffers[number][: len(flat)], buffer=number, copy=copy)
            self._layers.append(layer)
            for weight, shape, (start, end) in zip(
                weights[index], shapes[index], _places(shapes[index], dtype), strict=True
            ):
                weight.data = layer.flat[start:end].view(shape)
        for index, module in enumerate(decoder_layers(model)):
            for part in module.modules():  # kernels are tried on parts of a layer, too
                part.register_forward_pre_hook(partial(self._before, index))

    def drop_copies(self) -> None:
        """Frees the layers in main memory: from now on this rank makes passes with the others only."""
        for layer in self._layers:
            layer.copy = None

    # -- passes --------------------------------------------------------------------------------------------------------
    @contextmanager
    def passes(self, exchange: Exchange | None) -> Iterator[None]:
        """Inside, forwards and backwards; at its end this rank sends layers until no rank makes passes any more.

        exchange: with the ranks that make passes at the same time, each any number; None: with the layers that this
        rank has in main memory, as all passes without gradient are that are made outside.

        Raises:
            RanksError: another rank is gone, or is late.
        """
        self._exchange, self._current = exchange, None
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
                yield
            while exchange is not None and self._announce(NONE_LEFT):
                pass
        finally:
            self._exchange = self._current = None

    def _before(self, index: int, module: nn.Module, args: Any) -> None:
        self._bring(index)

    def _bring(self, index: int) -> None:
        """Has this layer's weights where its parameters are."""
        if self._exchange is None:
            self._from_main_memory(index)
        elif index != self._current:
            self._announce(index)
            self._current = index

    def _from_main_memory(self, index: int) -> None:
        layer = self._layers[index]
        if layer.buffer is None or self._in_buffer[layer.buffer] == index:
            return
        assert layer.copy is not None, "a rank without the layers in main memory makes no passes alone"
        self._in_buffer[layer.buffer] = None
        layer.flat.copy_(layer.copy, non_blocking=True)
        self._in_buffer[layer.buffer] = index

    def _announce(self, index: int) -> bool:
        """One round: each layer that a rank needs is sent to all. False if none needs any."""
        assert self._exchange is not None, "there are others"
        needed = {number for number in self._exchange.numbers(index) if number != NONE_LEFT}
        for other in sorted(needed):
            self._receive(self._exchange, other, index)
        return bool(needed)

    def _receive(self, exchange: Exchange, index: int, own: int) -> None:
        """Sends or gets a layer; own: the one that this rank needs, whose buffer no other may be put into."""
        layer, what = self._layers[index], "exchange layers of the base"
        if layer.buffer is None:
            exchange.broadcast(layer.flat, self._rank, what)
        elif own not in (index, NONE_LEFT):  # only ranks whose passes go through the layers in another order
            exchange.broadcast(torch.empty_like(layer.flat), index % self._ranks, what)
        else:
            self._in_buffer[layer.buffer] = None
            exchange.broadcast(layer.flat, index % self._ranks, what)
            self._in_buffer[layer.buffer] = index

    # -- what graphs keep ----------------------------------------------------------------------------------------------
    def _packed(self, tensor: Tensor) -> Tensor | Kept:
        address = tensor.untyped_storage().data_ptr()
        index = self._layer_at.get(address)
        if index is None and (number := self._buffer_at.get(address)) is not None:
            index = self._in_buffer[number]
            assert index is not None, "a forward has brought the layer"
        if index is None:
            return tensor
        return Kept(layer=index, size=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset()))

    def _unpacked(self, kept: Tensor | Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._bring(kept.layer)
        return self._layers[kept.layer].flat.as_strided(kept.size, kept.stride, kept.offset)


def passes(base: ShardedLayers | None, exchange: Exchange | None) -> AbstractContextManager[None]:
    """`ShardedLayers.passes`; nothing where the base is whole."""
    return nullcontext() if base is None else base.passes(exchange)


def _in_a_row(weights: list[nn.Parameter]) -> Tensor:
    """A copy of the weights, one after the other."""
    places = _places([weight.shape for weight in weights], weights[0].dtype)
    flat = torch.zeros(places[-1][1], dtype=weights[0].dtype)
    for weight, (start, end) in zip(weights, places, strict=True):
        flat[start:end] = weight.data.reshape(-1)
    return flat


def _places(shapes: list[torch.Size], dtype: torch.dtype) -> list[tuple[int, int]]:
    """(first element, the one after the last) of each weight in a row."""
    step, start, places = ALIGNMENT // dtype.itemsize, 0, []
    for shape in shapes:
        places.append((start, start + shape.numel()))
        start += -(-shape.numel() // step) * step
    return places
