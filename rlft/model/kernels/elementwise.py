"""Norms, rotary positions and gated MLPs of a frozen base with fewer passes over memory: the same numbers, faster.

Written out in torch, a norm makes six tensors of its input's size forward and backward, a gated MLP keeps three, and
`q * cos + rotate_half(q) * sin` makes five of q's size and as many backward. Here each is one autograd function that
keeps only what its gradient needs. A function replaces a norm's or an MLP's forward only if it gives the same numbers
on a probe, and is used only while the weight is frozen.

On a CUDA GPU, where products are fast and memory is the bottleneck, `torch.compile` makes one or two passes of such a
chain of steps (`fused`); on a CPU they run as written. The code is the same, so that a CPU tests what a GPU compiles.
In 16 bits the functions serve CUDA GPUs, with a norm's steps in float32 and its output rounded before it is weighted,
or after it if the norm adds 1 to its weight, as in transformers; on a CPU in 16 bits a module keeps its own forward.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlft.model.kernels.lora_linear import is_4bit
from rlft.system.device import kind_of

P = ParamSpec("P")
R = TypeVar("R")

OPTIONS: dict[str, Any] = {"deterministic": True, "size_asserts": False}
"""Inductor's. Without `deterministic` each process measures which kernels are fastest, and may choose others."""


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled for any number of tokens at its first call with a first argument on a CUDA GPU.

    Sizes of the model (hidden, head, vocabulary) are constants in it, which gives faster reductions, and it is compiled
    anew for another dtype or last axis of the first argument, or other flags: models do not share a function's limit of
    recompilations. The function must not branch on the values of its tensors, and is called without gradient, inside an
    autograd function.
    """
    compiled: dict[tuple[Any, ...], Callable[..., R]] = {}

    @functools.wraps(function)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if not isinstance(first, Tensor) or not is_fused(first.device):
            return function(*args, **kwargs)
        kind = (first.dtype, first.shape[-1], *(arg for arg in args if arg is None or isinstance(arg, bool)))
        # Whether the layer before learns makes no difference, and would be compiled apart.
        inputs = (first.detach(), *args[1:])
        if kind not in compiled:
            _mark_tokens(inputs, tokens=first.shape[1] if len(first) == 1 and first.dim() > 2 else len(first))
            compiled[kind] = torch.compile(_copied(function), options=OPTIONS)
        return compiled[kind](*inputs, **kwargs)

    return chosen


def _copied(function: Callable[P, R]) -> Callable[P, R]:
    """The function with a code object of its own, on which torch.compile's limit of recompilations is counted."""
    plain = cast(FunctionType, function)
    code = plain.__code__.replace()
    copy = FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    return functools.update_wrapper(copy, plain)


def _mark_tokens(args: Any, tokens: int) -> None:
    """Tells torch.compile that axes of this size may have another one at the next call; weights keep theirs."""
    if isinstance(args, Tensor) and not isinstance(args, nn.Parameter):
        for axis, size in enumerate(args.shape):
            if size == tokens:
                torch._dynamo.maybe_mark_dynamic(args, axis)
    elif isinstance(args, (list, tuple)):
        for arg in args:
            _mark_tokens(arg, tokens)


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """A fused function's own code, for another fused function that includes it."""
    return cast(Any, function).__wrapped__


def is_fused(device: torch.device) -> bool:
    """Whether fused functions are compiled on this device."""
    return obstacle(device) is None


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Why functions are not compiled for this device, found out by trying it once; None if they are."""
    if not kind_of(device).has_kernels:
        return f"compiled functions were tried on NVIDIA's GPUs only, not on {kind_of(device).title}"
    try:
        with torch.no_grad():
            torch.compile(_probe, dynamic=True, options=OPTIONS)(torch.ones(8, 8, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a missing compiler or Triton, a driver that is too old: torch has no common type
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"torch.compile failed: {type(error).__name__}: {first_line}"
    return None


def _probe(x: Tensor) -> Tensor:
    return x.mul(2).sub(x.amax(1, keepdim=True)).exp()


# -- rotary positions (Su et al. 2021, arXiv 2104.09864) ---------------------------------------------------------------
def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[B, H, N, D]` and keys `[B, K, N, D]` rotated by their positions; cos and sin are `[B, N, D]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if not torch.is_grad_enabled():
        return turned(q, cos, sin), turned(k, cos, sin)
    return cast(Tensor, _Rotation.apply(q, cos, sin)), cast(Tensor, _Rotation.apply(k, cos, sin))


@fused
def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x1 cos1 - x2 sin1, x2 cos2 + x1 sin2), with x1 and x2 the halves of the last axis; a new tensor."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


@fused
def turned_back(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of x from that of `turned`: (g1 cos1 + g2 sin2, g2 cos2 - g1 sin1)."""
    half = g.shape[-1] // 2
    back = g * cos
    back[..., :half].addcmul_(g[..., half:], sin[..., half:])
    back[..., half:].addcmul_(g[..., :half], sin[..., :half], value=-1)
    return back


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return turned_back(*grad_outputs, *ctx.saved_tensors), None, None


# -- modules that are replaced -----------------------------------------------------------------------------------------
ROUNDINGS = 8
"""Units of rounding by which a function may be off. A written-out norm or MLP rounds two results before its last step,
and compiled in one pass only the last of them; the down projection's output is rounded on both sides, and its sum may
cancel by half."""


def install(model: nn.Module) -> str:
    """Replaces the forward of every module that the functions serve; says which are fused, and which are not."""
    replaced: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    with torch.no_grad():
        for module in model.modules():
            for fits, forwards in ((_is_norm, (_norm, _shifted_norm)), (can_be_gated, (_gated,))):
                if not fits(module):
                    continue
                forward = next((forward for forward in forwards if _same(module, forward)), None)
                if forward is None:
                    kept[type(module).__name__] += 1
                    continue
                keeps_own = fits is _is_norm and not serves(cast(Tensor, module.weight))  # in 16 bits on a CPU
                (kept if keeps_own else replaced)[type(module).__name__] += 1
                module.forward = functools.partial(forward, module, module.forward)
    parts = (("fused", replaced), ("as in transformers", kept))
    return "; ".join(f"{words}: {_counted(counts)}" for words, counts in parts if counts)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def _same(module: Any, forward: Any) -> bool:
    """Whether function and module agree on a probe, except for rounding."""
    first = module if hasattr(module, "weight") else module.gate_proj
    width, dtype = first.weight.shape[-1], first.weight.dtype
    if is_4bit(first):
        width, dtype = first.in_features, first.compute_dtype
    elif not dtype.is_floating_point:
        return False
    numbers = torch.randn(1, 8, width, generator=torch.Generator().manual_seed(0))
    probe = numbers.to(first.weight.device, dtype)
    try:
        expected = module(probe)
    except (RuntimeError, TypeError):
        return False
    return _near(forward(module, module.forward, probe), expected)


def _near(found: Tensor, expected: Tensor) -> bool:
    """Whether the norm of the difference is within roundings of the expected norm.

    Single numbers may differ by more: where a sum cancels, or where the compiler of a fused function leaves out a
    rounding. In float32 sums over a row are made in another order, with more error than one rounding.
    """
    bound = 1e-5 if is_wide(expected) else ROUNDINGS * torch.finfo(expected.dtype).eps / 2
    wide = torch.promote_types(expected.dtype, torch.float32)
    return bool((found.to(wide) - expected.to(wide)).norm() <= bound * expected.to(wide).norm())  # False for NaN


# -- norms -------------------------------------------------------------------------------------------------------------
def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, Tensor)
        and weight.dim() == 1
        and _eps(module) > 0
    )


def _eps(module: Any) -> float:
    return getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)) or 0.0


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""

    weight: Tensor
    eps: float
    adds_one: bool = False  # whether x is multiplied by 1 + weight, before it is rounded (Gemma, Qwen3-Next)


class Heads(NamedTuple):
    """How queries and keys are made of a layer's input."""

    norm: Norm  # the layer's input norm
    query_norm: Norm | None  # norm over each head of the queries before it is rotated; None if there is none
    key_norm: Norm | None  # the same for the keys
    size: int  # of a head
    cos: Tensor  # `[1, N, D]`, cosines of the rotary positions
    sin: Tensor  # `[1, N, D]`, their sines

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines as `[N, 1, D]`, for all heads of a token."""
        return self.cos.transpose(0, 1), self.sin.transpose(0, 1)


def norm_of(module: Any) -> Norm | None:
    """A norm that was replaced; None if the module is not such a norm, or learns."""
    adds_one = is_replaced(module, _shifted_norm)
    if not (adds_one or is_replaced(module, _norm)) or module.weight.requires_grad:
        return None
    return Norm(module.weight, _eps(module), adds_one)


def serves(x: Tensor) -> bool:
    """Whether norms and whole branches for this x are computed here."""
    return is_wide(x) or kind_of(x.device).has_kernels


def is_wide(x: Tensor) -> bool:
    """Whether x is in float32 or float64."""
    return x.dtype in (torch.float32, torch.float64)


def is_replaced(module: Any, forward: Any) -> bool:
    """Whether this function of rlft has replaced the module's forward."""
    return isinstance(module.forward, functools.partial) and module.forward.func is forward


def _norm(module: Any, plain: Any, x: Tensor) -> Tensor:
    return _by(Norm(module.weight, _eps(module)), plain, x)


def _shifted_norm(module: Any, plain: Any, x: Tensor) -> Tensor:
    return _by(Norm(module.weight, _eps(module), adds_one=True), plain, x)


def _by(norm: Norm, plain: Any, x: Tensor) -> Tensor:
    """x after this norm, the steps in float32 at least; what the module itself gives where it is not served."""
    if norm.weight.requires_grad or not serves(x) or x.shape[-1] != len(norm.weight):
        return plain(x)
    if not torch.is_grad_enabled():
        return normed(x, *norm)[0]
    return cast(Tensor, _RMSNorm.apply(x, *norm))


@fused
def normed(x: Tensor, weight: Tensor, eps: float, adds_one: bool = False) -> tuple[Tensor, Tensor]:
    """(x after the norm, 1 / sqrt(mean(x^2) + eps) over the last axis, which is kept); no gradient.

    The second is float32 if x has 16 bits.
    """
    wide = _widened(x)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    if adds_one:
        return (wide * scale).mul_(_widened(weight) + 1).to(x.dtype), scale
    return (wide * scale).to(x.dtype).mul_(weight), scale


@fused
def norm_gradient(grad: Tensor, norm: Norm, x: Tensor, scale: Tensor, further: Tensor | None = None) -> Tensor:
    """The gradient of x from that of `normed`, which is overwritten; `further` is added, a gradient on another way."""
    wide = _widened(grad).mul_(_widened(norm.weight) + 1) if norm.adds_one else _widened(grad.mul_(norm.weight))
    row = _widened(x)
    along = torch.linalg.vecdot(wide, row)[..., None]
    back = wide.mul_(scale).addcmul_(row, along.mul_(scale.pow(3)).div_(-x.shape[-1])).to(x.dtype)
    return back if further is None else back.add_(further)


def _widened(x: Tensor) -> Tensor:
    return x if is_wide(x) else x.float()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        y, scale = normed(x, weight, eps, adds_one)
        ctx.save_for_backward(x, scale, weight)
        ctx.eps, ctx.adds_one = eps, adds_one
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grad_outputs
        x, scale, weight = ctx.saved_tensors
        return norm_gradient(grad.clone(), Norm(weight, ctx.eps, ctx.adds_one), x, scale), None, None, None


# -- gated MLPs --------------------------------------------------------------------------------------------------------
def can_be_gated(module: nn.Module) -> bool:
    """Whether this is a gated MLP with SiLU, which `install` replaces."""
    has_parts = all(
        isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")
    )
    return has_parts and _is_silu(getattr(module, "act_fn", None), module)


def _is_silu(function: Any, module: Any) -> bool:
    """Whether this is SiLU. In float32, since in 16 bits a GELU of small numbers is as near to it as a rounding."""
    if not isinstance(function, nn.Module):
        return False
    device = module.gate_proj.weight.device
    probe = torch.linspace(-6, 6, 64, device="cpu" if device.type == "meta" else device)
    try:
        return _near(function(probe), F.silu(probe))
    except (RuntimeError, TypeError):
        return False


def is_gated(module: Any) -> bool:
    """Whether this is a gated MLP with SiLU that was replaced."""
    return is_replaced(module, _gated)


def _gated(module: Any, plain: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    if not torch.is_grad_enabled():
        return module.down_proj(silu_product(gate, up))
    return module.down_proj(_SiLUProduct.apply(gate, up))


class _SiLUProduct(torch.autograd.Function):
    """silu(gate) * up; silu is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu_product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        [grad] = grad_outputs
        return _silu_gradients(grad, *ctx.saved_tensors)


@fused
def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; no gradient."""
    return F.silu(gate).mul_(up)


@fused
def _silu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
