"""Attention over a packed row: each prompt attends to itself, each completion to its prompt and to itself.

Registered with transformers under `NAME`, so that any model whose attention goes through the AttentionInterface can use
it; without a `packed` or `prefix_cache` argument it is plain SDPA. No N x N mask is ever made: a row is computed over
its spans, by flash calls on a CUDA GPU or by blocks elsewhere. Scale, cap and sinks are arguments of a layer's own
call, and its sliding window comes with its mask, so that no model is known by name.

How each layer of a model attends no class says: a pass over three tokens notes it. It goes through the model with the
mask of a packed row (`packed_mask`), which transformers hands on to the layers with what it would let a token see, and
with an `AttentionProbe` in place of a row, which the attention function meets and notes. In the pass no token sees
another: where the last token's hidden state depends on the others nevertheless, something else passes numbers on, and
the model computes no packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlft.model.kernels import elementwise, flash_attention, split_attention
from rlft.model.kernels.flash_attention import RowLengths
from rlft.model.kernels.split_attention import Block, Scoring, wide
from rlft.model.sequence import TokenShare

if TYPE_CHECKING:
    from rlft.model.packing import PackedRows
    from rlft.types import ImageRows


# -- over the spans of a row -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpans:
    """The spans of a row whose tokens several ranks share."""

    whole: Sequence[Block] | RowLengths  # those of the whole row
    share: TokenShare  # which of its tokens this rank has
    num_tokens: int  # of the whole row

    def to_heads(self, *parts: Tensor) -> list[Tensor]:
        """As `TokenShare.to_heads`."""
        return self.share.to_heads(self.num_tokens, *parts)


Spans = Sequence[Block] | RowLengths | SharedSpans
"""Which tokens of a packed row see which: blocks, or lengths for flash attention on a CUDA GPU."""


def spans_of(
    packed: PackedRows, x: Tensor, head_size: int, window: int | None = None, cap: float | None = None
) -> Spans:
    """Which tokens of this row see which, for heads of this size and of the dtype of x."""
    whole = None
    if flash_attention.takes(x.dtype, head_size, x.device, caps=cap is not None):
        whole = packed.lengths(window)
    whole = packed.blocks(window) if whole is None else whole
    if packed.share is None:
        return whole
    return SharedSpans(whole=whole, share=packed.share, num_tokens=packed.num_tokens)


def attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scoring: Scoring, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(attention `[N, H, D]`, three further tensors that `attention_gradients` needs); no gradient."""
    if isinstance(spans, SharedSpans):
        sinks = None if sinks is None else spans.share.own_heads(sinks)
        q, k, v = spans.to_heads(query, key, value)
        of_heads, lse, random, unused = attend(q, k, v, spans.whole, scoring, sinks)
        [out] = spans.share.to_tokens(of_heads, heads=[query.shape[1]])
        return out, lse, random, unused
    random = unused = None
    if isinstance(spans, RowLengths):
        out, lse, random, unused = flash_attention.attend(query, key, value, spans, scoring.scale)
    else:
        out, lse = split_attention.attend(query, key, value, spans, scoring)
    if sinks is not None:
        with_sinks(out, by_token(lse, spans), sinks)
    return out, lse, random, unused


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Overwrites attention `[N, H, D]` and log-sum-exp `[N, H, 1]` by those that sinks `[H]` take a share of."""
    scores = sinks.detach().to(lse.dtype)[:, None]
    out.mul_((lse - scores).sigmoid().to(out.dtype))
    lse.copy_(torch.logaddexp(lse, scores))


def by_token(lse: Tensor, spans: Spans) -> Tensor:
    """`[N, H, 1]`; the same memory, except where ranks share the row."""
    if isinstance(spans, SharedSpans):
        of_heads = by_token(lse, spans.whole)
        return spans.share.to_tokens(of_heads, heads=[of_heads.shape[1] * spans.share.ranks])[0]
    return lse.t()[..., None] if isinstance(spans, RowLengths) else lse


def attention_gradients(
    grad: Tensor, kept: Sequence[Tensor], spans: Spans, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (new tensors) from that of the attention.

    `kept` are query, key, value and the results of `attend`.
    """
    if isinstance(spans, SharedSpans):
        query, key, value, out, lse, random, unused = kept
        *of_heads, grad = spans.to_heads(query, key, value, out, grad)
        gradients = attention_gradients(grad, [*of_heads, lse, random, unused], spans.whole, scoring)
        heads = [x.shape[1] for x in (query, key, value)]
        query_grad, key_grad, value_grad = spans.share.to_tokens(*gradients, heads=heads)
        return query_grad, key_grad, value_grad
    if isinstance(spans, RowLengths):
        return flash_attention.attention_gradients(grad, kept, spans, scoring.scale)
    return split_attention.attention_gradients(grad, kept[:5], spans, scoring)


class RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, spans: Spans, scoring: Scoring
    ) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out, *kept = attend(query, key, value, spans, scoring, sinks)
        ctx.save_for_backward(sinks, query, key, value, out, *kept)
        ctx.spans, ctx.scoring = spans, scoring
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad, (sinks, *kept), sinks_grad = grad_outputs[0].contiguous(), ctx.saved_tensors, None
        if ctx.needs_input_grad[3]:  # their share of each token's attention, times what they lack: the mean
            out, lse = kept[3], by_token(kept[4], ctx.spans)
            mean = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
            shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
            sinks_grad = -(shares * mean).sum((0, 2)).to(sinks.dtype)
        return *attention_gradients(grad, kept, ctx.spans, ctx.scoring), sinks_grad, None, None


# -- as transformers calls it ------------------------------------------------------------------------------------------
NAME = "rlft_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedRows | AttentionProbe | None = None,
    prefix_cache: Any = None,  # a `PrefixCache`, which is built on this module
    softcap: float | None = None,  # scores are `softcap * tanh(score / softcap)`
    s_aux: Tensor | None = None,  # `[H]`, scores of sinks, which take a share of a query's attention and give nothing
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[1, N, H, D]` from query `[1, H, N, D]` and key, value `[1, K, N, D]` with K key heads (H a multiple of K)."""
    if isinstance(packed, AttentionProbe):
        return packed.attend(module, query, value, attention_mask, softcap, kwargs), None
    if packed is None and prefix_cache is None:
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        return _row_attention(query, key, value, attention_mask, Scoring(scaling, softcap), s_aux), None
    assert dropout == 0, "dropout is set to 0 where models are loaded"
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
    window, size = window_of(attention_mask), value.shape[-1]
    width = max(query.shape[-1], size)
    # Zeros behind heads change no score, and nothing of what is before them.
    query_NHD, key_NKD, value_NKD = (_widened(x[0].transpose(0, 1), width) for x in (query, key, value))
    if prefix_cache is not None:
        out = prefix_cache.attend(query_NHD, key_NKD, value_NKD, scoring, window, s_aux)
    else:
        assert packed is not None
        spans = spans_of(packed, query, width, window, softcap)
        out = cast(Tensor, RowAttention.apply(query_NHD, key_NKD, value_NKD, s_aux, spans, scoring))
    return out[None, ..., :size], None


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _row_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """`[B, N, H, D]` of rows as transformers has them, by plain products; the mask is SDPA's, True where a key is seen.

    SDPA itself leaves out caps and sinks.
    """
    heads, (width, reach) = query.shape[1], (query.shape[2], key.shape[2])
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = (query * scale @ key.transpose(-1, -2)).to(wide(query))
    if scoring.cap is not None:
        scores = (scores / scoring.cap).tanh() * scoring.cap
    if mask is None:  # left out by transformers where all is causal
        mask = torch.ones(width, reach, dtype=torch.bool, device=query.device).tril(reach - width)
    # A query without keys, in the padding, gives no NaN.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :reach].to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


# -- which models have it ----------------------------------------------------------------------------------------------
def prepare(packed: PackedRows, model: PreTrainedModel) -> None:
    """Makes what attention on the model's device reads of a packed row, so that it goes there together with the row."""
    if model.device.type == "cpu":
        return
    for layer in set(attention_of_layers(model)):
        x = torch.empty(0, dtype=model.dtype, device=model.device)
        spans_of(packed, x, layer.head_size, layer.window, 1.0 if layer.cap else None)


def on_this_device(model: PreTrainedModel) -> str:
    """How a packed row is computed on the model's device, in words; empty on a CPU, where there is only one way."""
    if model.device.type == "cpu":
        return ""
    heads = ((layer.head_size, layer.cap) for layer in attention_of_layers(model))
    problems = (flash_attention.obstacle(model.dtype, size, model.device, caps=cap) for size, cap in heads)
    why_not = next(filter(None, problems), None)
    fusion_obstacle = elementwise.obstacle(model.device)
    return ", ".join(
        [
            "attention by variable-length flash calls"
            if why_not is None
            else f"attention by plain products, since {why_not}",
            "fused steps" if fusion_obstacle is None else f"steps one by one, since {fusion_obstacle}",
        ]
    )


def install(model: PreTrainedModel) -> None:
    """Gives the model this attention, if it lets its attention be chosen."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


def install_plain(model: PreTrainedModel) -> None:
    """Leaves transformers' own attention: SDPA, or eager where SDPA would silently leave something out."""
    caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    if (caps or not model._supports_sdpa) and model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


# -- how layers attend -------------------------------------------------------------------------------------------------
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


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, mask_of_layers)
