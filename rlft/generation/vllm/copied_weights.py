"""The policy in vLLM's own matrices: M = round(W + s B A), written where its kernels read them (`weights: copy`).

W is the trainer's base, which is only read. With magnitudes m (DoRA) each row of W + s B A is scaled to the norm m
first. Sums are made in float32 and rounded once. Matrices of one shape are stacked, so that the number of kernels does
not depend on the number of layers, in blocks that bound the memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rlft.generation.loaded_adapter import DOWN, PREFIX, UP, LoadedAdapter, published, scale_of
from rlft.generation.shared_base import INTEGERS, Rows, engine_name, places_in
from rlft.generation.vllm.memory import COPY_BLOCK, COPY_BLOCK_OF_A_CPU
from rlft.system.device import copy_each
from rlft.types import Adapter, UserError, counted

MAGNITUDE = ".lora_magnitude_vector"  # the end of PEFT's name of m `[out]`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    """A matrix, and what is added to it."""

    name: str  # the trainer's
    base: Tensor  # W `[out, in]`
    held: Tensor  # the engine's rows `[out, in]`
    down: Tensor  # A `[r, in]`, with r = 0 where no adapter is on it
    up: Tensor  # B `[out, r]`
    scale: float
    magnitude: Tensor | None  # m `[out]`

    @property
    def kind(self) -> tuple[object, ...]:
        """What is equal in matrices that are stacked."""
        return self.base.shape, self.base.dtype, self.down.shape[0], self.scale, self.magnitude is None


class CopiedWeights:
    """The matrices of an engine that hold the policy.

    own: {name in the folder's own class: parameter} of the trainer's base, without adapters.
    engine: the engine's model.
    written: {the trainer's name: address} of the engine's matrices that hold a policy, which is kept up to date; empty
    for a model as it was loaded. A CUDA graph reads them at these addresses.

    Its methods raise UserError: the engine does not hold a matrix as the trainer does.
    """

    def __init__(self, own: Mapping[str, Tensor], engine: nn.Module, written: dict[str, int]) -> None:
        self._own = own
        self._parameters: dict[str, Parameter] = dict(engine.named_parameters(remove_duplicate=False))
        held = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self._places = places_in(engine, {name: tuple(tensor.shape) for name, tensor in own.items()}, held)
        self._written = written
        self._adapter: Adapter | None = None
        self._matrices: list[Matrix] = []
        self._sizes: Tensor | None = None  # of each block the norms of what rounding changes and of s B A

    @torch.no_grad()
    def load(self, adapter: Adapter) -> None:
        """Writes the policy; matrices that only an earlier adapter was on become the base's."""
        downs = [name for name in adapter.weights if name.endswith(DOWN)]
        names = [name.removesuffix(DOWN).removeprefix(PREFIX) + ".weight" for name in downs]
        for name in names:
            if name not in self._written:
                self._prove(name)
        self._adapter = adapter
        self._matrices = [self._matrix(name, adapter) for name in self._written]
        sizes = []
        for block in self._blocks():
            sums, change = _sums(block)
            rounded = sums.to(block[0].base.dtype)
            copy_each([matrix.held for matrix in block], list(rounded.unbind()))
            sizes += [torch.linalg.vector_norm(sums.sub_(rounded)), change]
        self._sizes = torch.stack(sizes) if sizes else None
        if self._matrices and (device := self._matrices[0].held.device).type == "cuda":
            torch.cuda.synchronize(device)  # an engine may compute on a stream of its own

    @property
    def rounding(self) -> float:
        """What rounding changes, as a share of s B A (Euclidean norms over all matrices): 0 in float32, near 1 where it
        undoes the adapter. A device is waited for."""
        sizes = [] if self._sizes is None else self._sizes.tolist()
        rounding, change = math.hypot(*sizes[::2]), math.hypot(*sizes[1::2])
        return rounding / change if change else 0.0

    @torch.no_grad()
    def held(self, faults: Sequence[str] = ()) -> LoadedAdapter:
        """The adapter in use, and `faults` with what the engine's matrices are instead of its sums with the base."""
        matrices, wrong = [], []
        for block in self._blocks():
            matrices += block
            meant = _sums(block)[0].to(block[0].base.dtype)
            wrong.append(_differ(meant, torch.stack([matrix.held for matrix in block])))
        flags = torch.cat(wrong).tolist() if wrong else []  # the only wait for the device
        names = [matrix.name for matrix, other in zip(matrices, flags, strict=True) if other]
        moved = [name for name, address in self._written.items() if self._rows(name).data_ptr() != address]
        found = [*faults, *(f"{name.removesuffix('.weight')} has moved in the engine" for name in moved[:1])]
        if names:
            others = f"{len(names)} of the {counted(len(matrices), 'layer')} with the policy"
            found.append(f"{others} have other weights, such as {names[0].removesuffix('.weight')}")
        tensors = {} if self._adapter is None else published(self._adapter, "float32")
        return LoadedAdapter(tensors=tensors, faults=tuple(found))

    def _prove(self, name: str) -> None:
        """Notes where the engine holds this matrix, which has to be the trainer's bit for bit."""
        place, own = self._places.get(name, "not in the trainer's model by this name"), self._own.get(name)
        why = place if isinstance(place, str) else None
        if own is not None and why is None:
            rows = self._rows(name)
            if (rows.dtype, rows.device.type) != (own.dtype, own.device.type):
                why = f"{own.dtype} on {own.device} here and {rows.dtype} on {rows.device} in the engine"
            elif bool(_differ(own.detach()[None], rows[None])):
                why = "other numbers in the engine"
        if why is not None:
            problem = f"the engine does not hold {name.removesuffix('.weight')} as the trainer does ({why})"
            remedy = "use generation.vllm.weights=adapter"
            raise UserError("generation.vllm.weights", problem, got="copy", remedy=remedy)
        self._written[name] = self._rows(name).data_ptr()

    def _rows(self, name: str) -> Tensor:
        place = self._places[name]
        assert isinstance(place, Rows), "it was proven"
        return self._parameters[place.name].data[place.start : place.start + place.count]

    def _matrix(self, name: str, adapter: Adapter) -> Matrix:
        base, stem = self._own[name].detach(), PREFIX + name.removesuffix(".weight")
        down, up, magnitude = (
            None
            if (tensor := adapter.weights.get(stem + end)) is None
            else tensor.detach().to(base.device, torch.float32)
            for end in (DOWN, UP, MAGNITUDE)
        )
        return Matrix(
            name=name,
            base=base,
            held=self._rows(name),
            down=base.new_empty(0, base.shape[1], dtype=torch.float32) if down is None else down,
            up=base.new_empty(len(base), 0, dtype=torch.float32) if up is None else up,
            scale=scale_of(adapter.config, stem),
            magnitude=magnitude,
        )

    def _blocks(self) -> Iterator[Sequence[Matrix]]:
        """The matrices by kind, as many of one together as have COPY_BLOCK elements, on a CPU COPY_BLOCK_OF_A_CPU."""
        by_kind: dict[tuple[object, ...], list[Matrix]] = defaultdict(list)
        for matrix in self._matrices:
            by_kind[matrix.kind].append(matrix)
        for matrices in by_kind.values():
            base = matrices[0].base
            most = COPY_BLOCK_OF_A_CPU if base.device.type == "cpu" else COPY_BLOCK
            at_once = max(1, most // base.numel())
            for start in range(0, len(matrices), at_once):
                yield matrices[start : start + at_once]


def parameters_of(model: nn.Module) -> dict[str, Parameter]:
    """{name in the folder's own class: parameter} of a trainer's base, with or without adapters on it."""
    names = getattr(model, "own_names", None)  # of a text model inside a folder's own class
    outside = str if names is None else names.outside
    return {outside(engine_name(name)): p for name, p in model.named_parameters() if ".lora_" not in name}


def _sums(block: Sequence[Matrix]) -> tuple[Tensor, Tensor]:
    """(M of matrices of one kind before it is rounded, `[N, out, in]` in float32; the norm of their s B A)."""
    first = block[0]
    sums = torch.bmm(torch.stack([matrix.up for matrix in block]), torch.stack([matrix.down for matrix in block]))
    change = torch.linalg.vector_norm(sums.mul_(first.scale))
    sums.add_(torch.stack([matrix.base for matrix in block]))
    if first.magnitude is not None:
        wanted = torch.stack([matrix.magnitude for matrix in block if matrix.magnitude is not None])
        sums *= (wanted / torch.linalg.vector_norm(sums, dim=2))[:, :, None]
    return sums, change


def _differ(first: Tensor, second: Tensor) -> Tensor:
    """bool `[N]`: whether any bit of two tensors `[N, out, in]` differs."""
    integers = INTEGERS[first.element_size()]
    return (first.contiguous().view(integers) != second.contiguous().view(integers)).flatten(1).any(1)
