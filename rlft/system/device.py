"""What a device can do: which one a config means, its 16-bit types, its memory, and how ranks on it exchange tensors.

rlft is measured on CPUs and on NVIDIA's GPUs. AMD's GPUs (which torch calls cuda as well), Intel's (xpu) and Apple's
(mps) compute by torch's plain operators, one by one, with the transformers engine. That was tried on pretended devices
(tests/pretended_card), not on hardware.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlft.system.lazy import torch
from rlft.system.memory import free_memory, peak_resident_bytes
from rlft.types import UserError, require

if TYPE_CHECKING:
    from torch import Tensor, device as Device, dtype as DType

OLDEST_WITH_BFLOAT16 = (8, 0)
"""Compute capability of Ampere. torch emulates bfloat16 on older cards, slowly, and vLLM refuses it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What all devices of one kind can do."""

    title: str  # what messages call one of them
    dtype: str  # `model.dtype: auto`, which a single card may lack (`resolve_dtype`)
    # Whether rlft's kernels for GPUs run there: flash attention in two calls and compiled functions.
    has_kernels: bool = False
    # The backend of torch.distributed for tensors on them; None: there can be one rank only.
    collective: str | None = None
    has_float64: bool = True  # whether they compute in float64


KINDS = {
    "cpu": Kind(title="a CPU", dtype="float32", collective="gloo"),  # most processors are slow in 16 bits
    "cuda": Kind(title="an NVIDIA GPU", dtype="bfloat16", has_kernels=True, collective="nccl"),
    "rocm": Kind(title="an AMD GPU", dtype="bfloat16", collective="nccl"),
    "xpu": Kind(title="an Intel GPU", dtype="bfloat16"),
    "mps": Kind(title="an Apple GPU", dtype="float32", has_float64=False),
}
"""{name: kind}; the name is torch's type of device, but for `rocm`, whose devices torch calls cuda."""


def kind_of(device: Device) -> Kind:
    """The kind of a device, one of KINDS."""
    return KINDS[kind_name(device)]


def kind_name(device: Device) -> str:
    """The name in KINDS of a device's kind."""
    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def type_of(kind: str) -> str:
    """What torch calls devices of this kind, one of KINDS."""
    return "cuda" if kind == "rocm" else kind


def resolve_device(name: str) -> Device:
    """The device that `model.device` means; `auto` is CUDA where there is one, else the CPU.

    Raises UserError: it is no device, or not here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    key = "model.device"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(key, "is not a device", got=name, remedy="use auto, cpu, cuda or cuda:<n>") from None
    if device.type == "cpu":
        return device
    module, remedy = torch.get_device_module(device), "use model.device=cpu, or auto to take what is there"
    require(module.is_available(), key, f"there is no {device.type.upper()} device here", got=name, remedy=remedy)
    number = module.device_count()
    require((device.index or 0) < number, key, f"this machine has {number}", got=name, remedy="use a lower number")
    return device


def resolve_dtype(dtype: str, device: Device) -> DType:
    """The dtype that `model.dtype` means on this device; `auto` is what the device computes fast.

    That is float32 on a CPU, bfloat16 on a GPU, and float16 on cards without bfloat16 (NVIDIA's before Ampere).
    Raises UserError: the device lacks it.
    """
    has_bfloat16 = computes_bfloat16(device)
    if dtype == "bfloat16" and not has_bfloat16:
        problem = f"bfloat16 needs compute capability 8.0, which {torch.cuda.get_device_name(device)} lacks"
        remedy = "use model.dtype=float16, or auto, which is float16 on this card"
        raise UserError("model.dtype", problem, got=dtype, remedy=remedy)
    if dtype == "auto":
        dtype = kind_of(device).dtype if has_bfloat16 else "float16"
    return getattr(torch, dtype)


def computes_bfloat16(device: Device) -> bool:
    """Whether this device has bfloat16; True where no NVIDIA card is there to ask."""
    if not kind_of(device).has_kernels or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= OLDEST_WITH_BFLOAT16


def fork_rng(device: Device) -> AbstractContextManager[None]:
    """Inside, what is drawn on the host and on this device changes nothing of what they draw afterwards.

    Other GPUs of the machine are left alone: torch's default forks all of them, with a warning.
    """
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices=devices, device_type=device.type)


def widest(device: Device) -> DType:
    """The most exact dtype that the device computes in."""
    return torch.float64 if kind_of(device).has_float64 else torch.float32


# -- many tensors at once ----------------------------------------------------------------------------------------------
def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Writes each source into its target, on a GPU by a few kernels: a slow host needs 45 us to start each of them.

    Between devices they are copied one by one.
    """
    alike: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        if target.device != source.device:
            target.copy_(source)
            continue
        written, read = alike[target.device, target.dtype, source.dtype]  # lists of several kinds have no fast kernel
        written.append(target)
        read.append(source)
    for written, read in alike.values():
        torch._foreach_copy_(written, read)  # pyright: ignore[reportPrivateImportUsage]
        torch.autograd.graph.increment_version(written)  # which tells that tensors have changed: torch does not here


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor, without its gradient, in memory of its own."""
    copies = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in tensors.items()}
    copy_each(list(copies.values()), [tensor.detach() for tensor in tensors.values()])
    return copies


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A contiguous copy in the host's memory of each tensor of one device, no two in one storage.

    The device is waited for once a bucket, and not once a tensor.
    """
    copies = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    rows, targets = (
        [tensor.detach().reshape(-1).view(torch.uint8) for tensor in each.values()] for each in (tensors, copies)
    )
    for bucket in buckets(rows, BUCKET):
        values = torch.cat([rows[number][start:stop] for number, start, stop in bucket]).cpu()
        parts = values.split([stop - start for _, start, stop in bucket])
        for (number, start, stop), part in zip(bucket, parts, strict=True):
            targets[number][start:stop] = part
    return copies


def to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in main memory; those that are there already are not copied."""
    return {**tensors, **on_host({name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"})}


BUCKET = 64 * 2**20  # bytes of tensors that are sent at a time

Bucket = list[tuple[int, int, int]]
"""Parts of tensors: (number of the tensor, its first element, the one after its last)."""


def buckets(tensors: Sequence[Tensor], size: int) -> list[Bucket]:
    """All elements of tensors in their order, in buckets of one dtype and at most `size` bytes each."""
    result: list[Bucket] = []
    room, dtype = 0, None
    for number, tensor in enumerate(tensors):
        start = 0
        while start < tensor.numel():
            if not room or tensor.dtype != dtype:
                result.append([])
                room, dtype = size // tensor.itemsize, tensor.dtype
            stop = min(tensor.numel(), start + room)
            result[-1].append((number, start, stop))
            start, room = stop, room - (stop - start)
    return result


# -- memory ------------------------------------------------------------------------------------------------------------
def has_own_memory(device: Device) -> bool:
    """Whether the device's memory is not the machine's; an Apple GPU's is."""
    return device.type in ("cuda", "xpu")


def free_bytes(device: Device) -> int:
    """The bytes that this process can still allocate on the device."""
    if has_own_memory(device):
        return torch.get_device_module(device).mem_get_info(device)[0]
    return free_memory()


def total_bytes(device: Device) -> int:
    """The bytes of a GPU's memory."""
    return torch.get_device_module(device).get_device_properties(device).total_memory


MULTIPROCESSORS = 132  # their number on an H100 and an H200, for plans of a GPU that is not here


def multiprocessors(device: Device) -> int:
    """The number of multiprocessors of a CUDA GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def peak_memory_bytes() -> int:
    """The most bytes held so far: by tensors on the GPU if torch has one with its own memory, else by this process."""
    for kind in ("cuda", "xpu"):
        module = torch.get_device_module(kind)
        if module.is_available():
            return module.max_memory_allocated()
    return peak_resident_bytes()


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first of these tensors that holds NaN or infinity; None if none does. Reads each of them once."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() and not tensor.is_meta:
            low, high = torch.aminmax(tensor.detach())  # six times as fast as isfinite on a CPU
            if not (low.isfinite() & high.isfinite()):
                return name
    return None


# -- sums in a fixed order ---------------------------------------------------------------------------------------------
@contextmanager
def repeatable(*, only_warns: bool = False) -> Iterator[None]:
    """Inside, torch adds up in a fixed order what threads would otherwise add to the same number in any order.

    An operation that cannot do so raises, or warns. On a GPU the backward of flash attention has a fixed order only
    where such operations raise (`_flash_attention_backward` of torch 2.11).
    """
    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic  # a module whose attributes are properties
    was_filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=only_warns)
    settings.fill_uninitialized_memory = False  # that memory is never read, and filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        settings.fill_uninitialized_memory = was_filled
