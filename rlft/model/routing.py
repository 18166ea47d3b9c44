"""Which experts tokens go to: noted in a pass over a mixture of experts, compared with a later one, or imposed on it
(routing replay).

A router scores the experts, takes the k best by `torch.topk`, and weighs their outputs by their scores. An imposed
choice replaces the result of that call: the experts are the given ones, and their weights come from the present scores,
so that gradients reach the router. Where a router first takes the best groups of experts, the groups of the given
experts are among them. Sources: arXiv 2507.18071, section 5.3 (Routing Replay), and arXiv 2510.11370 (R3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlft.batch import unknown_expert
from rlft.model.adapter_folder import ROUTER
from rlft.model.experts import Mixture, mixture_of
from rlft.model.sequence import current_share

OF_BLOCKS = "route_tokens_to_experts"
"""The method by which a block chooses experts itself, where its router only scores them."""
LARGEST_BYTE = 255
"""Numbers of experts are kept in a byte each where all of them are smaller than this, which means "unknown" there."""


def obstacle(model: PreTrainedModel) -> str | None:
    """Why no choice of experts can be imposed on this model, empty or loaded, as a phrase; None if nothing is known."""
    mixture, kind = mixture_of(model), model.config.model_type
    if not (mixture.stacked or mixture.linear):
        return f"a {kind} has no experts"
    chosen = [name for name, matrices in mixture.stacked.items() if matrices]
    others = mixture.linear or len(chosen) < len(mixture.stacked)
    if others or not all(_choosers(model, name) for name in chosen):
        return f"the way in which a {kind} chooses experts is not known to rlft"
    return None


def bytes_of_choice(model: PreTrainedModel) -> int:
    """Bytes of the numbers of a token's experts in all layers, of an empty or a loaded model."""
    total, text = 0, model.config.get_text_config()
    of_config = getattr(text, "top_k_experts", 0) or getattr(text, "num_experts_per_tok", 0)
    for name, matrices in mixture_of(model).stacked.items():
        if matrices:
            chosen = max(
                (getattr(module, "top_k", of_config) for module, _ in _choosers(model, name)), default=of_config
            )
            total += chosen * dtype_of(number_of_experts(model.get_submodule(name))).itemsize
    return total


def dtype_of(num_experts: int) -> torch.dtype:
    """The dtype of numbers of so many experts."""
    return torch.uint8 if num_experts <= LARGEST_BYTE else torch.int16


class Routing:
    """The choices of the routers of a model, with its adapters.

    model: the model under its adapters.
    mixture: its experts, found before there were adapters.
    """

    def __init__(self, model: PreTrainedModel, mixture: Mixture) -> None:
        self._model = model
        self.layers = [name for name, matrices in mixture.stacked.items() if matrices]
        self._experts = [number_of_experts(model.get_submodule(name)) for name in self.layers]
        self._notes: dict[int, Tensor] | None = None
        self._imposed: Tensor | None = None
        self._expected: tuple[Tensor, Tensor] | None = (
            None  # what `metrics` compares with: (experts, which tokens count)
        )
        self._own: dict[int, Tensor] = {}
        self._loads: dict[int, Tensor] = {}  # tokens of each expert of a layer, in the last pass with gradient
        self._hooks = [
            model.get_submodule(name).register_forward_pre_hook(partial(self._note, layer))
            for layer, name in enumerate(self.layers)
        ]
        self._wrapped: list[tuple[nn.Module, str]] = []
        self._each = torch.Size()  # (layers, k), once `learn_sizes` has seen a pass

    def close(self) -> None:
        """Leaves the model as it was."""
        for hook in self._hooks:
            hook.remove()
        for module, name in self._wrapped:
            vars(module).pop(name)
        self._hooks, self._wrapped = [], []

    # -- noting --------------------------------------------------------------------------------------------------------
    @contextmanager
    def noting(self) -> Iterator[Callable[[], Tensor]]:
        """Inside, passes are noted; yields a function that gives the experts of the tokens of the last pass, `[N,
        layers, k]` on the model's device, with the tokens in the order in which they went through the network."""
        self._notes = notes = {}
        try:
            yield lambda: torch.stack([notes[layer] for layer in range(len(self.layers))], 1)
        finally:
            self._notes = None

    def unknown(self, shape: tuple[int, ...]) -> Tensor:
        """`[B, T, layers, k]` in main memory for rows of the shape `[B, T]`, whose experts are not known yet."""
        dtype = dtype_of(max(self._experts))
        return torch.full((*shape, *self._each), unknown_expert(dtype), dtype=dtype)

    def _note(self, layer: int, experts: Any, inputs: Any) -> None:
        chosen = inputs[1]
        if self._notes is not None:
            self._notes[layer] = chosen.flatten(0, -2).to(dtype_of(max(self._experts)))
        if torch.is_grad_enabled():
            if self._expected is not None and self._imposed is None:
                self._own[layer] = chosen.flatten(0, -2)
            chosen = chosen.reshape(-1)
            ones = torch.ones(len(chosen), device=chosen.device)
            self._loads[layer] = ones.new_zeros(self._experts[layer]).index_add_(0, chosen, ones)

    @property
    def sizes_known(self) -> bool:
        return bool(self._each)

    def learn_sizes(self) -> Tensor:
        """Makes `unknown` known, by a short pass; returns its experts, as `noting` does."""
        with torch.no_grad(), self.noting() as noted:
            self._model(input_ids=self._short_row(), use_cache=False)
            free = noted()
        self._each = free.shape[1:]
        return free

    def _short_row(self) -> Tensor:
        return torch.arange(1, 7, device=self._model.device)[None]

    # -- comparing and imposing ----------------------------------------------------------------------------------------
    @contextmanager
    def comparing(self, chosen: Tensor, counted: Tensor) -> Iterator[None]:
        """Inside, `metrics` compares the experts of a pass with gradient with these; the arguments are `imposing`'s."""
        self._expected = chosen, counted
        try:
            yield
        finally:
            self._expected, self._own = None, {}

    @contextmanager
    def imposing(self, chosen: Tensor, counted: Tensor) -> Iterator[None]:
        """Inside, the tokens of each pass go to these experts, also where layers are recomputed for a backward.

        chosen: as `noting` gives it; a token whose experts are unknown goes to those that the router chooses.
        counted: bool `[N]`, the tokens that `metrics` counts.
        """
        if not self._wrapped:
            self._wrap()
        self._imposed = chosen
        try:
            with self.comparing(chosen, counted):
                yield
        finally:
            self._imposed = None

    def _wrap(self) -> None:
        for layer, name in enumerate(self.layers):
            for module, method in _choosers(self._model, name):
                setattr(module, method, partial(self._choose, layer, getattr(module, method)))
                self._wrapped.append((module, method))

    def _choose(self, layer: int, router: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the router returns where the imposed experts are its choice."""
        if self._imposed is None:
            return router(*args, **kwargs)
        imposed, num_experts = self._imposed[:, layer].long(), self._experts[layer]
        with _Choice(num_experts, imposed.shape) as own:  # with gradient: PEFT keeps an adapted router's weight
            router(*args, **kwargs)
        if own.chosen is None:
            return router(*args, **kwargs)
        self._own[layer] = own.chosen
        known = imposed != unknown_expert(self._imposed.dtype)
        with _Choice(num_experts, imposed.shape, imposed.where(known, own.chosen)):
            return router(*args, **kwargs)

    def metrics(self, num_tokens: int = 1) -> dict[str, Tensor]:
        """Metrics `[]` of the last pass with gradient since the last call; empty without experts.

        `router/load_max`: in the most uneven layer, the tokens of its busiest expert as a multiple of an even share.
        Inside `imposing` or `comparing`, as shares of `num_tokens` tokens: `router/replaced_tokens`, those which the
        router would send or sends elsewhere in a layer, and `router/replaced`, the part of their experts in all layers.
        """
        share, loads, self._loads = current_share(), [*self._loads.values()], {}
        result = {}
        if loads:
            if share is not None:
                share.exchange.add_up(together := torch.cat(loads))
                loads = together.split([len(load) for load in loads])
            uneven = [load.max() * (len(load) / load.sum()) for load in loads]
            result["router/load_max"] = torch.stack(uneven).max()
        if self._expected is None or not self._own:
            return result
        expected, counted = self._expected
        expected_NLK = expected[:, sorted(self._own)].long()
        own_NLK = torch.stack([self._own[layer] for layer in sorted(self._own)], 1)
        known = expected_NLK != unknown_expert(expected.dtype)
        replaced_NLK = known & (expected_NLK[..., None] != own_NLK[..., None, :]).all(-1)
        counted_N = counted.float()
        shares = {
            "router/replaced": replaced_NLK.float().mean((1, 2)),
            "router/replaced_tokens": replaced_NLK.any(2).any(1).float(),
        }
        sums = torch.stack([(share_N * counted_N).sum() for share_N in shares.values()])
        if share is not None:
            share.exchange.add_up(sums)
        return result | dict(zip(shares, sums / num_tokens, strict=True))

    def check(self) -> str | None:
        """Why a choice cannot be imposed, as a short pass shows; None if the experts get what is imposed."""
        ids, free = self._short_row(), self.learn_sizes()
        other = (free.long() + 1) % min(self._experts)
        imposing = self.imposing(other.to(free.dtype), torch.ones_like(ids[0], dtype=torch.bool))
        with torch.no_grad(), self.noting() as noted, imposing:
            self._model(input_ids=ids, use_cache=False)
            if not torch.equal(noted().long(), other):
                return f"the experts of a {self._model.config.model_type} do not follow a choice that is imposed"
        return None


def number_of_experts(experts: nn.Module) -> int:
    """Of a module of stacked experts, under its adapters."""
    return cast(Any, _bare(experts)).num_experts


def _bare(module: nn.Module) -> nn.Module:
    """The module without the layers that PEFT puts around it."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def _choosers(model: nn.Module, experts: str) -> list[tuple[nn.Module, str]]:
    """What may choose the experts of this name: routers next to them that do more than score, and a method of the
    block that they are in."""
    block = model.get_submodule(experts.rpartition(".")[0])
    named = (_bare(child) for name, child in block.named_children() if ROUTER.fullmatch(name))
    routers = [(child, "forward") for child in named if not isinstance(child, nn.Linear)]
    return [*routers, *([(block, OF_BLOCKS)] if hasattr(block, OF_BLOCKS) else [])]


class _Choice(TorchFunctionMode):
    """Inside, a `topk` of scores of all experts is noted (`chosen`, the last one), or gives the experts that are given.

    shape: (tokens, experts of each).
    given: int64 `[tokens, k]`, or None.
    """

    def __init__(self, num_experts: int, shape: torch.Size, given: Tensor | None = None) -> None:
        super().__init__()
        self.num_experts, self.shape, self.given = num_experts, shape, given
        self.chosen: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        scores, best = args[0], func(*args, **kwargs)
        tokens, number = scores.shape[:-1].numel(), scores.shape[-1]
        if tokens != self.shape[0]:
            return best
        if number == self.num_experts and best.indices.shape[-1] == self.shape[1]:
            self.chosen = best.indices.flatten(0, -2)
            return best if self.given is None else _taken(scores, self.given.view_as(best.indices))
        if self.given is not None and self.num_experts % number == 0:  # of groups
            groups = (self.given // (self.num_experts // number)).view(*scores.shape[:-1], -1)
            first = scores.detach().scatter(-1, groups, torch.inf)
            return _taken(scores, func(first, *args[1:], **kwargs).indices)
        return best


def _taken(scores: Tensor, indices: Tensor) -> Any:
    return torch.return_types.topk((scores.gather(-1, indices), indices))
