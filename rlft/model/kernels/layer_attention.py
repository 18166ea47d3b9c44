"""How each layer of a model attends, which no class says: a pass over three tokens notes it.

The pass goes through the model with the mask of a packed row (`packed_mask`), which transformers hands on to the layers
with what it would let a token see, and with an `AttentionProbe` in place of a row, which the attention function meets
and notes. In the pass no token sees another: where the last token's hidden state depends on the others nevertheless,
something else passes numbers on, and the model computes no packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from rlft.types import ImageRows


@dataclass(frozen=True, slots=True)
class Sees:
    """What a mask that a packed row goes with would let a token see. The mask itself, which has it as an attribute,
    is never read: a model gets one of tokens `[1, N]`, and where transformers would make of it the mask of a kind of
    layers, these get another one.
    """

    window: int | None = None  # the sliding window in tokens; None: everything before the token
    # transformers' function that says which places see which; None in the mask of tokens.
    rule: Callable[..., Any] | None = None


def packed_mask(num_tokens: int, device: torch.device) -> Tensor:
    """The mask with which a packed row of this many tokens goes through a model."""
    return _with(torch.ones(1, num_tokens, dtype=torch.bool, device=device), Sees())


def _with(mask: Tensor, sees: Sees) -> Tensor:
    cast(Any, mask).sees = sees
    return mask


def mask_of_layers(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    if attention_mask is None or not hasattr(attention_mask, "sees"):
        return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    return _with(attention_mask[None, None, :1, :1], Sees(kwargs.get("local_size"), kwargs.get("mask_function")))


def window_of(mask: Tensor | None) -> int | None:
    """The sliding window of a layer with this mask in a pass over a packed row."""
    return getattr(mask, "sees", Sees()).window


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """How a layer attends."""

    module: str  # the class of its attention
    head_size: int  # numbers in a head, of queries or of values
    heads: int  # number of heads of queries
    key_heads: int  # number of heads of keys and values
    window: int | None  # its sliding window in tokens; None: it has none
    cap: bool  # whether its scores are capped
    # What a packed row cannot do, in words that follow the name of the class; None if it can do it all.
    problem: str | None


KNOWN = frozenset({"sliding_window", "is_causal", "position_ids", "use_cache", "output_attentions", "seq_idx"})
"""Arguments of an attention function that change nothing besides the mask, or nothing at all."""


class AttentionProbe:
    """Stands for a packed row, to note how layers attend; all else that serves packed rows gives 0 for it as well."""

    def __init__(self) -> None:
        self.layers: list[LayerAttention] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        value: Tensor,
        mask: Tensor | None,
        cap: float | None,
        others: Mapping[str, Any],
    ) -> Tensor:
        """Attention that gives nothing, `[1, N, H, D]`."""
        unset = (None, False)
        unknown = [name for name, given in others.items() if name not in KNOWN and not any(given is x for x in unset)]
        problem = f"gives its attention {', '.join(unknown)}" if unknown else _problem(module, mask, others)
        size = max(query.shape[-1], value.shape[-1])
        self.layers.append(
            LayerAttention(
                module=type(module).__name__,
                head_size=size,
                heads=query.shape[1],
                key_heads=value.shape[1],
                window=window_of(mask),
                cap=cap is not None,
                problem=problem,
            )
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def _problem(module: nn.Module, mask: Tensor | None, others: Mapping[str, Any]) -> str | None:
    """What keeps this mask from being causal with or without a window, in words; None if it is."""
    if mask is None:
        causal = others.get("is_causal")
        return None if (getattr(module, "is_causal", True) if causal is None else causal) else "sees the tokens behind"
    sees = getattr(mask, "sees", Sees())
    if sees.rule is None:
        return "has a mask of its own"
    reach = sees.window or 4
    keys = {0: sees.window is None, reach: sees.window is None, reach + 1: True, 2 * reach: True, 2 * reach + 1: False}
    try:
        places = [torch.tensor(place) for place in (0, 0, 2 * reach)]
        seen = [bool(sees.rule(*places, torch.tensor(key))) for key in keys]
    except (RuntimeError, TypeError, IndexError):  # it depends on what is in the row
        seen = []
    return None if seen == list(keys.values()) else "sees neither all tokens before one nor those in a sliding window"


_attention_of_layers: WeakKeyDictionary[nn.Module, tuple[LayerAttention, ...]] = WeakKeyDictionary()


def attention_of_layers(model: PreTrainedModel) -> tuple[LayerAttention, ...]:
    """How the layers of a model with this attention attend, found out by passes over three tokens.

    A model without weights tells how its layers attend, but not whether anything else passes numbers on.

    Raises:
        NotPackableError: a layer attends in a way that packed rows do not have, or something else passes numbers from
            token to token.
    """
    if model not in _attention_of_layers:
        _attention_of_layers[model] = _probe_layers(model)
    return _attention_of_layers[model]


class NotPackableError(Exception):
    """A model that does not compute packed rows; the text says why."""


MIXED = 0.05
"""By which share of its norm a token's hidden state may differ among other tokens: experts that compute it together
with others round it otherwise."""


MIXES_TOKENS = "has layers in which a token sees those before it, and which are not those of packed rows"
APART = "keep packed sequences apart"  # what transformers says from 5.20 on, in place of such numbers


@torch.no_grad()
def _probe_layers(model: PreTrainedModel) -> tuple[LayerAttention, ...]:
    probes, last_states, name = [], [], type(model).__name__
    try:
        for others in (1,) if model.device.type == "meta" else (1, 2):
            ids = torch.tensor([[others, others, 1]], device=model.device)
            probes.append(AttentionProbe())
            hidden = hidden_states(model, ids, torch.arange(3, device=ids.device)[None], packed=probes[-1])
            last_states.append(hidden[0, 2].float())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's code does with arguments that it does not know
        if APART in str(error):
            raise NotPackableError(f"{name} {MIXES_TOKENS}") from error
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        raise NotPackableError(f"{name} takes no packed row ({type(error).__name__}: {first_line})") from error
    attention, one, other = probes[0].layers, last_states[0], last_states[-1]
    problem = next((f"{each.module} {each.problem}" for each in attention if each.problem is not None), None)
    if problem is None and not one.is_meta and not (other - one).norm() <= MIXED * one.norm():
        problem = f"{name} {MIXES_TOKENS}"
    if problem is not None:
        raise NotPackableError(problem)
    return tuple(attention)


def hidden_states(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, images: ImageRows | None = None, **kwargs: Any
) -> Tensor:
    """`[1, N, hidden]`, after the final norm, of tokens `[1, N]` at these positions, in a pass over a packed row."""
    inputs = {"input_ids": ids} if images is None else images.inputs(model, ids)
    return model.base_model(
        **{"position_ids": positions, **inputs},
        attention_mask=packed_mask(ids.shape[1], ids.device),
        use_cache=False,
        seq_idx=kwargs.get("packed"),  # see recurrent
        **kwargs,
    ).last_hidden_state.to(model.dtype)  # Mamba-2 adds up its layers in float32
