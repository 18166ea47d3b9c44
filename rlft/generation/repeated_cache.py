"""Decoding by any model: transformers' own cache, with what it keeps of a prompt repeated for its completions."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rlft.system.lazy import torch
from rlft.types import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlft.generation.engine import Ids
    from rlft.types import ImageRows


class RepeatedCache:
    """A decoder for any model; prompts are padded on the left, their `images` on the right."""

    def __init__(
        self, model: Any, prompts: Ids, max_tokens: int, device: torch.device, images: ImageRows | None = None
    ) -> None:
        self.model, self.max_tokens, self.device = model, max_tokens, device
        width = max(map(len, prompts))
        ids = [[0] * (width - len(p)) + list(p) for p in prompts]  # left-padded: every row's next token is the last
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        self.ids = torch.tensor(ids, device=device)
        self.mask = torch.tensor(mask, device=device)
        self.images, self.shifts = None, torch.zeros(len(prompts), dtype=torch.int64, device=device)
        if images is not None:
            padding = width - self.mask.sum(1).cpu()
            columns = (torch.arange(width) - padding[:, None]).clamp(min=0)  # what is read in the padding is masked
            sources = columns + torch.arange(len(prompts))[:, None] * images.rows.shape[1]
            self.images = images.gathered(sources).to(device)
            self.shifts = images.shifts(width - padding).to(device)
        self.cache: Any = None  # the prefill makes it: the model knows what its layers keep
        self.cache_argument = cache_argument(model)
        self.has_positions = "position_ids" in forward_arguments(model)

    def prefill(self, n: int) -> Tensor:
        """Logits `[P * n, V]` of the first completion token; each prompt has gone through the network once."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        ids, images = self.ids, self.images
        inputs = {"input_ids": ids} if images is None else images.inputs(self.model, ids, self.mask)
        logits = self._forward(inputs, positions)
        if self.device.type != "cpu":
            # So that transformers makes each token's mask, without first waiting to hear whether it is all True.
            for layer in self.cache.layers:
                layer.is_compileable = True
        rows = torch.arange(len(self.ids), device=self.device).repeat_interleave(n)
        take_rows(self.cache, rows)
        self.mask, self.shifts = self.mask[rows], self.shifts[rows]
        return logits[rows]

    def step(self, token_R: Tensor) -> Tensor:
        """Logits `[R, V]` after one more token in each row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(token_R), 1)], dim=1)
        positions = self.mask.sum(1, keepdim=True) - 1 + self.shifts[:, None]
        return self._forward({"input_ids": token_R[:, None]}, positions)

    def checks(self) -> bool:
        return False  # recurrent states and sliding windows cannot take tokens back

    def check(self, token_N: Tensor, row_N: Tensor, place_N: Tensor) -> Tensor:
        raise NotImplementedError("`checks` says that it does not")

    def keep(self, rows: Tensor) -> None:
        """Drops every other row from the batch."""
        rows = rows.to(self.device)
        take_rows(self.cache, rows)
        self.mask, self.shifts = self.mask[rows], self.shifts[rows]

    def fill(self) -> None:
        """Does what `PrefixCache.fill` does; sliding windows and recurrent states never hold more than they do now."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        for layer in self.cache.layers:
            grows = isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)
            if grows and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = (
                    torch.cat([x, x.new_zeros(*x.shape[:2], self.max_tokens - 1, x.shape[-1])], dim=2)
                    for x in (layer.keys, layer.values)
                )

    def _forward(self, inputs: dict[str, Tensor], positions: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"attention_mask": self.mask, "position_ids": positions, **inputs}
        if not self.has_positions:
            del arguments["position_ids"]
        if self.cache is not None:
            arguments[self.cache_argument] = self.cache
            # A state has no padding in it, and Mamba would read this mask as that of the new token.
            if not attends(self.cache):
                del arguments["attention_mask"]
        output = self.model(use_cache=True, logits_to_keep=1, **arguments)
        if self.cache is None:
            self.cache = self._made_by(output)
        return output.logits[:, -1]

    def _made_by(self, output: Any) -> Any:
        """The cache of a prefill. UserError if it is none of transformers', whose rows can be taken."""
        from transformers import Cache, EncoderDecoderCache

        cache = getattr(output, self.cache_argument, None)
        if isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache):
            return cache
        config, kept_in = self.model.config, "no cache" if cache is None else type(cache).__name__
        repeated = "whose rows cannot be repeated for the completions of a prompt"
        problem = f"a {config.model_type} keeps what it has read in {kept_in}, {repeated}"
        remedy = "use generation.engine=vllm if vLLM serves this model, or another model"
        raise UserError("model.path", problem, got=config.name_or_path or config.model_type, remedy=remedy)


def forward_arguments(model: Any) -> Collection[str]:
    """The names of the forward's arguments, under PEFT or not."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(base.forward).parameters


def cache_argument(model: Any) -> str:
    """The name of the forward's argument for a cache, under PEFT or not: transformers 5.24 gave all models `cache`.

    An older release, and a model with code of its own, has one of the old names.
    """
    arguments = forward_arguments(model)
    return next((name for name in ("cache", "cache_params") if name in arguments), "past_key_values")


def take_rows(cache: Any, rows: Tensor) -> None:
    """Makes these rows (int64 `[N]`, in this order, perhaps repeated) the batch of a cache of transformers.

    Whatever the cache keeps of a row goes with it: keys and values, states of convolutions, recurrent states.
    """
    # transformers' own methods are missing in some layers, and forget what others keep besides keys and values.
    taken: dict[int, tuple[Tensor, Tensor]] = {}  # two names may be one tensor
    for holder in (cache, *cache.layers):
        for name, value in vars(holder).items():
            if name != "layers":
                # Positions in text, height and width are [3, B, T] (Qwen4), all else begins with the rows.
                axis = 1 if name == "position_ids" and value.dim() == 3 else 0
                setattr(holder, name, _with_rows(value, axis, rows, taken))


def _with_rows(value: Any, axis: int, rows: Tensor, taken: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """The value with these rows of every tensor in it; numbers stay."""
    if isinstance(value, dict):
        return {key: _with_rows(inner, axis, rows, taken) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_rows(inner, axis, rows, taken) for inner in value)
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) == 0:
        return value
    if id(value) not in taken:
        taken[id(value)] = value, value.index_select(axis, rows.to(value.device))
    return taken[id(value)][1]


def attends(cache: Any) -> bool:
    """Whether a layer of this cache keeps keys, so that a padded row's mask matters after its prompt."""
    from transformers.cache_utils import CacheLayerMixin

    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
