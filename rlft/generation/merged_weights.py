"""Adds an adapter to a base that trainer and engine share while the engine samples, and takes it back exactly.

It stays there for all that the engine computes with it (the freshness check, an evaluation, the turns of
conversations) until the trainer computes, so that a published version is usually added and taken back once.

For every adapted matrix W the engine multiplies with M = round(W + s B A). Taking it back gives round(M - s B A), which
equals W except in a few elements, whose bits are kept. Nothing is taken on trust: a checksum tells whether a matrix is
W or M, so that after an interruption at any point taking back again repairs it, and no change goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlft.generation.loaded_adapter import DOWN, PREFIX, UP, scale_of
from rlft.generation.shared_base import INTEGERS, SharedBase, SharedBaseError, checksum
from rlft.types import Adapter, UserError

BLOCK = 2**23  # number of a matrix's elements that are added up at a time, in float32


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """s B A of one matrix: scale, B `[out, r]` and A `[r, in]` in float32, on the matrix's device."""

    scale: float
    up: Tensor
    down: Tensor

    def rows(self, block: slice) -> Tensor:
        """Rows of s B A, the same bits at each call."""
        return (self.up[block] @ self.down).mul_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """A matrix to which a delta is about to be added, or has been."""

    name: str  # the trainer's name of the matrix
    weight: Tensor  # the shared matrix `[out, in]`
    delta: Delta
    base_checksum: str  # its checksum without the delta
    merged_checksum: str  # its checksum with the delta
    index: Tensor  # positions in the flat matrix whose bits subtraction does not restore, int32 in main memory
    bits: Tensor  # their bits, in main memory


class MergedWeights:
    """The adapter of an engine that samples with merged weights.

    model: the trainer's model on that base; its forwards take back what is added, and are refused while the engine
    samples.
    """

    def __init__(self, shared: SharedBase, model: nn.Module) -> None:
        self.shared = shared
        self._deltas: Mapping[str, Delta] = {}
        self._base_checksums: dict[str, str] = {}
        self._added: list[Added] = []
        self._is_merged = self._is_sampling = False
        shared.before_check = self.take_back
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]  # every forward begins there
        self._guard = embeddings.register_forward_pre_hook(self._refuse_or_take_back)

    def load(self, adapter: Adapter) -> None:
        """Samples with this adapter from now on. UserError if it lies on a matrix that is not shared."""
        self.take_back()
        deltas = deltas_of(adapter)
        for name in deltas:
            if name not in self.shared.shared:
                why = self.shared.apart.get(name, "not in the trainer's model by this name")
                problem = f"needs every adapted matrix to be shared, and {name} is kept apart ({why})"
                remedy = "use generation.vllm.weights=adapter"
                raise UserError("generation.vllm.weights", problem, got="merged", remedy=remedy)
        on_device = {}
        for name, delta in deltas.items():
            weight = self.shared.shared[name].own
            on_device[name] = Delta(delta.scale, delta.up.to(weight.device), delta.down.to(weight.device))
            if name not in self._base_checksums:
                self._base_checksums[name] = checksum(weight.data)
        self._deltas = on_device

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Inside, the shared weights include the adapter, and keep it until `take_back`, which an error calls at once.

        The trainer's forwards, another adapter and the checks of a checkpoint call it as well.
        """
        if not self._is_merged:
            self.take_back()
        try:
            self._is_sampling = True
            if not self._is_merged:
                for name, delta in self._deltas.items():
                    self._add(name, delta)
                _wait_for_device(self._added)
                self._is_merged = True
            yield
            self._is_sampling = False
        except BaseException:
            self.take_back()
            raise

    def tensors(self) -> dict[str, Tensor]:
        """{PEFT's name: A, or s B} of what is added while the engine samples."""
        tensors = {}
        for name, delta in self._deltas.items():
            stem = PREFIX + name.removesuffix(".weight")
            tensors |= {stem + DOWN: delta.down, stem + UP: delta.up * delta.scale}
        return tensors

    def take_back(self) -> None:
        """Makes the shared weights the base's again, wherever merging was interrupted. Ctrl-C waits until it is done.

        Raises SharedBaseError: a matrix is neither the base's nor the merged one.
        """
        interruption: KeyboardInterrupt | None = None
        self._is_merged = False
        while self._added:
            try:
                _wait_for_device(self._added)
                _restore(self._added[-1])
                self._added.pop()
            except KeyboardInterrupt as error:
                interruption = error
        self._is_sampling = False
        if interruption is not None:
            raise interruption

    def close(self) -> None:
        """Takes the adapter back and stops guarding the trainer's model. Safe to call twice."""
        self.take_back()
        self._guard.remove()
        self.shared.before_check = None

    def _add(self, name: str, delta: Delta) -> None:
        weight = self.shared.shared[name].own.data
        merged, index, bits = added_up(weight, delta)
        # It is recorded before it is done, so that an interruption can be undone.
        self._added.append(Added(name, weight, delta, self._base_checksums[name], checksum(merged), index, bits))
        weight.copy_(merged)

    def _refuse_or_take_back(self, *_: Any) -> None:
        if self._is_sampling:
            raise SharedBaseError("the trainer was to compute while its base holds the policy's merged weights")
        self.take_back()


def deltas_of(adapter: Adapter) -> dict[str, Delta]:
    """{name of the base's matrix: what is added to it}. ValueError if the adapter does more than add, as DoRA does."""
    config = adapter.config
    if config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise ValueError("only LoRA of one rank and scale is added to weights")
    deltas = {}
    for name, down in adapter.weights.items():
        if not name.endswith(DOWN):
            continue
        stem = name.removesuffix(DOWN)
        scale, up = scale_of(config, stem), adapter.weights[stem + UP]
        deltas[f"{stem.removeprefix(PREFIX)}.weight"] = Delta(scale, _float32_copy(up), _float32_copy(down))
    return deltas


def _float32_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32, copy=True)


@torch.no_grad()
def added_up(weight: Tensor, delta: Delta) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of weight and delta, positions that subtraction does not restore, their bits in the weight).

    The last two are in main memory, because large adapters have many of them. Sums are rounded once, from float32.
    """
    integers = INTEGERS[weight.element_size()]
    merged, indices, bits = torch.empty_like(weight), [], []
    for block in _blocks(weight):
        base_rows, delta_rows = weight[block], delta.rows(block)
        merged[block] = (base_rows.float() + delta_rows).to(weight.dtype)
        restored = (merged[block].float() - delta_rows).to(weight.dtype)
        base_bits = base_rows.reshape(-1).view(integers)
        lost = (restored.reshape(-1).view(integers) != base_bits).nonzero()[:, 0]
        indices.append((lost + block.start * weight.shape[1]).to("cpu", torch.int32))
        bits.append(base_bits[lost].cpu())
    return merged, torch.cat(indices), torch.cat(bits)


@torch.no_grad()
def _restore(added: Added) -> None:
    """Makes the matrix the base's again, unless it is that already."""
    weight, current = added.weight, checksum(added.weight)
    if current == added.base_checksum:
        return
    if current != added.merged_checksum:
        raise SharedBaseError(_damaged(added, f"it was changed while the policy's weights were in it ({current})"))
    restored = torch.empty_like(weight)
    for block in _blocks(weight):
        restored[block] = (weight[block].float() - added.delta.rows(block)).to(weight.dtype)
    index, bits = added.index.to(weight.device, torch.int64), added.bits.to(weight.device)
    restored.reshape(-1).view(INTEGERS[weight.element_size()])[index] = bits
    if checksum(restored) != added.base_checksum:
        raise SharedBaseError(_damaged(added, "the product of the adapter's matrices is not the same twice"))
    weight.copy_(restored)


def _damaged(added: Added, why: str) -> str:
    remedy = "resume the run from its last checkpoint with generation.vllm.weights=adapter"
    return f"{added.name} of the base cannot be brought back: {why}; {remedy}"


def _blocks(weight: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        yield slice(start, min(start + rows, weight.shape[0]))


def _wait_for_device(added: list[Added]) -> None:
    """Waits for what runs on the matrices' device: an engine may compute on a stream of its own."""
    if added and added[-1].weight.is_cuda:
        torch.cuda.synchronize(added[-1].weight.device)
