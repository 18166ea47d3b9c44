"""Log-probs and entropies of given tokens from hidden states, through an LM head that is frozen.

Each is one number for a token, so its gradient with respect to the hidden state is one vector for a token, which is
known as soon as the probabilities are:

    d log p(y) / dh = (W_y - sum_v p_v W_v) / T            d H / dh = -(sum_v p_v (log p_v + H) W_v) / T

with W the head's rows and T the temperature. The forward makes these vectors from the same logits, a chunk at a time,
and the backward multiplies them with the incoming gradients: logits are computed once, and never kept.

Some models scale the head's numbers z, or cap them: their logits are cap tanh(scale z / cap). Each p_v and each W_y
above then gets the factor d logit / d z. What a model does is found out by giving its forward numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlft.model.activations import logit_rows
from rlft.model.kernels.attention import NotPackableError
from rlft.model.kernels.elementwise import fused
from rlft.system.device import widest


class Head(NamedTuple):
    """An LM head, and what its model makes of its numbers z: `scale * z`, or capped `cap * tanh(scale * z / cap)`."""

    module: nn.Module
    scale: float = 1.0
    cap: float | None = None

    def logits(self, hidden: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """`[.., V]` from hidden states `[.., H]`, with other weights in the place of the module's."""
        if weights is not None:
            return self.made_of(torch.func.functional_call(self.module, dict(weights), (hidden,)))
        return self.made_of(self.module(hidden))

    def made_of(self, numbers: Tensor) -> Tensor:
        """The logits that become of the module's numbers."""
        if self.cap is not None:
            return (numbers * (self.scale / self.cap)).tanh() * self.cap
        return numbers if self.scale == 1 else numbers * self.scale


_heads: WeakKeyDictionary[nn.Module, tuple[float, float | None]] = WeakKeyDictionary()


def head_of(model: PreTrainedModel) -> Head:
    """The LM head of a model, and what the model does behind it: NotPackableError unless that is a factor or a cap."""
    module = model.get_output_embeddings()
    assert isinstance(module, nn.Module), "a causal language model has an output embedding"
    if model not in _heads:
        _heads[model] = _behind(model, module)
    return Head(module, *_heads[model])


LARGE, SMALL = 2.0**60, 2.0**-20  # numbers of a head at which a cap is reached, and at which it has no effect


@torch.no_grad()
def _behind(model: PreTrainedModel, module: nn.Module) -> tuple[float, float | None]:
    """(factor, cap): the model's forward gets numbers that the head has not computed."""
    numbers = torch.tensor([LARGE, SMALL, -3.0, 0.5, 7.0, 40.0], dtype=widest(model.device), device=model.device)

    def replaced(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return numbers.expand(*output.shape[:-1], -1)

    hook = module.register_forward_hook(replaced)
    try:
        ids = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].to(numbers.dtype)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError):  # it expects as many numbers as there are tokens
        logits = numbers.new_zeros(0)
    finally:
        hook.remove()
    if logits.shape == numbers.shape:
        limit, scale = logits[0].item(), logits[1].item() / SMALL
        cap = limit if limit < LARGE * scale / 2 else None
        if torch.allclose(logits, Head(module, scale, cap).made_of(numbers), rtol=1e-5, atol=0):
            return scale, cap
    name = type(model).__name__
    raise NotPackableError(f"{name} makes something else of its head's numbers than to scale or cap them")


def head_logprobs(
    head: Head, hidden_MH: Tensor, target_M: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """(log-probs `[M]`, entropy in nats `[M]` or None), float32, or float64 if the hidden states are.

    A head that is more than a frozen linear layer goes through autograd.
    """
    module = head.module
    if type(module) is nn.Linear and not any(weight.requires_grad for weight in module.parameters()):
        settings = (temperature, entropy, head.scale, head.cap)
        logprobs_M, entropy_M = _FrozenHead.apply(hidden_MH, module.weight, module.bias, target_M, *settings)
        return logprobs_M, entropy_M if entropy else None
    logprobs_M, *rest = _in_chunks(_of_targets, head, hidden_MH, target_M, temperature, entropy)
    return logprobs_M, rest[0] if rest else None


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        temperature: float,
        entropy: bool,
        scale: float,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden_MH.dtype == torch.float64 else torch.float32
        slopes = [torch.empty_like(hidden_MH)] if ctx.needs_input_grad[0] else []
        if entropy and slopes:
            slopes.append(torch.empty_like(hidden_MH))
        logprobs_M = hidden_MH.new_empty(len(target_M), dtype=wide)
        entropy_M = hidden_MH.new_empty(len(target_M) if entropy else 0, dtype=wide)
        size = chunk_rows(weight_VH, len(target_M))
        buffer_CV = hidden_MH.new_empty(size, len(weight_VH))
        for start in range(0, len(target_M), size):
            chunk = slice(start, start + size)
            target_C = target_M[chunk]
            # Every step is in place: a chunk's logits become log-probs or, if those are not needed again, probs.
            out_CV = buffer_CV[: len(target_C)]
            if bias_V is None:
                logits_CV = torch.mm(hidden_MH[chunk], weight_VH.t(), out=out_CV)
            else:  # the same for all hidden states, so that it is in no slope
                logits_CV = torch.addmm(bias_V, hidden_MH[chunk], weight_VH.t(), out=out_CV)
            factor_CV = None
            if cap is not None:
                logits_CV, factor_CV = _capped(logits_CV, scale, cap, bool(slopes))
            elif scale != 1:
                logits_CV.mul_(scale)
            if not (slopes or entropy):
                logprobs_M[chunk] = _logprobs(logits_CV, target_C, temperature, wide)
                continue
            logprobs_M[chunk], total_C, p_CV, logp_CV = _softmax(logits_CV, target_C, temperature, wide, entropy)
            if slopes:  # the division by the total comes last, when there are only H numbers to divide
                probs_CV = logits_CV if p_CV is None else p_CV.to(weight_VH.dtype)
                own_CH = weight_VH.index_select(0, target_C)
                if factor_CV is not None:
                    probs_CV = probs_CV * factor_CV
                    own_CH.mul_(factor_CV.gather(1, target_C[:, None]))
                mean_CH = (probs_CV @ weight_VH).div_(total_C[:, None])
                slopes[0][chunk] = own_CH.sub_(mean_CH).div_(temperature / scale)
                del probs_CV
            if p_CV is not None and logp_CV is not None:
                entropy_M[chunk], slope_CV = _entropy(p_CV, logp_CV, total_C, bool(slopes))
                if slope_CV is not None:
                    slope_CV = slope_CV if factor_CV is None else slope_CV.mul_(factor_CV)
                    slopes[1][chunk] = (slope_CV.to(weight_VH.dtype) @ weight_VH).div_(-temperature / scale)
                del slope_CV
            del p_CV, logp_CV, factor_CV  # else they are alive while the next chunk's are made
        ctx.save_for_backward(*slopes)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        total: Tensor | None = None
        for slope_MH, grad_M in zip(ctx.saved_tensors, grad_outputs, strict=False):
            part = slope_MH * grad_M[:, None].to(slope_MH.dtype)
            total = part if total is None else total.add_(part)
        return total, *(None,) * 7


@fused
def _capped(numbers_CV: Tensor, scale: float, cap: float, slope: bool) -> tuple[Tensor, Tensor | None]:
    """(capped logits `[C, V]`, which overwrite the numbers; their derivative, divided by the scale, or None)."""
    share_CV = numbers_CV.mul_(scale / cap).tanh_()
    factor_CV = share_CV.square().neg_().add_(1) if slope else None
    return share_CV.mul_(cap), factor_CV


@fused
def _logprobs(logits_CV: Tensor, target_C: Tensor, temperature: float, wide: torch.dtype) -> Tensor:
    """Log-probs `[C]` from logits, which may be overwritten."""
    shifted_C, p_CV = _shifted(logits_CV, target_C, temperature, wide)
    return shifted_C - p_CV.exp_().sum(1).log()


@fused
def _softmax(
    logits_CV: Tensor, target_C: Tensor, temperature: float, wide: torch.dtype, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(log-probs `[C]`, normaliser `[C]`, probs times the normaliser `[C, V]`, their logarithm), the last two in the
    dtype `wide` and only where an entropy is computed from them; otherwise the probs overwrite the logits."""
    shifted_C, p_CV = _shifted(logits_CV, target_C, temperature, wide)
    logp_CV = p_CV.clone() if entropy else None
    total_C = p_CV.exp_().sum(1)
    if entropy:
        return shifted_C - total_C.log(), total_C, p_CV, logp_CV
    logits_CV.copy_(p_CV)
    return shifted_C - total_C.log(), total_C, None, None


def _shifted(logits_CV: Tensor, target_C: Tensor, temperature: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the targets' logits `[C]`, all logits `[C, V]`), from which the largest of each row is subtracted."""
    p_CV = logits_CV.to(wide)
    if temperature != 1:
        p_CV.div_(temperature)
    p_CV.sub_(p_CV.amax(1, keepdim=True))
    return p_CV.gather(1, target_C[:, None])[:, 0], p_CV


@fused
def _entropy(p_CV: Tensor, logp_CV: Tensor, total_C: Tensor, slope: bool) -> tuple[Tensor, Tensor | None]:
    """(entropy H in nats `[C]`, p (log p + H) `[C, V]` or None); it overwrites the results of `_softmax`."""
    p_CV.div_(total_C[:, None])
    logp_CV.sub_(total_C.log()[:, None])
    entropy_C = -(p_CV * logp_CV).sum(1)
    return entropy_C, p_CV.mul_(logp_CV.add_(entropy_C[:, None])) if slope else None


def chunk_rows(weight_VH: Tensor, tokens: int) -> int:
    """How many of so many tokens have their logits alive at a time."""
    return logit_rows(len(weight_VH), weight_VH.device.type, tokens)


def _in_chunks(
    compute: Callable[..., tuple[Tensor, ...]], head: Head, hidden_MH: Tensor, ids_M: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    """The results of `compute(logits, ids, *settings)`, for some rows at a time.

    Logits are computed a chunk at a time, and again in the backward. `logits` is a function that returns them: an
    argument would keep the head's own numbers alive while what is computed from them needs as much memory.
    """

    def of_chunk(hidden_CH: Tensor, ids_C: Tensor) -> tuple[Tensor, ...]:
        return compute(lambda: widened(head.logits(hidden_CH)), ids_C, *settings)

    rows = chunk_rows(cast(Tensor, head.module.weight), len(ids_M))
    parts = [
        checkpoint(of_chunk, *chunks, use_reentrant=False, preserve_rng_state=False)
        for chunks in zip(hidden_MH.split(rows), ids_M.split(rows), strict=True)
    ]
    return tuple(torch.cat(chunks) for chunks in zip(*parts, strict=True))


def _of_targets(
    head_logits: Callable[[], Tensor], target: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, ...]:
    logits = head_logits() / temperature
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, target[:, None])[:, 0] - normaliser
    if not entropy:
        return (logprobs,)
    return logprobs, normaliser - (logits.softmax(-1) * logits).sum(-1)


def top_k_logprobs(head: Head, hidden_MH: Tensor, ids_MK: Tensor, temperature: float) -> Tensor:
    """Log-probs `[M, K]` of K tokens at each position, with the dtype of `head_logprobs`."""

    def of_ids(head_logits: Callable[[], Tensor], ids: Tensor) -> tuple[Tensor]:
        logits = head_logits() / temperature
        return (logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True),)

    return _in_chunks(of_ids, head, hidden_MH, ids_MK)[0]


class Anchor(NamedTuple):
    """What another policy's probabilities of the whole vocabulary are made of, at the positions of a pass."""

    states: Tensor  # hidden states `[M, H]`; without weights log-probs `[.., V]`
    weights: Mapping[str, Tensor] | None = None  # of its LM head
    is_first: bool = False  # whether the divergence is KL(anchor || policy), not KL(policy || anchor)


def anchor_of(head: Head, hidden_MH: Tensor) -> Anchor:
    """The policy with these hidden states, and with the present weights of the head, which may be replaced later."""
    return Anchor(hidden_MH, {name: weight.detach() for name, weight in head.module.named_parameters()})


def head_kl(head: Head, hidden_MH: Tensor, anchor: Anchor, temperature: float) -> Tensor:
    """The KL divergence `[M]`, in nats, of this policy and the anchor, with the dtype of `head_logprobs`."""

    def of_states(head_logits: Callable[[], Tensor], states_CH: Tensor) -> tuple[Tensor]:
        with torch.no_grad():
            logq = logprobs_of(widened(head.logits(states_CH, anchor.weights)), temperature)
        return (whole_kl(head_logits(), logq, temperature, anchor.is_first),)

    return _in_chunks(of_states, head, hidden_MH, anchor.states)[0]


def logprobs_of(logits: Tensor, temperature: float) -> Tensor:
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def whole_kl(logits: Tensor, logq: Tensor, temperature: float, q_is_first: bool) -> Tensor:
    """KL(p || q) `[..]` over the last axis, or KL(q || p), with p = softmax(logits / temperature), of which alone it is
    a function, and log-probs of q."""
    return _WholeKL.apply(logits, logq, temperature, q_is_first)


class _WholeKL(torch.autograd.Function):
    """As `_FrozenHead`, it keeps the derivatives by the logits, T being the temperature:

    d KL(p || q) / dz = p (log p - log q - KL) / T            d KL(q || p) / dz = (p - q) / T
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, logq: Tensor, temperature: float, q_is_first: bool) -> Tensor:
        logp = logprobs_of(logits, temperature)
        p, difference = logp.exp(), logp.sub_(logq)
        if q_is_first:
            q = logq.exp()
            kl, slope = -(difference.mul_(q)).sum(-1), p.sub_(q)
        else:
            kl = (p * difference).sum(-1)
            slope = difference.sub_(kl[..., None]).mul_(p)
        ctx.save_for_backward(slope if temperature == 1 else slope.div_(temperature))
        return kl

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        [slope], [grad] = ctx.saved_tensors, grad_outputs
        return slope * grad[..., None], None, None, None


@torch.no_grad()
def most_likely(
    head: Head, hidden_MH: Tensor, target_M: Tensor, k: int, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs of the targets `[M]`, the k most likely tokens `[M, K]`, their log-probs `[M, K]`), at temperature 1.

    Only token ids below `vocabulary` are among the most likely.
    """

    def of_target(head_logits: Callable[[], Tensor], target: Tensor) -> tuple[Tensor, ...]:
        return most_likely_of(head_logits().log_softmax(-1), target, k, vocabulary)

    logprobs, ids, ids_logprobs = _in_chunks(of_target, head, hidden_MH, target_M)
    return logprobs, ids, ids_logprobs


def most_likely_of(logp: Tensor, target: Tensor, k: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `most_likely`, from log-probs `[.., V]` of all tokens and targets `[..]`."""
    best = logp[..., :vocabulary].topk(k, -1)
    return logp.gather(-1, target[..., None])[..., 0], best.indices, best.values


def widened(logits: Tensor) -> Tensor:
    """The logits in float32 at least: a softmax over a vocabulary in 16 bits would be noise."""
    return logits if logits.dtype == torch.float64 else logits.float()
