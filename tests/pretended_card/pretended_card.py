"""A card that is not there: tensors say cuda:0, hold their numbers on the CPU, and behave as on a card.

It shows without a GPU what a run does on one: operands on two devices are an error, and waits of the host, uploads,
launches and bytes alive are counted, by line of rlft. Numbers are the CPU's, so nothing here says that a kernel is
right or fast on a real card. `install` changes torch for the whole process: it is for a process of its own, which has
loaded `card_library.library()` before torch. Besides NVIDIA's (cuda) it pretends AMD's (`rocm`, which torch calls cuda
as well), Intel's (`xpu`) and Apple's (`mps`, without float64): what torch's Python says of them, and their tensors.

What it leans on, as in torch 2.11 to 2.13: a wrapper subclass may say another device than that of its numbers
(`Tensor._make_wrapper_subclass`); a mode sees the operators that make tensors from nothing (`TorchDispatchMode`);
operators that draw are tagged `nondeterministic_seeded`; `_set_only_lift_cpu_tensors` has `torch.tensor(..,
device="cuda")` made here and then moved.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import flash_stand_in
import recorded_graphs
import torch
import torch.distributed
from recorded_graphs import Stream, recorded, refuse
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import rlft
from rlft.model.kernels.flash_attention import backward_scratch
from rlft.system.process import child

dist: Any = torch.distributed
HOST = torch.device("cpu")
PACKAGE = f"{Path(rlft.__file__).parent}/"

PRODUCTS = frozenset(
    ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm", "_flash_attention_forward", "_flash_attention_backward")
)
"""Operators that torch.compile leaves to a library, each with a launch of its own."""

WITHOUT_LAUNCH = frozenset((
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "is_same_size", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute",
    "resize_", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold",
    "unsqueeze", "view",
))  # fmt: skip

WAITS = frozenset((
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "unique",
    "unique_consecutive", "unique_dim",
))  # fmt: skip
"""Operators whose result's shape, or number, the host reads from the card before it goes on (ATen/native/cuda)."""

BLOCK = 512
"""The caching allocator rounds sizes up to so many bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""


@dataclass
class Counts:
    """Counts of what happened by operator and line, and bytes; `by_line`: of launches and bytes as well, slowly."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    bytes_by_line: Counter[str] = field(default_factory=Counter)
    tensors: Counter[str] = field(default_factory=Counter)  # by card, as CUDA_VISIBLE_DEVICES names them
    live: int = 0
    peak: int = 0
    by_line: bool = False
    hollow: bool = False  # whether products give zeros, for launches and bytes of sizes that would take long
    replays: bool = False  # whether a graph is replayed, whose kernels the host does not launch
    inside: str = ""  # the compiled function whose operators are running
    fused: bool = False  # whether its last operator belongs to the kernel between two products

    def launch(self, name: str) -> None:
        if self.replays:
            return
        self.launches[f"{name} @ {line()}" if self.by_line else name] += 1

    def wait(self, name: str) -> None:
        refuse(f"{name} @ {line()}")
        recorded_graphs.host_waits()
        self.waits[f"{name} @ {line()}"] += 1

    def upload(self, name: str) -> None:
        refuse(f"{name} @ {line()}")
        self.uploads[f"{name} @ {line()}"] += 1

    def clear(self) -> None:
        self.launches, self.waits, self.uploads = Counter(), Counter(), Counter()


COUNTS = Counts()


def line() -> str:
    """The innermost line of rlft that is being executed."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name[len(PACKAGE) :]}:{frame.f_lineno}"
        frame = cast(Any, frame.f_back)
    return "outside of rlft"


# -- tensors on the card -----------------------------------------------------------------------------------------------
class CardTensor(Tensor):
    """Says that it is on `device`; its numbers are in `inner`."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> CardTensor:
        if device.type == "mps" and inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"the MPS framework doesn't support {inner.dtype}, at {line()}")
        COUNTS.tensors[visible()[device.index]] += 1
        sizes = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, inner.size(), **sizes, dtype=inner.dtype, device=device)
        made.inner = inner
        captured = recorded_graphs.CUDAGraph.captured
        if captured is None or not captured.holds(inner, made, _rounded(inner)):
            _count_bytes(inner)
        return made

    def __init__(self, inner: Tensor, device: torch.device) -> None: ...

    def __repr__(self, **_: Any) -> str:
        return f"CardTensor({self.inner!r})"

    def __format__(self, spec: str) -> str:  # torch's own reads the number of plain tensors only
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    # `nn.Module.to` swaps a parameter for one of another type only if that has these two methods (`Module._apply`).
    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["inner"], self.device

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], device: torch.device, *_: Any) -> CardTensor:
        return CardTensor(parts["inner"], device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = CardTensor(self.inner.clone(), self.device)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Tensor) -> None:  # torch's own changes the wrapper alone
        Tensor.data.__set__(self, other)
        self.inner = other.inner if isinstance(other, CardTensor) else other

    def untyped_storage(self) -> torch.UntypedStorage:  # a wrapper's own has no memory
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:  # torch reads memory here without an operator
        COUNTS.wait("tolist")
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        how = "Use Tensor.cpu() to copy the tensor first."
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. {how}")


_alive: set[int] = set()


def _rounded(inner: Tensor) -> int:
    return -(-inner.untyped_storage().nbytes() // BLOCK) * BLOCK


def _count_bytes(inner: Tensor) -> None:
    storage = inner.untyped_storage()
    key = storage._cdata
    if key in _alive:
        return
    size, place = _rounded(inner), line() if COUNTS.by_line else ""
    _alive.add(key)
    COUNTS.live += size
    COUNTS.bytes_by_line[place] += size
    COUNTS.peak = max(COUNTS.peak, COUNTS.live)

    def freed() -> None:
        COUNTS.live -= size
        COUNTS.bytes_by_line[place] -= size
        _alive.discard(key)

    weakref.finalize(storage, freed)


# -- operators ---------------------------------------------------------------------------------------------------------
class Mode(TorchDispatchMode):
    """Sees every operator, so that also what makes a tensor from nothing can make it on the card."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps each call, and imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if CardTensor in types or (kwargs and "device" in kwargs):
            return _run(func, args, kwargs or {})
        return _run_inside(func, args, kwargs or {}) if COUNTS.inside else func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of an operator from its schema."""

    name: str
    draws: bool
    aliases: bool


@functools.cache
def _operator(func: Any) -> Operator:
    schema = func._schema
    return Operator(
        name=schema.name.split("::")[1],
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        aliases=any(returned.alias_info for returned in schema.returns),
    )


def _inner(x: Any, card: list[CardTensor], host: list[Tensor]) -> Any:
    """x with the numbers of its tensors on the card; these, and tensors of the host that are no scalars, are listed."""
    kind = type(x)
    if kind is CardTensor:
        card.append(x)
        return x.inner
    if kind is list or kind is tuple:
        return x if x and type(x[0]) is int else kind(_inner(part, card, host) for part in x)
    if isinstance(x, Tensor) and x.dim() > 0:
        host.append(x)
    return x


def _on_card(x: Any, device: torch.device) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_on_card(part, device) for part in x)
    return CardTensor(x, device) if isinstance(x, Tensor) and type(x) is not CardTensor else x


def _card_of(device: torch.device | None) -> torch.device | None:
    """The card that a device names; None if it names none."""
    if device is None or torch.device(device).type != KIND.type:
        return None
    index = torch.accelerator.current_device_index() if (given := torch.device(device).index) is None else given
    if index >= len(visible()):
        raise RuntimeError(f"invalid device ordinal: {device} of {len(visible())}, at {line()}")
    return torch.device(KIND.type, index)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    card: list[CardTensor] = []
    host: list[Tensor] = []
    plain, named = tuple(_inner(x, card, host) for x in args), {k: _inner(x, card, host) for k, x in kwargs.items()}
    device = kwargs.get("device")
    target = _card_of(device)
    if not card and target is None:
        return _run_inside(func, args, kwargs) if COUNTS.inside else func(*args, **kwargs)
    operator = _operator(func)
    if operator.name in ("_to_copy", "copy_"):
        return _copied(func, operator.name, args, plain, named, target)
    if device is not None:
        named["device"] = HOST
        if target is not None:
            named.pop("pin_memory", None)
    else:
        target = card[0].device
        if host or (len(visible()) > 1 and any(x.device != target for x in card)):
            _meet(func, operator.name, [*card, *host])
    if operator.name in WAITS or _reads_a_mask(operator.name, plain):
        COUNTS.wait(operator.name)
    launches = operator.name not in WITHOUT_LAUNCH
    if operator.draws and operator.name not in PRODUCTS:  # flash attention says that it draws, for its dropout
        refuse(operator.name)
        out = _drawn(func, target, plain, named)
    else:
        given = plain, named
        out = recorded(lambda: _computed(func, operator.name, plain, named), given, operator.name, launches=launches)
    if target is None:
        return out
    if launches:
        COUNTS.launch(operator.name)
    out = _on_card(out, target)
    if operator.name == "_flash_attention_backward":
        query, key, starts = plain[1], plain[2], plain[6]
        scratch = backward_scratch(
            len(query), len(key), len(starts) - 1, heads=query.shape[1], key_heads=key.shape[1],
            head_size=query.shape[2], multiprocessors=Properties.multi_processor_count,
        )  # fmt: skip
        COUNTS.peak = max(COUNTS.peak, COUNTS.live + scratch)
    return return_and_correct_aliasing(func, args, kwargs, out) if operator.aliases and card else out


def _run_inside(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator of a compiled function: a launch for each product, whose operands and result are in memory, and one
    for all that stands between two products."""
    name = _operator(func).name
    if name not in PRODUCTS:
        if name not in WITHOUT_LAUNCH and not COUNTS.fused:
            COUNTS.launch(f"compiled {COUNTS.inside}")
            COUNTS.fused = True
        return func(*args, **kwargs)
    COUNTS.launch(name)
    COUNTS.fused = False
    out = _computed(func, name, args, kwargs)
    for x in tree_leaves((args, out)):
        if isinstance(x, Tensor):
            _count_bytes(x)
    return out


def _computed(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator's result; zeros of its shape for a product where `hollow` says so."""
    if name == "histc" and not args[0].is_floating_point():  # a card counts integers
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    if not COUNTS.hollow or name not in PRODUCTS:
        return func(*args, **kwargs)
    if "out" in kwargs:
        return kwargs["out"].zero_()
    if name.endswith("_"):
        return args[0]
    shapes = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))
    return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype), func(*shapes[0], **shapes[1]))


def _meet(func: Any, name: str, operands: list[Any]) -> None:
    """Operands of two devices are an error, but for indices of the host, which torch moves
    (ATen/native/TensorAdvancedIndexing)."""
    devices = {str(x.device) for x in operands}
    moves = name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
    if not moves or len(devices - {"cpu"}) > 1:
        shapes = [tuple(x.shape) for x in operands if x.device != operands[0].device]
        found = f"{' and '.join(sorted(devices, reverse=True))}, of the shapes {shapes}, in {func} at {line()}"
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {found}")
    COUNTS.upload("indices")


def _reads_a_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether indexing first counts a mask's True. A single number is put without that, as by masked_fill, and so is
    nothing read of a mask of the host."""
    if name == "repeat_interleave":
        return len(args) < 2 or isinstance(args[-1], Tensor)  # no output_size
    if not name.lstrip("_").startswith(("index.", "index_put", "unsafe_index")) and name != "index":
        return False
    masks = [x for x in args[1] if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and not ("put" in name and len(args[1]) == 1 and args[2].numel() == 1)


def _copied(
    func: Any, name: str, args: Any, plain: tuple[Any, ...], named: dict[str, Any], target: torch.device | None
) -> Any:
    """A copy on one device, or from one to another; one to the host is waited for."""
    source = args[name == "copy_"].device if type(args[name == "copy_"]) is CardTensor else None
    if name == "copy_":
        target = args[0].device if type(args[0]) is CardTensor else None
    else:
        target = source if named.pop("device", None) is None else target
        if target is not None:
            named.pop("pin_memory", None)
    result = recorded(lambda: func(*plain, **named), (plain, named), name)
    if target is None:
        COUNTS.wait("copy to host")
    elif source is None:
        COUNTS.upload("copy to card")
    elif not (name == "copy_" and _is_same(*plain[:2])):
        COUNTS.launch(name)
    if name == "copy_":
        return args[0]
    return result if target is None else CardTensor(result, target)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same numbers in memory, which `x[1:] += 1` copies onto themselves (ATen/native/Copy.cpp)."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape


# -- random numbers ----------------------------------------------------------------------------------------------------
def _drawn(func: Any, device: torch.device | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator's result, drawn by the card's generator or the one that it is given, and not by the host's."""
    device = device or HOST
    own = kwargs.get("generator") or generator_of(device)
    if own.device.type != device.type:
        found = f"Expected a '{device.type}' device type for generator but found '{own.device.type}'"
        raise RuntimeError(f"{found} at {line()}")
    of_host = torch.get_rng_state()
    torch.set_rng_state(own.get_state())
    try:
        return func(*args, **(kwargs | ({"generator": None} if "generator" in kwargs else {})))
    finally:
        own.set_state(torch.get_rng_state())
        torch.set_rng_state(of_host)


# -- what is compiled --------------------------------------------------------------------------------------------------
HALF = (torch.bfloat16, torch.float16)


def compiled(function: Any = None, **_: Any) -> Any:
    """In place of torch.compile: launches as in `_run_inside`, and no rounding between the steps.

    Inductor computes what it fuses in float32 and rounds what it writes (`emulate_precision_casts` of its config is
    False). What the function overwrites is copied, since it runs twice: once for launches and dtypes of its results.
    """
    if function is None:
        return compiled

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        device = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, CardTensor))
        tree = tree_map_only(CardTensor, lambda x: x.inner, (args, kwargs))
        dtypes: list[Any] = []
        return _on_card(recorded(lambda: computed(tree, dtypes), tree, function.__name__), device)

    def computed(tree: Any, dtypes: list[Any]) -> Any:
        """dtypes: of the results, as the one element, once the function has run: a replay needs them no more."""
        inner = {id(x): x for x in tree_leaves(tree) if isinstance(x, Tensor)}
        COUNTS.inside, COUNTS.fused = function.__name__, False
        if COUNTS.hollow or not any(x.dtype in HALF for x in inner.values()):
            out = _called(function, tree, inner)
            COUNTS.inside = ""
            return out
        if not dtypes:
            rounded = _called(function, tree, {key: x.clone() for key, x in inner.items()})
            dtypes.append(tree_map_only(Tensor, lambda x: x.dtype, rounded))
        COUNTS.inside = ""
        wide = {key: x.float() if x.dtype in HALF else x.clone() for key, x in inner.items()}
        versions = {key: x._version for key, x in wide.items()}
        exact = _called(function, tree, wide)
        for key, version in versions.items():
            if wide[key]._version != version:
                inner[key].copy_(wide[key])
        return tree_map(lambda r, e: e.to(r) if isinstance(e, Tensor) else e, dtypes[0], exact)

    return fused


def _called(function: Callable[..., Any], tree: Any, tensors: dict[int, Tensor]) -> Any:
    args, kwargs = tree_map_only(Tensor, lambda x: tensors[id(x)], tree)
    return function(*args, **kwargs)


# -- attention ---------------------------------------------------------------------------------------------------------
of_torch = F.scaled_dot_product_attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False, **how: Any
) -> Any:
    """In place of F.scaled_dot_product_attention, which would keep all scores here: a card's kernels keep none."""
    mask, p, causal = (how.pop(name, x) for name, x in (("attn_mask", mask), ("dropout_p", p), ("is_causal", causal)))
    if type(q) is not CardTensor or p:
        return of_torch(q, k, v, mask, p, causal, **how)
    return _Attention.apply(q, k, v, mask, functools.partial(_attended, causal=causal, **how))


def _attended(*tensors: Any, causal: bool, **how: Any) -> Tensor:
    q, k, v, mask = (x.inner if isinstance(x, CardTensor) else x for x in tensors)
    if COUNTS.hollow:
        return (q + 0 * (k.sum() + v.sum()))[..., :1].expand(*q.shape[:-1], v.shape[-1]).contiguous()
    return of_torch(q, k, v, mask, 0.0, causal, **how)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, attended: Callable[..., Tensor]) -> Tensor:
        COUNTS.launch("attention")
        out, normaliser = attended(q, k, v, mask), torch.empty(q.shape[:-1], device=q.device)
        ctx.save_for_backward(q, k, v, mask, CardTensor(out, q.device), normaliser)
        ctx.attended = attended
        return CardTensor(out, q.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        COUNTS.launch("attention backward")
        [grad], (*tensors, mask, _, _) = grads, ctx.saved_tensors
        inner = [x.inner.detach().requires_grad_() for x in tensors]
        with torch.enable_grad():
            found = torch.autograd.grad(ctx.attended(*inner, mask), inner, grad.inner)
        return *(CardTensor(x, grad.device) for x in found), None, None


# -- several processes -------------------------------------------------------------------------------------------------
class Noted(Counter[str]):
    """Counts of tensors by card, whose first tensor on a card is a line of JSON in a file: workers end by SIGKILL."""

    def __init__(self, report: str, process: str) -> None:
        super().__init__()
        self.report, self.process = report, process

    def __missing__(self, card: str) -> int:
        with Path(self.report).open("a") as stream:
            stream.write(json.dumps({"process": self.process, "card": card}) + "\n")
        return 0


class Nccl:
    """In place of torch.distributed.ProcessGroupNCCL, which sends tensors of cards only: by gloo."""

    Options = dist.ProcessGroupGloo._Options

    def __init__(self, store: Any, rank: int, ranks: int, options: Any) -> None:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self.gloo = dist.ProcessGroupGloo(store, rank, ranks, options)
        self.abort = self.gloo.abort

    def broadcast(self, tensors: list[CardTensor], options: Any) -> Any:
        return self.gloo.broadcast([x.inner for x in tensors], options)


def install_in_workers(library: str, report: str, kind: str) -> None:
    """Has the Python processes that rlft starts from here on pretend as well, before anything else."""
    card = f"import sys; sys.path[:] = {sys.path!r}; import pretended_worker; "
    child.BOOT = f"{card}pretended_worker.begin({library!r}, {report!r}, {kind!r})\n{child.BOOT}"


# -- torch.cuda, torch.xpu and torch.mps -------------------------------------------------------------------------------
class Queue(Stream):
    """A stream or an event: whatever was asked of the card is done."""

    def synchronize(self) -> None:
        COUNTS.wait("synchronize")


@dataclass
class Properties:
    total_memory: int
    major: int
    minor: int
    name: str = "Pretended card"
    multi_processor_count: int = 132


@dataclass(frozen=True)
class Kind:
    """type: torch's type of device; versions: what `torch.version` says."""

    type: str
    versions: dict[str, str | None]


KINDS = {
    "cuda": Kind("cuda", {"cuda": "13.0"}),
    "rocm": Kind("cuda", {"cuda": None, "hip": "7.1"}),
    "xpu": Kind("xpu", {"xpu": "20260000"}),
    "mps": Kind("mps", {}),
}
KIND = KINDS["cuda"]


@functools.cache
def visible() -> list[str]:
    """The cards of this process, as CUDA_VISIBLE_DEVICES names them at its start; without it there is one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")


def generator_of(device: Any = None) -> torch.Generator:
    """The card's own generator; the default one of the host for the host."""
    if device is not None and not isinstance(device, int) and torch.device(device) == HOST:
        return torch.default_generator
    card = torch.device(KIND.type, device) if isinstance(device, int) else _card_of(device or torch.device(KIND.type))
    assert card is not None
    return generators[card.index]


def install(
    library: Any, kind: str = "cuda", total_memory: int = 80 * 2**30, capability: tuple[int, int] = (9, 0)
) -> None:
    """Puts cards of this kind into this process, for good. Flash attention is computed by `flash_stand_in`."""
    global KIND
    KIND = KINDS[kind]
    library.pretend(KIND.type.encode(), len(visible()))
    recorded_graphs.CUDAGraph.counts = COUNTS
    generators[:] = [torch.Generator(device=f"{KIND.type}:{index}") for index in range(len(visible()))]
    first, properties = Queue(), Properties(total_memory, *capability)
    Stream.current = first

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    functions: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device=None: generator_of(device).get_state(),
        "set_rng_state": lambda state, device=None: generator_of(device).set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": lambda states: [g.set_state(x) for g, x in zip(generators, states, strict=True)],
        "manual_seed": lambda seed: generator_of().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "mem_get_info": lambda *_: (total_memory - COUNTS.live, total_memory),
        "reset_peak_memory_stats": lambda *_: setattr(COUNTS, "peak", COUNTS.live),
        "synchronize": lambda *_: COUNTS.wait("synchronize"),
        "set_device": lambda device: torch.accelerator.set_device_index(torch.device(device).index),
        "current_device": torch.accelerator.current_device_index,
        "device_count": lambda: len(visible()),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "current_allocated_memory"), lambda *_: COUNTS.live),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda *_: COUNTS.peak),
        "stream": recorded_graphs.entered,
        "current_stream": lambda *_: Stream.current,
        "default_stream": lambda *_: first,
        "_lazy_init": lambda *_: None,
        "empty_cache": recorded_graphs.empty_cache,
        "memory_snapshot": recorded_graphs.memory_snapshot,
        "graph": recorded_graphs.graph,
        "graph_pool_handle": recorded_graphs.pool_handle,
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), torch._C._accelerator_exchangeDevice),
    }
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "get_arch_list": ["sm_{}{}".format(*capability)],
    }
    for name, answer in answers.items():
        functions[name] = lambda *_, answer=answer, **__: answer
    module = torch.get_device_module(KIND.type)
    for name, function in functions.items():
        assert hasattr(torch.cuda, name) or hasattr(torch.mps, name), name
        if hasattr(module, name):
            setattr(module, name, functools.partial(function))  # torch's compiler wants one name for an object
    # These are classes, which stand in annotations.
    if hasattr(module, "CUDAGraph"):
        module.CUDAGraph = recorded_graphs.CUDAGraph
    for name in ("Stream", "Event"):
        if hasattr(module, name):
            setattr(module, name, type(name, (Queue,), {}))
    module.default_generators = tuple(generators)
    if hasattr(module, "_initialized"):  # which decides whether gradient checkpointing draws the same numbers again
        module._initialized = True
    if kind == "mps":
        torch.backends.mps.is_available = torch.backends.mps.is_built = functions["is_available"]
    for name, version in KIND.versions.items():
        setattr(torch.version, name, version)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        setattr(torch._C, name, getattr(recorded_graphs, name))
    cast(Any, torch).compile = compiled
    F.scaled_dot_product_attention = attention
    torch._C._set_only_lift_cpu_tensors(True)
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):  # which take a whole list in one kernel
        importlib.import_module(name)._foreach_supported_types.append(CardTensor)
    dist.ProcessGroupNCCL = Nccl
    kept.append(flash_stand_in.install())
    mode = Mode()
    mode.__enter__()
    kept.append(mode)


generators: list[torch.Generator] = []
kept: list[Any] = []
"""What must live as long as the process."""
