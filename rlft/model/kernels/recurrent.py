"""Recurrent layers over a packed row: gated delta nets, Mamba-2, short convolutions.

A state is to them what keys and values are to attention: the last inputs of a convolution, and what a recurrence has
summed up. transformers' modules read it from a cache and write it there. So a module's own forward computes prompts
first, as padded rows, and then completions, each of which begins with its prompt's state. transformers chooses the
functions: those of flash-linear-attention, mamba-ssm and causal-conv1d where they are installed (extra `hybrid`), and
its own in torch otherwise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlft.model.kernels import state_functions
from rlft.model.kernels.elementwise import is_replaced
from rlft.model.kernels.layer_attention import AttentionProbe
from rlft.model.kernels.shared_states import Parts, SharedStates, parts_of
from rlft.model.kernels.state_rows import Runs, StateRows, States

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
        with state_functions.shared(states):
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
