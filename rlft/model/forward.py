"""Log-probs, entropy and values of a Batch under whichever adapter is active.

There are two forwards, which give the same numbers: `packed` (prompts once per group, no padding, the LM head on
completion positions only, in chunks) and `padded` (the model's own forward on padded rows). A model that the packed one
cannot serve uses the padded one; `choose` says which, and why.

Gradients inside a float16 network are SCALE times as large as outside of it. A loss is a mean over tens of thousands of
tokens, so a token's gradient is about 1e-5, and those of hidden states are smaller by another factor of 100: below 6e-5
float16 has fewer digits, and below 6e-8 none. Where gradients enter the network, at its float32 outputs, they are
therefore multiplied by a power of two, and where they reach an adapter's float32 weights they are divided by it, which
rounds nothing. bfloat16 has the range of float32 and needs no scale. With this scale neither end is near: a token of
100,000 has a gradient of 0.01, and a weight's overflows at 64, which the optimizer refuses
(`trainer.optimizer.NonFiniteGradientError`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from rlft.batch import Row, batch_of_rows, to_device, unknown_expert
from rlft.model.critic import ScalarHead
from rlft.model.families import SHORT, independent_limit, limit_of, probed_beginnings, windows_of
from rlft.model.kernels import decoder_layer, flash_attention, recurrent
from rlft.model.kernels.attention import (
    NAME,
    LayerAttention,
    NotPackableError,
    attention_of_layers,
    hidden_states,
    on_this_device,
    prepare,
)
from rlft.model.kernels.decoder_layer import FAMILIES
from rlft.model.kernels.lm_head import (
    Anchor,
    anchor_of,
    head_kl,
    head_logprobs,
    head_of,
    logprobs_of,
    most_likely,
    most_likely_of,
    top_k_logprobs,
    whole_kl,
    widened,
)
from rlft.model.kernels.prefix_cache import FlashPrefixCache, PrefixCache
from rlft.model.kernels.selection import Kernels
from rlft.model.packing import (
    Layout,
    PackedRows,
    PaddedLayout,
    micro_batches,
    num_packed_tokens,
    pack,
    padded_layout,
    padded_micro_batches,
    padded_sizes,
    paths_of,
)
from rlft.model.sequence import current_share
from rlft.types import Batch, ImageRows, Outputs, UserError

SCALE = 2.0**10


def scale_up(*outputs: Tensor | None) -> None:
    """Multiplies the gradients with which a backward enters the network at these outputs."""
    for output in outputs:
        if output is not None and output.requires_grad:
            output.register_hook(lambda gradient: gradient * SCALE)


def scale_down(parameter: Parameter) -> None:
    """Divides the gradients that reach this parameter from now on."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook without it
    parameter.register_hook(lambda gradient: gradient / SCALE)
    parameter.requires_grad_(requires_grad)


PROBED_WINDOW = 512
"""The largest attention window, in tokens, beyond which `choose` compares rows: longer ones would take time and memory
at each start, and the code that computes them is the same."""


SERVED = frozenset({"full_attention", "sliding_attention", "attention", *recurrent.KINDS})
"""Kinds of layers (`layer_types` of a config) that a packed row goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the network together, on its device; `Forward` counts their tokens."""

    batch: Batch
    layout: Layout
    real_tokens: int
    network_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """How this model turns a Batch into Outputs. `reason` says in words why the layout is what it is."""

    model: PreTrainedModel
    packed: bool
    reason: str

    def layout(self, batch: Batch) -> Layout:
        """The layout of a batch in main memory, which every pass over the same batch can use."""
        if not self.packed:
            if (share := current_share()) is not None:  # a plan knows only what the model's config tells
                problem = f"divides packed rows, and this model has {self.reason}"
                remedy = "set it to 1, or use another model"
                raise UserError("cluster.sequence_ranks", problem, got=share.ranks, remedy=remedy)
            return padded_layout(batch)
        packed = pack(batch, prompts_first=self.model.device.type == "cuda").divided(current_share())
        prepare(packed, self.model)
        if batch.experts is not None:
            packed.sources(batch.token_ids.shape[1])
        if self.model.device.type != "cpu" and recurrent.keeps_states(self.model):
            _ = packed.state_rows
        return packed

    def placed(self, batches: Sequence[Batch]) -> list[MicroBatch]:
        """Batches in main memory as micro-batches on the model's device, where they get together, in one transfer.

        Their layouts are made first: what is made on a GPU, or read from one, makes the program wait for it.
        """
        placed = to_device([(batch, self.layout(batch)) for batch in batches], self.model.device)
        return [
            MicroBatch(
                batch=on_device,
                layout=layout,
                real_tokens=self.real_tokens(batch),
                network_tokens=self.network_tokens(batch),
            )
            for batch, (on_device, layout) in zip(batches, placed, strict=True)
        ]

    def __call__(
        self,
        batch: Batch,
        temperature: float,
        entropy: bool = False,
        head: ScalarHead | None = None,
        layout: Layout | None = None,
        top_k: bool = False,
        anchor: Anchor | None = None,
    ) -> Outputs:
        """Outputs `[B, T]`, 0 outside the completions; logits are divided by `temperature` as in sampling.

        They are float64 if the model is, and float32 otherwise. `head` computes values, from the hidden states that
        predict the tokens; `top_k` asks for the log-probs of `batch.teacher_top_k_ids`; `anchor` is another policy on
        this batch and layout, and asks for the KL; `layout` is the packed form of this batch, if it exists already.

        Raises:
            UserError: a row is so long that its numbers would depend on others of its batch (`rlft.model.families`).
        """
        self._check_lengths(batch)
        if self.packed:
            outputs = packed_forward(self.model, batch, temperature, entropy, head, layout, top_k, anchor)
        else:
            outputs = padded_forward(self.model, batch, temperature, entropy, head, top_k, layout, anchor)
        if self.model.dtype == torch.float16:
            scale_up(outputs.logprobs, outputs.entropy, outputs.values, outputs.top_k_logprobs, outputs.kl)
        return outputs

    @torch.no_grad()
    def anchor(self, batch: Batch, temperature: float, layout: Layout | None = None) -> Anchor:
        """The active policy on these rows, for a KL to it at this temperature."""
        self._check_lengths(batch)
        if self.packed:
            return anchor_of(head_of(self.model), _predicting(self.model, _packed(batch, layout)))
        return Anchor(logprobs_of(_PaddedRows(batch, layout).logits(self.model), temperature))

    @torch.no_grad()
    def most_likely(
        self, batch: Batch, k: int, vocabulary: int, layout: Layout | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs `[B, T]`, the k most likely tokens of each place `[B, T, K]`, their log-probs `[B, T, K]`).

        They are at temperature 1, without gradient, and 0 outside the completions. Only token ids below `vocabulary`
        are among the most likely.
        """
        self._check_lengths(batch)
        if self.packed:
            packed = _packed(batch, layout)
            found = most_likely(head_of(self.model), _predicting(self.model, packed), packed.target, k, vocabulary)
            logprobs, ids, of_ids = (_placed(values, packed, batch) for values in found)
        else:
            padded = _PaddedRows(batch, layout)
            found = most_likely_of(padded.logits(self.model).log_softmax(-1), padded.ids_BT[:, 1:], k, vocabulary)
            logprobs, ids, of_ids = map(padded.placed, found)
        return logprobs, ids, of_ids

    def logprobs(self, batch: Batch, token_budget: int) -> Tensor:
        """float32 `[B, T]` of every row at temperature 1, on the batch's device, without gradient."""
        result = torch.zeros_like(batch.sampled_logprobs)
        with torch.no_grad():
            for part, micro in self.parts(batch, token_budget):
                result[part] = self(micro.batch, 1.0, layout=micro.layout).logprobs.to(result)
        return result

    def parts(self, batch: Batch, token_budget: int, rows: Tensor | None = None) -> Iterator[tuple[Tensor, MicroBatch]]:
        """These rows (None: all) of a batch in main memory as micro-batches, each with the indices of its rows."""
        rows = torch.arange(len(batch.rewards)) if rows is None else rows
        parts = self.micro_batches(batch, rows, token_budget)
        yield from zip(parts, self.placed([batch.select(part) for part in parts]), strict=True)

    def values(self, batch: Batch, head: ScalarHead, layout: Layout | None = None) -> Tensor:
        """`[B, T]`, 0 outside the completions: the head on the hidden state that precedes each completion token.

        So values[b, t] is the value of the state in which token t was chosen. The LM head is not run.
        """
        self._check_lengths(batch)
        if self.packed:
            packed = _packed(batch, layout)
            values_BT = _placed(head(_predicting(self.model, packed)), packed, batch)
        else:
            padded = _PaddedRows(batch, layout)
            output = self.model.base_model(**padded.inputs(self.model), use_cache=False)
            values_BT = padded.placed(head(output.last_hidden_state[:, :-1]))
        if self.model.dtype == torch.float16:
            scale_up(values_BT)
        return values_BT

    # -- the experts of tokens, in the order in which these go through the network ---------------------------------
    def experts_by_token(self, batch: Batch, layout: Layout) -> tuple[Tensor, Tensor]:
        """(`batch.experts` as `[N, layers, k]`, bool `[N]`: whether the token was sampled) of the tokens of a pass."""
        if isinstance(layout, PackedRows):
            assert batch.experts is not None, "an engine or an earlier pass has chosen experts"
            sources_N = layout.sources(batch.token_ids.shape[1])
            return batch.experts.flatten(0, 1)[sources_N], batch.loss_mask.flatten()[sources_N]
        rows, width = _rows_of(batch, layout)
        assert rows.experts is not None, "an engine or an earlier pass has chosen experts"
        return rows.experts[:, :width].flatten(0, 1), rows.loss_mask[:, :width].flatten()

    def experts_by_row(self, noted: Tensor, batch: Batch, layout: Layout) -> Tensor:
        """`[B, T, layers, k]` from the experts `[N, layers, k]` of a pass's tokens; of padding they are unknown."""
        if isinstance(layout, PackedRows):
            noted = noted if layout.share is None else layout.share.gathered(noted, layout.num_tokens)
            experts_BTLK = noted[layout.places(batch.token_ids.shape[1])]
        else:
            rows, width = _rows_of(batch, layout)
            experts_BTLK = noted.unflatten(0, (-1, width))
            missing = (0, 0, 0, 0, 0, rows.token_ids.shape[1] - width)
            experts_BTLK = nn.functional.pad(experts_BTLK, missing)
            experts_BTLK = experts_BTLK if layout.paths is None else layout.paths.fold(experts_BTLK)
        return experts_BTLK.where(batch.attention_mask[..., None, None], unknown_expert(noted.dtype))

    def _check_lengths(self, batch: Batch) -> None:
        """Refuses rows that a plan refuses, too, for callers without a plan."""
        limit = independent_limit(self.model.config)
        if limit is None:
            return
        rows = batch if batch.previous is None else paths_of(batch).batch
        longest = int(rows.attention_mask.sum(1).max())
        if longest > limit.tokens:
            problem, remedy = f"a row exceeds the model's {limit.words}", "use shorter rows, or another model"
            raise UserError("model.path", problem, got=f"{longest} tokens", remedy=remedy)

    def micro_batches(self, batch: Batch, rows: Tensor, token_budget: int) -> list[Tensor]:
        """Splits rows (int64 `[N]`) so that at most `token_budget` tokens enter the network at a time."""
        split = micro_batches if self.packed else padded_micro_batches
        return split(batch, rows, token_budget)

    def real_tokens(self, batch: Batch) -> int:
        """Tokens that the network has to see for this batch; a prompt counts once where its group shares it."""
        return num_packed_tokens(batch) if self.packed else int(batch.attention_mask.sum())

    def network_tokens(self, batch: Batch) -> int:
        """Tokens that enter the network for this batch, including padding."""
        if self.packed:
            return num_packed_tokens(batch)
        rows_B, lengths_B = padded_sizes(batch)
        return max(lengths_B) * sum(rows_B)


# -- the packed forward ------------------------------------------------------------------------------------------------
def packed_forward(
    model: PreTrainedModel,
    batch: Batch,
    temperature: float,
    entropy: bool,
    value_head: ScalarHead | None = None,
    layout: Layout | None = None,
    top_k: bool = False,
    anchor: Anchor | None = None,
) -> Outputs:
    packed = _packed(batch, layout)
    hidden_MH, head = _predicting(model, packed), head_of(model)
    logprobs_M, entropy_M = head_logprobs(head, hidden_MH, packed.target, temperature, entropy)
    values_M = None if value_head is None else value_head(hidden_MH)
    top_k_MK = None
    if top_k:
        ids_MK = _teachers_ids(batch)[packed.rows, packed.columns]
        top_k_MK = top_k_logprobs(head, hidden_MH, ids_MK, temperature)
    kl_M = None if anchor is None else head_kl(head, hidden_MH, anchor, temperature)
    found = (logprobs_M, entropy_M, values_M, top_k_MK, kl_M)
    return _outputs(None if x is None else _placed(x, packed, batch) for x in found)


def _packed(batch: Batch, layout: Layout | None) -> PackedRows:
    return layout if isinstance(layout, PackedRows) else pack(batch).divided(current_share())


def _teachers_ids(batch: Batch) -> Tensor:
    assert batch.teacher_top_k_ids is not None, "a teacher has said which tokens"
    return batch.teacher_top_k_ids


def _placed(values_M: Tensor, packed: PackedRows, batch: Batch) -> Tensor:
    """`[B, T]` of values `[M]`, or `[B, T, K]` of `[M, K]`; of all ranks, where they share the row."""
    shape = (*batch.token_ids.shape, *values_M.shape[1:])
    placed = values_M.new_zeros(shape).index_put((packed.rows, packed.columns), values_M)
    return placed if packed.share is None else packed.share.added_up(placed)


def _predicting(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """`[M, hidden]` of the positions that predict the completion tokens, after the final norm."""
    [hidden] = hidden_states(model, packed.token_ids, packed.position_ids, packed.own_images, packed=packed)
    return hidden if decoder_layer.narrows(model) else packed.predicting(hidden)


# -- the padded forward ------------------------------------------------------------------------------------------------
def padded_forward(
    model: PreTrainedModel,
    batch: Batch,
    temperature: float,
    entropy: bool,
    value_head: ScalarHead | None = None,
    top_k: bool = False,
    layout: Layout | None = None,
    anchor: Anchor | None = None,
) -> Outputs:
    """The model's own forward on padded rows, for models that the packed one cannot serve; tests compare the two."""
    padded, states = _PaddedRows(batch, layout), value_head is not None
    output = model(**padded.inputs(model), use_cache=False, output_hidden_states=states)
    logits_BTV = widened(output.logits[:, :-1]) / temperature
    normaliser_BT = logits_BTV.logsumexp(-1)
    logprobs_BT = logits_BTV.gather(-1, padded.ids_BT[:, 1:, None])[..., 0] - normaliser_BT
    entropy_BT = normaliser_BT - (logits_BTV.softmax(-1) * logits_BTV).sum(-1) if entropy else None
    values_BT = None if value_head is None else value_head(output.hidden_states[-1][:, :-1])
    top_k_BTK = None
    if top_k:
        ids_logits_BTK = logits_BTV.gather(-1, _teachers_ids(padded.rows)[:, 1 : padded.ids_BT.shape[1]])
        top_k_BTK = ids_logits_BTK - normaliser_BT.unsqueeze(-1)
    kl_BT = None if anchor is None else whole_kl(logits_BTV, anchor.states, 1.0, anchor.is_first)
    found = (logprobs_BT, entropy_BT, values_BT, top_k_BTK, kl_BT)
    return _outputs(None if x is None else padded.placed(x) for x in found)


class _PaddedRows:
    """Rows as they enter the network: each path of one with branches by itself. Padding is token 0, whatever it was."""

    def __init__(self, batch: Batch, layout: Layout | None) -> None:
        self._layout = layout if isinstance(layout, PaddedLayout) else padded_layout(batch)
        self._completions = batch.loss_mask
        self.rows, width = _rows_of(batch, self._layout)
        mask_BT = self.rows.attention_mask[:, :width]
        self.ids_BT, self._mask_BT = self.rows.token_ids[:, :width].where(mask_BT, 0), mask_BT.long()

    def inputs(self, model: PreTrainedModel) -> dict[str, Any]:
        """What a model reads of them."""
        if self.rows.images is None:
            return {"input_ids": self.ids_BT, "attention_mask": self._mask_BT}
        return self.rows.images.narrowed(self.ids_BT.shape[1]).inputs(model, self.ids_BT, self._mask_BT)

    def logits(self, model: PreTrainedModel) -> Tensor:
        """`[B, n - 1, V]` of the positions that precede another one."""
        return widened(model(**self.inputs(model), use_cache=False).logits[:, :-1])

    def placed(self, values: Tensor) -> Tensor:
        """`[B, T]` or `[B, T, K]` of numbers of these positions: at the tokens they predict; 0 outside completions."""
        of_axes_behind = [0, 0] * (values.dim() - 2)
        missing = self.rows.token_ids.shape[1] - values.shape[1] - 1
        values = nn.functional.pad(values, (*of_axes_behind, 1, missing))
        values = values if self._layout.paths is None else self._layout.paths.fold(values)
        return values.where(self._completions.view(*self._completions.shape, *[1] * (values.dim() - 2)), 0)


def _rows_of(batch: Batch, layout: PaddedLayout) -> tuple[Batch, int]:
    """(the padded rows, or the paths that stand in their place; their width in the network)."""
    paths = layout.paths
    return (batch, layout.width) if paths is None else (paths.batch, paths.batch.token_ids.shape[1])


def _outputs(found: Iterable[Tensor | None]) -> Outputs:
    logprobs, entropy, values, top_k, kl = found
    assert logprobs is not None
    return Outputs(logprobs=logprobs, entropy=entropy, values=values, top_k_logprobs=top_k, kl=kl)


# -- the choice --------------------------------------------------------------------------------------------------------
def choose(model: PreTrainedModel, kernels: Kernels | None = None) -> Forward:
    """The packed forward where this model gives the same log-probs with it, else the padded one with the reason.

    The model's layers say how they attend (`attention_of_layers`). If packed rows have that, the two are compared on a
    small batch, since a new architecture may change the numbers in other ways. The comparison is with the model's own
    modules; kernels that give other log-probs also in padded rows are removed.

    `kernels` are those installed in the model; None if nothing but its attention was replaced.
    """
    kernels = kernels or Kernels()
    if kernels.are_plain:
        return _padded(model, f"kernels are plain ({kernels.decision.reason})")
    reason, (batch, first_B) = _refusal(model), _probe(model)
    mask = batch.loss_mask
    positions_BT = first_B[:, None] + torch.arange(batch.token_ids.shape[1], device=model.device)
    placed: Any = functools.partial(model, position_ids=positions_BT) if _takes_positions(model) else model
    with torch.no_grad():
        with kernels.switched_off():
            expected = padded_forward(placed, batch, 1.0, False).logprobs[mask]
        if reason is None:
            packed = pack(batch)
            first = pack(replace(batch, token_ids=first_B[:, None].expand_as(batch.token_ids))).token_ids
            packed = replace(packed, position_ids=packed.position_ids + first)
            found = packed_forward(model, batch, 1.0, False, layout=packed).logprobs[mask]
            problem = _difference(found, expected, model.dtype)
            if problem is None:
                why = None if model.device.type == "cpu" else recurrent.obstacle_of_functions(model)
                in_torch = "" if why is None else f"gated delta rules in torch, since {why}"
                words = ("packed rows, each prompt once per group", on_this_device(model), in_torch)
                return Forward(model=model, packed=True, reason=", ".join(filter(None, words)))
            reason = f"packed and padded log-probs differ by {problem} for {type(model).__name__}"
        problem = _difference(padded_forward(placed, batch, 1.0, False).logprobs[mask], expected, model.dtype)
    if problem is not None:
        kernels.remove(f"log-probs differ by {problem} from those of transformers' modules for {type(model).__name__}")
    return _padded(model, reason)


def _padded(model: PreTrainedModel, reason: str) -> Forward:
    return Forward(model=model, packed=False, reason=f"padded rows: {reason}")


LARGEST_GAP = 1e-4  # nats by which a log-prob may differ between two float32 computations of one network

MEAN_GAP = 32
"""By how many eps of a 16-bit dtype log-probs may differ in the mean: 0.25 nats in bfloat16, 0.03 in float16. Single
tokens differ by 0.3 to 1.6 between two bfloat16 computations of one network, so that the largest says little; the mean
is about 0.04 in trained models and up to 0.07 in deep random ones."""


def _difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """By how much log-probs `[M]` differ, in words, if that is more than roundings of this dtype can cause."""
    gaps = (found - expected).abs()
    if dtype.itemsize > 2:
        return None if gaps.max() <= LARGEST_GAP else f"{gaps.max():.1e}"
    return None if gaps.mean() <= MEAN_GAP * torch.finfo(dtype).eps else f"{gaps.mean():.1e} in the mean"


def _refusal(model: PreTrainedModel) -> str | None:
    reason, chosen = known_refusal(model), model.config.get_text_config()._attn_implementation
    if reason is None and chosen != NAME:
        return f"model.attn_implementation is {chosen}"
    if reason is None:
        try:
            attention_of_layers(model)
            head_of(model)
        except NotPackableError as error:
            return str(error)
    return reason


def known_refusal(model: PreTrainedModel) -> str | None:
    """Why this kind of model cannot be packed, as far as config and class tell; None if they tell no reason.

    A model without weights also tells how its layers attend, unless its type is known.
    """
    name, kinds = type(model).__name__, getattr(model.config.get_text_config(), "layer_types", None) or ()
    if not model._can_set_attn_implementation():
        return f"{name} has an attention of its own"
    problem = recurrent.obstacle(model)
    if problem is not None:
        return problem
    other = sorted(set(kinds) - SERVED)
    if other:
        return f"{name} has layers of other kinds than attention ({', '.join(other)})"
    if model.device.type != "meta" or model.config.model_type in FAMILIES:
        return None
    try:
        attention = attention_of_empty(model)
    except NotPackableError as error:
        return None if error.__cause__ is not None else str(error)  # such as numbers that it does not have
    return None if attention else f"{name} has an attention of its own"


def attention_of_empty(model: PreTrainedModel) -> tuple[LayerAttention, ...]:
    """`attention_of_layers` of a model without weights, which has an attention of transformers."""
    own = cast(str, model.config.get_text_config()._attn_implementation)
    model.set_attn_implementation(NAME)
    try:
        return attention_of_layers(model)
    finally:
        model.set_attn_implementation(own)


def possible_shares(model: PreTrainedModel) -> tuple[list[int], str]:
    """(numbers of ranks that can share the tokens of this empty model's rows, what is wrong with any other)."""
    kind, text = model.config.model_type, model.config.get_text_config()
    states = recurrent.parts_that_ranks_divide(model)
    if states is None:
        return [1], f"a {kind} has recurrent layers whose heads ranks cannot divide"
    if reason := known_refusal(model):
        return [1], f"divides packed rows, and {reason}"
    try:
        numbers = {(layer.heads, layer.key_heads) for layer in attention_of_empty(model)}
    except NotPackableError as error:
        if error.__cause__ is None:
            return [1], f"divides packed rows, and {error}"
        heads = text.num_attention_heads  # experts, for instance, do not run without weights
        numbers = {(heads, getattr(text, "num_key_value_heads", None) or heads)}
    numbers |= {(layer.heads, layer.key_heads) for layer in states if layer.heads}
    words = " and ".join(f"{heads} heads, {keys} of keys" for heads, keys in sorted(numbers))
    channels = sorted({layer.channels for layer in states})
    words += f" and {' and '.join(map(str, channels))} channels" * bool(channels)
    possible = [
        n
        for n in range(1, max(heads for heads, _ in numbers) + 1)
        if all(heads % n == 0 and (keys % n == 0 or n % keys == 0) for heads, keys in numbers)
        and all(number % n == 0 for number in channels)
    ]
    return possible, f"does not divide the attention of a {kind} ({words})"


def _takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


def _probe(model: PreTrainedModel) -> tuple[Batch, Tensor]:
    """(groups of two rows with different lengths, of tokens that every vocabulary has; int64 `[B]`, the position of the
    first token of each row).

    Two groups are short. In another one for each attention window of the model, one row is shorter than the window, and
    the other exceeds it. The other short ones begin at `probed_beginnings`.
    """
    limit = limit_of(model.config)
    most = PROBED_WINDOW + 3 if limit is None else min(PROBED_WINDOW + 3, limit.tokens)
    windows = [window for window in windows_of(model.config) if 3 <= window <= most - 3]
    later = probed_beginnings(model.config) if _takes_positions(model) else []
    prompts = [5, 3, *(window - 2 for window in windows), *(SHORT - 4 for _ in later)]
    completions = [(4, 2), (6, 1), *((5, 1) for _ in windows), *((4, 1) for _ in later)]
    first = [0] * (len(prompts) - len(later)) + later
    lengths = [(p, c) for p, both in zip(prompts, completions, strict=True) for c in both]
    num_tokens, rows = min(97, model.config.get_text_config().vocab_size - 1), list[Row]()
    for i, (p, c) in enumerate(lengths):
        columns = torch.arange(p + c)
        ids = ((columns * (7 if i < 2 else 5) + (columns >= p) * i) % num_tokens + 1).tolist()
        rows.append((i // 2, ids[:p], ids[p:]))
    batch = to_device(batch_of_rows(rows), model.device)
    return batch, torch.tensor(first, device=model.device).repeat_interleave(2)


def open_prefix_cache(
    forward: Forward, prompts: Sequence[Sequence[int]], max_tokens: int, images: ImageRows | None = None
) -> PrefixCache | None:
    """A cache for decoding these prompts; None if the model computes no packed rows, or if flash attention does not
    compute its layers on a CUDA GPU."""
    if not forward.packed or recurrent.keeps_states(forward.model):
        return None
    model = forward.model
    sizes = {(layer.head_size, layer.cap) for layer in attention_of_layers(model)}
    if all(flash_attention.takes(model.dtype, size, model.device, caps=cap) for size, cap in sizes):
        return FlashPrefixCache(model, prompts, max_tokens, images)
    return PrefixCache(model, prompts, max_tokens, images) if model.device.type == "cpu" else None
