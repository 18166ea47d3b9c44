"""Divides the base's decoder layers among the ranks: each holds some of them, and gets the others when it needs them.

Layer i is held by rank i % ranks. When a pass reaches a layer, forward or backward, all ranks announce which layer they
lack and which one they will need next, and the holder sends its weights into a buffer of each rank. What is lacking
arrives before anything is computed; the next layer arrives while this one is computed, unless ranks need different
ones. A rank that has no passes left takes part until all are done.

The graph of a pass never keeps the weights themselves, but the number of their layer, and gets them again when the
backward reaches them: so no buffer is read after another layer has been put into it. Inside a checkpointed layer
(`model.gradient_checkpointing`) they are kept for the backward of that layer alone, whose forward is recomputed first.

Only weights with two or more dimensions are divided; norms and biases, embeddings, the final norm and the LM head are
whole on every rank. Adapters lie next to the weights and do not concern this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlft.model.backbone import decoder_layers, layer_weights
from rlft.trainer.ranks import Exchange, RanksError

ALIGNMENT = 256  # weights begin at multiples of this many bytes in a buffer, as they do with memory of their own
NUM_BUFFERS = 2
"""One for the layer in use, one for the next. Autograd runs the functions of later layers first, so that even where a
layer's graph keeps the weights themselves (gradient checkpointing), nothing reads a layer once the one below it begins.
"""
NONE_LEFT = -1  # what a rank announces when it has no passes left


@dataclass(slots=True, kw_only=True)
class Layer:
    """The weights of one layer, concatenated, as they are sent."""

    # The weights on the device: in memory of their own if this rank holds the layer, else in a shared buffer.
    flat: Tensor
    buffer: int | None = None  # number of that buffer; None if this rank holds the layer
    copy: Tensor | None = None  # a copy in main memory, for a layer that this rank does not hold; None if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a graph keeps instead of a layer's weight or a view of it."""

    layer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ShardedLayers:
    """The layers of one base, on one of the ranks that divide them; a single one has all in main memory."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._layers: list[Layer] = []
        self._in_buffer: list[int | None] = [None] * NUM_BUFFERS
        self._layer_at: dict[int, int] = {}  # {address of its memory: layer} for layers that this rank holds
        self._buffer_at: dict[int, int] = {}  # {address of its memory: buffer}
        self._current: int | None = None  # the layer that was brought last
        self._arriving: tuple[int | None, Callable[[], None]] | None = None  # (layer of a buffer, waits for its end)
        self._exchange: Exchange | None = None
        self._stream: Any = None  # of copies from main memory on a GPU

    # -- how the base is placed ----------------------------------------------------------------------------------------
    def adopt(self, model: PreTrainedModel, device: torch.device) -> None:
        """Puts a model that was read into main memory on its device; layers that others hold stay in main memory."""
        weights = [layer_weights(layer) for layer in decoder_layers(model)]
        flats = [_concatenated(weights_of_layer) for weights_of_layer in weights]
        shapes = [[weight.shape for weight in weights_of_layer] for weights_of_layer in weights]
        for weights_of_layer in weights:
            for weight in weights_of_layer:
                weight.data = weight.data.new_empty(0)
        model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
        largest, dtype = max(len(flat) for flat in flats), flats[0].dtype
        others = sum(not self._holds(index) for index in range(len(flats)))
        # As many as are used: another tensor may get the address of one that is dropped.
        buffers = [torch.zeros(largest, dtype=dtype, device=device) for _ in range(min(NUM_BUFFERS, others))]
        self._buffer_at = {buffer.data_ptr(): number for number, buffer in enumerate(buffers)}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        num_buffered = 0
        for index in range(len(flats)):
            # The reference in the list is dropped, so that no layer is both in main memory and on the device.
            flat, flats[index] = flats[index], flats[index][:0]
            if self._holds(index):
                layer = Layer(flat=flat.to(device))
                self._layer_at[layer.flat.data_ptr()] = index
            else:
                number = num_buffered % NUM_BUFFERS
                num_buffered += 1
                copy = flat.pin_memory() if self._stream is not None else flat
                layer = Layer(flat=buffers[number][: len(flat)], buffer=number, copy=copy)
            self._layers.append(layer)
            for weight, shape, (start, end) in zip(
                weights[index], shapes[index], _places(shapes[index], dtype), strict=True
            ):
                weight.data = layer.flat[start:end].view(shape)
        for index, module in enumerate(decoder_layers(model)):
            for part in module.modules():  # kernels are tried on parts of a layer, too
                part.register_forward_pre_hook(partial(self._bring, index))

    def _holds(self, index: int) -> bool:
        return self._ranks > 1 and index % self._ranks == self._rank

    def drop_copies(self) -> None:
        """Frees the layers in main memory: from now on this rank can make passes only together with the others."""
        self._finish()
        for layer in self._layers:
            layer.copy = None

    # -- passes --------------------------------------------------------------------------------------------------------
    @contextmanager
    def passes(self, exchange: Exchange | None) -> Iterator[None]:
        """Inside, this rank can run forwards and backwards; at the end it sends layers until no rank makes passes.

        Each rank of the exchange can make any number of them. With None the layers come from this rank's main memory,
        as for passes without gradient outside of this block. Raises RanksError: another rank is gone, or is late.
        """
        self._finish()
        self._exchange, self._current = exchange, None
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
                yield
            while exchange is not None and self._announce(NONE_LEFT):
                pass
        finally:
            self._exchange = self._current = None
            with suppress(RanksError):  # after an error, nothing may arrive in a buffer that is used again
                self._finish()

    def _bring(self, index: int, *_: Any) -> None:
        """Puts this layer's weights where its parameters are, and begins to bring the next one's."""
        if index == self._current:
            return
        previous, self._current = self._current, None
        self._finish()
        following = self._following(previous, index)
        if self._exchange is not None:
            self._announce(index, following)
        else:
            if not self._has(index):
                self._copy(index)
                self._finish()
            if following is not None:
                self._copy(following)
        self._current = index

    def _has(self, index: int) -> bool:
        """Whether the layer's weights are where its parameters are."""
        buffer = self._layers[index].buffer
        return buffer is None or self._in_buffer[buffer] == index

    def _following(self, previous: int | None, index: int) -> int | None:
        """The layer that passes need after these two, unless it is there or would overwrite the one in use.

        Forwards go up and backwards down; what follows the last layer is its forward's backward, if anything. A next
        forward from the first layer is not foreseen: that layer's buffer is the one in use on some ranks only.
        """
        is_last = index == len(self._layers) - 1
        goes_down = is_last or (index > 0 and previous is not None and index < previous)
        following = index - 1 if goes_down else index + 1
        if following < 0 or self._has(following) or self._layers[following].buffer == self._layers[index].buffer:
            return None
        return following

    def _copy(self, index: int) -> None:
        """Begins to copy a layer from main memory."""
        layer, stream = self._layers[index], self._stream
        assert layer.copy is not None, "a rank without the layers in main memory makes no passes alone"
        assert layer.buffer is not None, "it lies in main memory"
        self._in_buffer[layer.buffer] = None
        if stream is None:
            layer.flat.copy_(layer.copy)
            self._arriving = index, lambda: None
            return
        stream.wait_stream(torch.cuda.current_stream(layer.flat.device))  # passes that still read the buffer
        with torch.cuda.stream(stream):
            layer.flat.copy_(layer.copy, non_blocking=True)
        self._arriving = index, lambda: torch.cuda.current_stream(layer.flat.device).wait_stream(stream)

    def _announce(self, index: int, following: int | None = None) -> bool:
        """One round: each layer that a rank lacks is sent to all; sending the next one begins if no rank needs another.

        Returns False if no rank has passes left.
        """
        assert self._exchange is not None, "there are other ranks"
        self._finish()
        base, none_left = len(self._layers) + 1, index == NONE_LEFT
        lacking = 0 if none_left or self._has(index) else index + 1
        own = NONE_LEFT if none_left else lacking * base + (0 if following is None else following + 1)
        announced = [divmod(number, base) for number in self._exchange.numbers(own) if number != NONE_LEFT]
        needed = {number - 1 for number, _ in announced if number}
        for number in sorted(needed):
            self._send(self._exchange, number, is_wanted=none_left or number in (index, following))
            self._finish()
        ahead = {number - 1 for _, number in announced if number} - needed
        if len(ahead) == 1:
            [number] = ahead
            self._send(self._exchange, number, is_wanted=none_left or number == following)
        return bool(announced)

    def _send(self, exchange: Exchange, index: int, *, is_wanted: bool) -> None:
        """Begins to send or receive a layer; one that is not wanted must not overwrite what lies in its buffer."""
        layer, buffer = self._layers[index], self._layers[index].buffer
        flat = layer.flat if is_wanted or buffer is None else torch.empty_like(layer.flat)
        if flat is layer.flat and buffer is not None:
            self._in_buffer[buffer] = None
        complete = exchange.begin_broadcast(flat, index % self._ranks, "exchange layers of the base")
        self._arriving = index if flat is layer.flat else None, complete

    def _finish(self) -> None:
        """Waits for the layer that is arriving, if there is one."""
        if self._arriving is None:
            return
        index, complete = self._arriving
        try:
            complete()
        except RanksError:
            self._arriving = None  # a second wait would only be late again
            raise
        self._arriving = None
        if index is not None and (buffer := self._layers[index].buffer) is not None:
            self._in_buffer[buffer] = index

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
    """`ShardedLayers.passes`, or nothing if the base is whole."""
    return nullcontext() if base is None else base.passes(exchange)


def _concatenated(weights: list[nn.Parameter]) -> Tensor:
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
