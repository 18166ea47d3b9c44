"""Recurrent layers over a packed row: gated delta nets, Mamba-2, short convolutions.

A state is to them what keys and values are to attention: the last inputs of a convolution, and what a recurrence has
summed up. transformers' modules read it from a cache and write it there. So a module's own forward computes prompts
first, as padded rows, and then completions, each of which begins with its prompt's state.

The functions are those of flash-linear-attention, mamba-ssm and causal-conv1d where they are installed (extra
`hybrid`), and transformers' own in torch otherwise. transformers takes the functions of such a package also for tensors
on a CPU, where they crash, and on GPUs on which the package refuses gradients. There those in torch take their place.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels

from rlft.model.kernels.attention import AttentionProbe
from rlft.model.kernels.elementwise import is_replaced
from rlft.model.packing import Runs, StateRows, States
from rlft.model.sequence import TokenShare

if TYPE_CHECKING:
    from rlft.model.packing import PackedRows

CACHES = ("cache", "cache_params", "past_key_values")
"""The names that the argument for a cache has in transformers' modules; only the first since 5.24."""

KINDS = ("linear_attention", "conv", "hybrid", "moe", "mlp")
"""Kinds of layers (`layer_types` of a config) that are recurrent, recurrent with full attention, and neither."""


def install(model: PreTrainedModel) -> None:
    """Replaces the forward of every recurrent layer that this can serve."""
    for module in model.modules():
        cache = _cache_argument(module)
        if cache is not None and _begins_with_state(module):
            module.forward = functools.partial(_forward, module.forward, cache)


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether a layer of this model, empty or loaded, has a state; a loaded one's has been replaced."""
    return any(is_replaced(module, _forward) or _cache_argument(module) is not None for module in model.modules())


def parts_that_ranks_divide(model: PreTrainedModel) -> set[Parts] | None:
    """Those of recurrent layers, which ranks that share tokens divide; None if they cannot divide one's."""
    parts = {parts_of(module) for module in model.modules() if _cache_argument(module) is not None}
    return None if None in parts else {each for each in parts if each is not None}


def obstacle(model: PreTrainedModel) -> str | None:
    """Which layers of this model, loaded or empty, cannot be computed in a packed row, and why; None if all can."""
    layers = (module for module in model.modules() if _cache_argument(module) is not None)
    wrong = next((module for module in layers if not _begins_with_state(module)), None)
    return None if wrong is None else f"{type(wrong).__name__} cannot begin several tokens with a given state"


def _cache_argument(module: nn.Module) -> str | None:
    """The argument for the cache of a recurrent layer; None for others, which have no convolution over tokens."""
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return None
    arguments = inspect.signature(module.forward).parameters
    return next((name for name in CACHES if name in arguments), None)


def _begins_with_state(module: nn.Module) -> bool:
    """Whether it computes several tokens from a state, some of them padding. Mamba's first scan takes no state."""
    return "attention_mask" in inspect.signature(module.forward).parameters and not hasattr(module, "x_proj")


def _forward(plain: Any, cache: str, /, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """`[1, N, hidden]` from `[1, N, hidden]` of a packed row; for other inputs what the module itself gives."""
    # The layers of LFM2 hand only `seq_idx` on to their convolutions.
    packed: PackedRows | AttentionProbe | None = kwargs.get("packed") or kwargs.get("seq_idx")
    if packed is None:
        return plain(hidden_states, **kwargs)
    if isinstance(packed, AttentionProbe):
        return torch.zeros_like(hidden_states)
    over_runs = functools.partial(_over_runs, packed.state_rows)
    if packed.share is not None:
        states = SharedStates(packed, over_runs)
        with sharing_states(states):
            outputs = plain(hidden_states, **{cache: states, "attention_mask": None})
        states.check()
        return outputs

    def computed(runs: Runs, states: States) -> Tensor:
        x = hidden_states[0].index_select(0, runs.index.flatten()).view(*runs.index.shape, -1)
        return plain(x, **{cache: states, "attention_mask": runs.mask}).flatten(0, 1)

    return over_runs(computed)[None]


def _over_runs(rows: StateRows, compute: Callable[[Runs, States], Tensor]) -> Tensor:
    """`[N, ..]`, for each token of a packed row what `compute` gives for the columns `[R * C, ..]` of its runs."""
    begun, outputs = States(None), []
    for runs in rows.runs:
        states = States(runs.mask, None if runs.after is None else begun, runs.after)
        outputs.append(compute(runs, states))
        if runs.after is None:
            begun.join(states)
    return torch.cat(outputs).index_select(0, rows.place)


# -- rows whose tokens several ranks share -----------------------------------------------------------------------------
CONVOLUTION, DELTA_RULES = "causal_conv1d_fn", ("chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""Names of the functions in the modules of transformers' classes, some of them after `torch_`."""

NOT_REPLACED = "a layer's function over tokens is another one, which would see those of this rank alone"


def is_over_tokens(name: str) -> bool:
    return name.removeprefix("torch_") in (CONVOLUTION, *DELTA_RULES)


class Parts(NamedTuple):
    """The numbers of channels, of heads and of heads of keys of a recurrent layer, which ranks divide.

    A layer that is a convolution alone has 0 heads.
    """

    channels: int
    heads: int
    key_heads: int


def parts_of(layer: nn.Module) -> Parts | None:
    """The parts of a recurrent layer; None if ranks cannot divide them."""
    convolutions = [child.in_channels for child in layer.children() if isinstance(child, nn.Conv1d)]
    names = {name.removeprefix("torch_") for name in vars(sys.modules[type(layer).__module__])}
    if len(convolutions) != 1 or CONVOLUTION not in names:
        return None
    heads = getattr(layer, "num_v_heads", None) or getattr(layer, "num_heads", None)
    if heads is not None:
        has_rule = bool(names & {*DELTA_RULES})
        return Parts(convolutions[0], heads, getattr(layer, "num_k_heads", heads)) if has_rule else None
    return None if hasattr(layer, "A_log") else Parts(convolutions[0], 0, 0)  # LFM2's convolutions


class SharedStates(States):
    """The cache of a module's call with this rank's tokens, and what replaces the functions over all tokens in it."""

    def __init__(self, packed: PackedRows, over_runs: Callable[..., Tensor]) -> None:
        """over_runs: gives for each token of the whole row what a function gives for its runs (`_over_runs`)."""
        super().__init__(None)
        assert packed.share is not None
        self._share, self._num_tokens, self._over_runs = packed.share, packed.num_tokens, over_runs
        self._kernel_size, self._called = 0, set[str]()

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the function gives for this rank's tokens."""
        over_tokens = self._convolved if name.removeprefix("torch_") == CONVOLUTION else self._summed_up
        self._called.add(over_tokens.__name__)
        return over_tokens(function, *args, **kwargs)

    def check(self) -> None:
        """Checks that the module has convolved all tokens, and not this rank's alone."""
        assert "_convolved" in self._called, NOT_REPLACED

    def _convolved(
        self, function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """`[1, D, n]` of inputs `[1, D, n]`."""
        of_channels = self._to_heads(x[0].T[..., None])[..., 0]  # [N, D / ranks]
        weight, bias = self._share.own_heads(weight), None if bias is None else self._share.own_heads(bias)

        def convolved(runs: Runs, states: States) -> Tensor:
            columns = states.update_conv_state(of_channels[runs.index].mT, 0, conv_kernel_size=self._kernel_size)
            return function(columns, weight, bias, **kwargs)[..., -runs.index.shape[1] :].mT.flatten(0, 1)

        return self._to_tokens(self._over_runs(convolved)[..., None])[..., 0].T[None]

    def _summed_up(
        self, function: Callable[..., tuple[Tensor, Tensor]], *args: Tensor, initial_state: None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """(`[1, n, H, D]`, nothing) of queries, keys, values, decays and rates `[1, n, H, ..]`."""
        rates = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
        others = {name: x for name, x in kwargs.items() if not isinstance(x, Tensor)}
        tensors = [*args, *rates.values()]
        of_heads = [self._to_heads(x[0].unflatten(-1, (-1, 1)) if x.dim() == 3 else x[0]) for x in tensors]

        def summed_up(runs: Runs, states: States) -> Tensor:
            rows = [x[runs.index] for x in of_heads]
            if runs.mask is not None:  # what has no key and no value adds nothing to a state
                rows[1:3] = [x * runs.mask[..., None, None] for x in rows[1:3]]
            rows = [row.flatten(-2) if x.dim() == 3 else row for row, x in zip(rows, tensors, strict=True)]
            named = dict(zip(rates, rows[len(args) :], strict=True))
            begun = states.get_recurrent_state(0)
            out, last = function(*rows[: len(args)], **named, **others, initial_state=begun)
            states.update_recurrent_state(last, 0)
            return out.flatten(0, 1)

        out = self._to_tokens(self._over_runs(summed_up))[None]
        return out, out.new_empty(0)

    def _to_heads(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Exchanged.apply(x, self._share, self._num_tokens, None))

    def _to_tokens(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Exchanged.apply(x, self._share, self._num_tokens, x.shape[1] * self._share.ranks))

    # -- what transformers' modules ask of a cache: here it has no state -----------------------------------------------
    def update_conv_state(self, x: Tensor, layer: int, state_idx: int = 0, *, conv_kernel_size: int) -> Tensor:
        self._kernel_size = conv_kernel_size
        return x

    def update_recurrent_state(self, x: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        assert "_summed_up" in self._called, NOT_REPLACED
        return x


class _Exchanged(torch.autograd.Function):
    """`_exchanged`, whose gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: TokenShare, num_tokens: int, heads: int | None) -> Tensor:
        ctx.back = share, num_tokens, x.shape[1] if heads is None else None
        return _exchanged(x, share, num_tokens, heads)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad_outputs[0].contiguous(), *ctx.back), None, None, None


def _exchanged(x: Tensor, share: TokenShare, num_tokens: int, heads: int | None) -> Tensor:
    """`[n, heads, D]` of `[N, heads / ranks, D]`; without `heads` `[N, H / ranks, D]` of `[n, H, D]`."""
    [result] = share.to_heads(num_tokens, x) if heads is None else share.to_tokens(x, heads=[heads])
    return result


# -- functions of packages ---------------------------------------------------------------------------------------------
DELTA_RULE = "chunk_gated_delta_rule"  # whose gradients flash-linear-attention may refuse

Function = Callable[..., Any]


def install_functions(model: nn.Module) -> None:
    """Makes the functions that the model's layers call choose by the device of their tensors; nothing is done twice."""
    for functions, name, function in _functions(model):
        is_one = inspect.isfunction(function) and hasattr(function, "__wrapped__")
        if is_one and inspect.getfile(function.__code__) == hub_kernels.__file__:
            functions[name] = _Choice(name, function, why_no_gradients() if name.endswith(DELTA_RULE) else None)


def obstacle_of_functions(model: nn.Module) -> str | None:
    """Why layers of the model are computed in torch on a GPU, although a package for them is installed."""
    chosen = (function.obstacle for _, _, function in _functions(model) if isinstance(function, _Choice))
    return next(filter(None, chosen), None)


def why_no_gradients() -> str | None:
    """Why flash-linear-attention has no gradients of gated delta rules on this GPU; None if it has, or is not in use.

    Triton 3.4 to 3.7.0 computes wrong ones on Hopper GPUs (issue 640 of flash-linear-attention).
    """
    utils = sys.modules.get("fla.utils")  # transformers has imported it if it can be
    if utils is None or importlib.util.find_spec("tilelang") is not None:
        return None
    is_fixed = getattr(utils, "TRITON_ABOVE_3_7_1", False)
    if is_fixed or not (getattr(utils, "IS_NVIDIA_HOPPER", False) and getattr(utils, "TRITON_ABOVE_3_4_0", False)):
        return None
    fix = "triton>=3.7.1 and flash-linear-attention>=0.6 fix it"
    return f"flash-linear-attention has no right gradients on Hopper GPUs with this Triton ({fix})"


class _Choice:
    """A package's function, or for tensors on a CPU, or where there is an obstacle, the one in torch."""

    def __init__(self, name: str, function: Function, obstacle: str | None) -> None:
        functools.update_wrapper(self, function)
        self.name = name
        self.function, self.in_torch, self.obstacle = function, inspect.unwrap(function), obstacle

    def __call__(self, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = self.in_torch if self.obstacle is not None or first.is_cpu else self.function
        states = _shared.get()
        if states is not None and is_over_tokens(self.name):
            return states.call(self.name, chosen, first, *args, **kwargs)
        return chosen(first, *args, **kwargs)


_shared: ContextVar[SharedStates | None] = ContextVar("states of rows that ranks share", default=None)


@contextmanager
def sharing_states(states: SharedStates) -> Iterator[None]:
    """Inside, functions over tokens are computed together with the other ranks."""
    before = _shared.set(states)
    try:
        yield
    finally:
        _shared.reset(before)


def _functions(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(the names of a module of Python, one of them, what it names) where the classes of the model's modules are."""
    for module in {type(module).__module__ for module in model.modules()}:
        names = vars(sys.modules[module])
        yield from ((names, name, names[name]) for name in list(names))
