"""Recurrent layers in rows whose tokens several ranks share (`rlft.model.sequence`).

A module's own forward computes this rank's tokens. It calls two functions that need the tokens before them, a short
convolution and a delta rule, in which channels and heads do not depend on each other. So an exchange turns all channels
or heads of a rank's tokens into a part of those of all tokens, which go through the function as runs (`recurrent`), and
another exchange turns the results back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlft.model.kernels.state_rows import Runs, States
from rlft.model.sequence import TokenShare

if TYPE_CHECKING:
    from rlft.model.packing import PackedRows

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
        """over_runs: gives for each token of the whole row what a function gives for its runs (`recurrent`)."""
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
        return cast(Tensor, _ToHeads.apply(x, self._share, self._num_tokens))

    def _to_tokens(self, x: Tensor) -> Tensor:
        return cast(Tensor, _ToTokens.apply(x, self._share, self._num_tokens))

    # -- what transformers' modules ask of a cache: here it has no state -----------------------------------------------
    def update_conv_state(self, x: Tensor, layer: int, state_idx: int = 0, *, conv_kernel_size: int) -> Tensor:
        self._kernel_size = conv_kernel_size
        return x

    def update_recurrent_state(self, x: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        assert "_summed_up" in self._called, NOT_REPLACED
        return x


class _ToHeads(torch.autograd.Function):
    """`[N, H / ranks, D]` of `[n, H, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: TokenShare, num_tokens: int) -> Tensor:
        ctx.share, ctx.heads = share, x.shape[1]
        [of_heads] = share.to_heads(num_tokens, x)
        return of_heads

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        [grad] = ctx.share.to_tokens(grad_outputs[0].contiguous(), heads=[ctx.heads])
        return grad, None, None


class _ToTokens(torch.autograd.Function):
    """`[n, H, D]` of `[N, H / ranks, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: TokenShare, num_tokens: int) -> Tensor:
        ctx.share, ctx.num_tokens = share, num_tokens
        [of_tokens] = share.to_tokens(x, heads=[x.shape[1] * share.ranks])
        return of_tokens

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        [grad] = ctx.share.to_heads(ctx.num_tokens, grad_outputs[0].contiguous())
        return grad, None, None
