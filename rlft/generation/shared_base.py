"""One copy of the base for trainer and engine: the trainer's parameters become views of the engine's storage.

Engines such as vLLM keep linear layers as plain `[out, in]` matrices, but concatenate the rows of some (q, k and v;
gate and up), pad embeddings by rows, and keep layers with adapters inside `.base_layer`. A parameter is shared only
where it equals the engine's rows bit for bit; every other one is kept apart, with a reason. The engine's storage is
never reallocated, because CUDA graphs hold its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import Parameter

Shape = tuple[int, ...]

NUM_CHECKED = 8  # number of shared tensors whose content is checked at every checkpoint

DIFFERENT = "different"

CHUNK = 2**22  # number of a tensor's elements that a checksum reads at a time

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""{bytes of an element: integer type that its bits are read as}."""

PACKED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""{an engine's layer: the trainer's layers whose rows it holds, in this order} for Llama, Mistral, Qwen2 and Qwen3."""


class SharedBaseError(RuntimeError):
    """The shared base is no longer what it was: its storage has moved, or its content has changed."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start` to `start + count` of the engine's tensor `name`."""

    name: str
    start: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedTensor:
    """A parameter of the trainer, and the engine's parameter that holds it."""

    own: Parameter
    engine: Parameter
    rows: Rows  # the rows of the engine's parameter that are the trainer's
    address: int  # where these rows were when they were shared

    @property
    def view(self) -> Tensor:
        """The rows of the engine's tensor, wherever it is now."""
        return self.engine.data[self.rows.start : self.rows.start + self.rows.count]


def engine_name(name: str) -> str:
    """The name without the wrappers that engines and PEFT put around a layer with adapters.

    >>> engine_name("model.layers.0.self_attn.qkv_proj.base_layer.weight")
    'model.layers.0.self_attn.qkv_proj.weight'
    """
    return name.replace(".base_layer.", ".")


def rows_of(
    own: Mapping[str, Shape], engine: Mapping[str, Shape], packed: Mapping[str, Sequence[str]] = PACKED
) -> dict[str, Rows | str]:
    """Where each of the trainer's parameters lies in the engine's model, or why it does not.

    Args:
        own: {name: shape} of the trainer's model.
        engine: {name: shape} of the engine's model.
        packed: {an engine's layer: the trainer's layers that it row-concatenates}.
    """
    names = {engine_name(name): name for name in engine}
    places: dict[str, Rows | str] = {}
    for name, shape in own.items():
        if name in names:
            places[name] = _whole(names[name], shape, engine[names[name]])
        else:
            places[name] = _part(name, own, engine, names, packed)
    return places


def _whole(name: str, own: Shape, engine: Shape) -> Rows | str:
    if 0 in engine:
        return "repacked by the engine"
    if own[1:] != engine[1:] or len(own) != len(engine) or (own and own[0] > engine[0]):
        return f"{own} here and {engine} in the engine"
    return Rows(name, 0, own[0] if own else 1)


def _part(
    name: str,
    own: Mapping[str, Shape],
    engine: Mapping[str, Shape],
    names: Mapping[str, str],
    packed: Mapping[str, Sequence[str]],
) -> Rows | str:
    for whole, layers in packed.items():
        for layer in layers:
            stem, separator, end = name.rpartition(f".{layer}.")
            fused = names.get(f"{stem}.{whole}.{end}")
            if not separator or fused is None:
                continue
            if 0 in engine[fused]:
                return "repacked by the engine"
            siblings = [own.get(f"{stem}.{sibling}.{end}") for sibling in layers]
            if any(shape is None or shape[1:] != engine[fused][1:] for shape in siblings):
                return f"{own[name]} here, one of {layers} in a tensor of {engine[fused]} in the engine"
            counts = [shape[0] for shape in siblings if shape is not None]
            if sum(counts) != engine[fused][0]:
                return f"{'+'.join(map(str, counts))} rows here and {engine[fused][0]} in the engine"
            index = list(layers).index(layer)
            return Rows(fused, sum(counts[:index]), counts[index])
    return "not in the engine's model"


def share(
    model: nn.Module, engine: nn.Module, device: torch.device, own_name: Callable[[str], str] = str
) -> SharedBase:
    """Makes the model's parameters views of the engine's wherever they are equal.

    One parameter at a time is copied to the device, compared and freed, so that the device never holds two bases. The
    others are moved to the device.

    Args:
        model: the trainer's frozen base without adapters, on any device.
        engine: the engine's model. Its `packed_modules_mapping`, if it has one, says which layers are concatenated.
        own_name: gives a parameter's name in the folder's own class, which the engine's names are made of
            (`hf_to_vllm_mapper`), and under which it is known from now on.
    """
    engine_parameters = dict(engine.named_parameters(remove_duplicate=False))
    trainer_parameters = {own_name(name): parameter for name, parameter in model.named_parameters()}
    places = places_in(engine, _shapes(trainer_parameters.items()), _shapes(engine_parameters.items()))
    shared, apart = {}, {}
    for name, parameter in trainer_parameters.items():
        rows = places[name]
        if isinstance(rows, str):
            apart[name] = rows
            continue
        engine_parameter = engine_parameters[rows.name]
        view = engine_parameter.data[rows.start : rows.start + rows.count]
        if (reason := _why_apart(parameter.data, view, device)) is not None:
            is_padded = rows.count < len(engine_parameter) and engine_name(rows.name) == name_in(engine, name)
            apart[name] = f"padded and {reason}" if is_padded and reason == DIFFERENT else reason
            continue
        parameter.data = view
        shared[name] = SharedTensor(parameter, engine_parameter, rows, view.data_ptr())
    model.to(device)
    return SharedBase(shared=shared, apart=apart)


def places_in(engine: nn.Module, own: Mapping[str, Shape], held: Mapping[str, Shape]) -> dict[str, Rows | str]:
    """As `rows_of`, for names in the folder's own class: of an engine's model that holds tensors of these shapes."""
    packed = {**PACKED, **(getattr(engine, "packed_modules_mapping", None) or {})}
    names = {name: name_in(engine, name) for name in own}
    places = rows_of({names[name]: shape for name, shape in own.items()}, held, packed)
    return {name: places[names[name]] for name in own}


def name_in(engine: nn.Module, name: str) -> str:
    """The engine's name of what has this name in the folder's own class, by vLLM's mapping, as for adapters."""
    mapper = getattr(engine, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    renames = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper  # its name before vLLM 0.29
    return renames()._map_name(name) or name


def _shapes(parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in parameters}


def _why_apart(own: Tensor, view: Tensor, device: torch.device) -> str | None:
    if view.device.type != device.type or device.index not in (None, view.device.index):
        return f"on {view.device} in the engine"
    if view.dtype != own.dtype:
        return f"{_name(own.dtype)} here and {_name(view.dtype)} in the engine"
    if view.is_inference():
        return "made in inference mode by the engine"
    if not view.is_contiguous():
        return "not contiguous in the engine"
    return None if torch.equal(own.to(view.device), view) else DIFFERENT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True, kw_only=True, eq=False)
class SharedBase:
    """The tensors that trainer and engine share."""

    shared: Mapping[str, SharedTensor]  # {the trainer's name: tensor}
    apart: Mapping[str, str]  # {the trainer's name: why trainer and engine have a tensor each}
    # {the trainer's name: checksum} of a few shared tensors, from when they were shared.
    checksums: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = list(self.shared)
        chosen = {round(i * (len(names) - 1) / (NUM_CHECKED - 1)) for i in range(NUM_CHECKED)} if names else set()
        self.checksums = {names[i]: checksum(self.shared[names[i]].own.data) for i in sorted(chosen)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the shared tensors, which would otherwise be held twice."""
        return sum(tensor.own.numel() * tensor.own.element_size() for tensor in self.shared.values())

    @property
    def text(self) -> str:
        """What is shared, for the start-up table."""
        total = len(self.shared) + len(self.apart)
        text = f"shared {len(self.shared)} of {total} tensors, {self.num_bytes / 2**30:.2f} GiB"
        if not self.apart:
            return text
        named = [f"{name.removesuffix('.weight')} ({why})" for name, why in self.apart.items()]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        return f"{text}; kept apart: {', '.join(named[:3])}{more}"

    def check_addresses(self) -> None:
        """SharedBaseError unless every shared tensor is still where the engine's is; the check takes no time."""
        for name, tensor in self.shared.items():
            if not tensor.own.data_ptr() == tensor.view.data_ptr() == tensor.address:
                raise SharedBaseError(
                    f"{name} has moved: the trainer reads it at {tensor.own.data_ptr():#x}, the engine at "
                    f"{tensor.view.data_ptr():#x}, and they shared {tensor.address:#x}; stopped rather than train on "
                    "another base than the engine's. generation.vllm.share_base=false gives each its own"
                )

    def check_content(self, before: Mapping[str, str] | None = None) -> dict[str, str]:
        """SharedBaseError unless a few shared tensors are as before; returns their checksums by name.

        `before` has their checksums in a checkpoint; None stands for those from when they were shared.
        """
        now = {name: checksum(self.shared[name].own.data) for name in self.checksums}
        before = self.checksums if before is None else before
        changed = [name for name, value in now.items() if before.get(name, value) != value]
        if changed:
            raise SharedBaseError(
                f"the base has changed: {changed[0]} has the checksum {now[changed[0]]} instead of "
                f"{before[changed[0]]}; nothing may write to it. Resume the run from its last checkpoint, and if this "
                "comes again, with generation.vllm.share_base=false"
            )
        return now

    def release(self) -> None:
        """Detaches the trainer's model, which can no longer be used, from the engine's storage. Safe to call twice."""
        for tensor in self.shared.values():
            tensor.own.data = tensor.own.data.new_empty(0)
        self.shared = {}


def checksum(tensor: Tensor) -> str:
    """16 hex digits of a tensor's bits and their positions, the same on every device."""
    return f"{int(weighted_bits(tensor.detach().reshape(1, -1))) % 2**64:016x}"


def weighted_bits(rows: Tensor) -> Tensor:
    """int64 `[N]`, for each row `[N, L]` the sum of bits times odd weights that differ by position, modulo 2^64: one
    changed element always changes it."""
    bits, sums = rows.view(INTEGERS[rows.element_size()]), torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for start in range(0, rows.shape[1], CHUNK):
        part = bits[:, start : start + CHUNK].to(torch.int64)
        weights = torch.arange(2 * start + 1, 2 * (start + part.shape[1]) + 1, 2, device=rows.device)
        sums += (part * weights).sum(1)
    return sums
