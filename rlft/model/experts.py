"""Mixtures of experts: which modules are experts and routers, the adapters on them, and which experts tokens go to.

Since transformers 5 the experts of a layer are one module whose matrices are stacked, `[experts, out, in]` or, where
`is_transposed`, `[experts, in, out]`. LoRA can be on those modules that follow transformers' interface of experts
(`use_experts_implementation` in integrations/moe.py). Shared experts, which every token reaches, are MLPs like others.

PEFT's own layer adds s B A of every expert to W in every forward. Here (`LoraExperts`) each token's rows go through its
experts' A and B: tokens are sorted by expert, and each of W, A and B is one grouped product
(`torch.nn.functional.grouped_mm`), or a loop over experts where torch has none. PEFT's names, initial values and files
are kept: A is `[experts x rank, in]`, and B `[out, rank x experts]`.

A router scores the experts, takes the k best by `torch.topk`, and weighs their outputs by their scores. Its choice is
noted in a pass (`Routing`), compared with a later one, or imposed on it (routing replay). An imposed choice replaces
the result of `topk`: the experts are the given ones, and their weights come from the present scores, so that gradients
reach the router. Where a router first takes the best groups of experts, the groups of the given experts are among them.
Sources: arXiv 2507.18071, section 5.3 (Routing Replay), and arXiv 2510.11370 (R3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlft.batch import unknown_expert
from rlft.model.adapter_folder import ROUTER
from rlft.model.sequence import current_share

EXPERTS = "experts"  # what a module of experts is called in most models

INTERFACE = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts and routers of a model, by the names of its modules."""

    # {a module of stacked experts: the names of its matrices, empty if LoRA cannot be on them}.
    stacked: Mapping[str, tuple[str, ...]]
    linear: frozenset[str]  # linear layers of experts that are modules of their own
    # Modules with a matrix from which experts are chosen or weighed; linear layers and others.
    routers: Mapping[str, nn.Module]
    classes: frozenset[type[nn.Module]]  # those of the stacked experts that LoRA can be on

    @property
    def linear_routers(self) -> set[str]:
        return {name for name, module in self.routers.items() if isinstance(module, nn.Linear)}

    def parameters(self, *, experts: bool, router: bool) -> list[str]:
        """Names of the parameters that an adapter is on: the experts' matrices, and those of routers that are no linear
        layers, as far as they are asked for."""
        names = [f"{name}.{own}" for name, matrices in self.stacked.items() for own in matrices] if experts else []
        others = sorted(self.routers.keys() - self.linear_routers) if router else []
        return names + [f"{name}.weight" for name in others]


def mixture_of(model: nn.Module) -> Mixture:
    """The experts and routers of a model, loaded or empty, without adapters."""
    stacked: dict[str, tuple[str, ...]] = {}
    linear, routers, classes, blocks = set(), {}, set(), set()
    for name, module in model.named_modules():
        block, _, own = name.rpartition(".")
        if own == EXPERTS or _is_stacked(module):
            blocks.add(block)
        if _is_stacked(module):
            stacked[name] = matrices = _matrices(module)
            classes |= {type(module)} if matrices else set()
        elif isinstance(module, (nn.Linear, Conv1D)) and re.search(rf"(^|\.){EXPERTS}\.\d+\.", name):
            linear.add(name)
    for block in blocks:
        for own, child in model.get_submodule(block).named_children():
            if ROUTER.fullmatch(own):
                path = f"{block}.{own}" if block else own
                routers |= {f"{path}.{n}".rstrip("."): m for n, m in child.named_modules() if _has_matrix(m)}
    return Mixture(stacked=stacked, linear=frozenset(linear), routers=routers, classes=frozenset(classes))


def _is_stacked(module: nn.Module) -> bool:
    three = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return three and "expert" in type(module).__name__.lower()


def _has_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


def _matrices(module: nn.Module) -> tuple[str, ...]:
    """The names of stacked matrices that LoRA can be on, in the order in which they are computed."""
    if not all(hasattr(module, field) for field in INTERFACE):
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


# -- PEFT's names of what is adapted -----------------------------------------------------------------------------------
CONVERTED = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of linear layers that PEFT 0.21 reads as those of experts, or as their router, in some families of models
(`_convert_peft_config_moe` in utils/transformers_weight_conversion.py), although they may be of other modules."""


def is_mistaken(name: str, model_type: str) -> bool:
    """Whether PEFT would take this linear layer of a model of this type for one of an expert."""
    peft: Any = transformers_weight_conversion
    is_converted = peft._MODEL_TO_CONVERSION_PATTERN.get(model_type) in peft._MOE_TARGET_MODULE_MAPPING
    return is_converted and name.rpartition(".")[2] in CONVERTED


def named_for_peft(modules: Iterable[str], parameters: Iterable[str], model_type: str) -> tuple[list[str], list[str]]:
    """(`target_modules`, `target_parameters`) by which PEFT puts an adapter on these, for a model with experts.

    A linear layer that PEFT would take for one of an expert is named by its weight, which it takes as it is.
    """
    modules = set(modules)
    mistaken = {name for name in modules if is_mistaken(name, model_type)}
    return sorted(modules - mistaken), sorted([*parameters, *(f"{name}.weight" for name in mistaken)])


def named_in(model: PreTrainedModel, targets: Iterable[str]) -> tuple[set[str], list[str]]:
    """(linear layers, other parameters) of the model that an adapter's `target_parameters` name, by their whole names.

    The model may have other adapters.
    """
    targets, modules, parameters = tuple(f".{target}" for target in targets), set(), []
    for path, module in model.named_modules():
        block = path.replace(".base_layer", "")
        for own, _ in module.named_parameters(recurse=False):
            if f".{block}.{own}".endswith(targets):
                if isinstance(module, nn.Linear) and own == "weight":
                    modules.add(block)
                else:
                    parameters.append(f"{block}.{own}")
    return modules, sorted(parameters)


# -- adapters on stacked experts ---------------------------------------------------------------------------------------
GROUPED = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: of what lengths rows must be for `grouped_mm`
GROUPED_FROM = (8, 0)  # the compute capability of GPUs from which on torch has it


def install_adapters(config: LoraConfig, model: nn.Module) -> None:
    """Makes adapters of this config use `LoraExperts` for the stacked experts of the model."""
    config._register_custom_module(dict.fromkeys(mixture_of(model).classes, LoraExperts))


class Factors(NamedTuple):
    """An adapter of one of the experts' matrices: A `[experts, rank, in]`, B `[experts, out, rank]`, and the scale."""

    down: Tensor
    up: Tensor
    scale: float


class LoraExperts(ParamWrapper):
    """Stacked experts with adapters on one of their matrices; the layer for the next matrix is around this one."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[tokens, hidden]` from x `[tokens, hidden]`, the chosen experts and their weights, `[tokens, chosen]`."""
        if self.merged or len(args) != 2 or kwargs or (not self.disable_adapters and len(self.active_adapters) != 1):
            return super().forward(x, *args, **kwargs)
        experts, factors, layer = self.get_base_layer(), {}, self
        while isinstance(layer, ParamWrapper):
            [role] = layer.active_adapters
            if not self.disable_adapters and role in layer.lora_A:
                factors[layer.parameter_name] = _factors(layer, role)
            layer = layer.base_layer
        return experts_forward(experts, x, *args, factors)


LoraExperts.__name__ = ParamWrapper.__name__  # by which PEFT knows the layers that it may put further ones around


def _factors(layer: ParamWrapper, role: str) -> Factors:
    down, up = (cast(nn.Linear, matrices[role]).weight for matrices in (layer.lora_A, layer.lora_B))
    number = layer.num_experts
    return Factors(
        down.view(number, -1, down.shape[1]), up.view(len(up), -1, number).permute(2, 0, 1), layer.scaling[role]
    )


def experts_forward(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor, factors: Mapping[str, Factors]) -> Tensor:
    """What transformers' experts return, with these adapters {name of a matrix: factors}.

    Args:
        x: `[tokens, hidden]`.
        chosen: int64 `[tokens, k]`, the experts of each token.
        weights: `[tokens, k]`, of their outputs.
    """
    k, flat = chosen.shape[-1], chosen.reshape(-1)
    order = flat.argsort(stable=True)
    sorted_experts = flat[order]
    numbers = torch.arange(experts.num_experts, device=flat.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)  # a bincount would wait for a GPU

    def linear(rows: Tensor, name: str) -> Tensor:
        matrix = getattr(experts, name)
        y = grouped(rows, matrix if experts.is_transposed else matrix.transpose(1, 2), ends)
        if experts.has_bias:
            y = y + getattr(experts, f"{name}_bias")[sorted_experts]
        if name in factors:
            down, up, scale = factors[name]
            low = grouped(rows, down.to(rows.dtype).transpose(1, 2), ends)
            y = y + scale * grouped(low, up.to(rows.dtype).transpose(1, 2), ends)
        return y

    rows = x[order // k]
    if experts.has_gate:
        inner = experts._apply_gate(linear(rows, "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(rows, "up_proj"))
    y = linear(inner, "down_proj") * weights.reshape(-1)[order, None]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return y[places].view(*chosen.shape, -1).sum(1).to(x.dtype)


def grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`[rows, out]`: rows `[rows, in]` up to ends[0] times matrices[0] `[in, out]`, those up to ends[1] times the next.

    `ends` is int32 `[groups]`, and the last of them the number of rows.
    """
    if has_grouped_mm(rows, matrices):
        contiguous = matrices.stride(1) == 1 or matrices.stride(2) == 1
        return functional.grouped_mm(rows, matrices if contiguous else matrices.contiguous(), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), matrices.unbind(), strict=True)])


def has_grouped_mm(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch has a grouped product of these, and of their gradients."""
    if rows.dtype not in GROUPED or any(n * rows.element_size() % ALIGNMENT for n in matrices.shape[1:]):
        return False
    return rows.device.type == "cpu" or (rows.is_cuda and torch.cuda.get_device_capability(rows.device) >= GROUPED_FROM)


# -- which experts tokens go to ----------------------------------------------------------------------------------------
OF_BLOCKS = "route_tokens_to_experts"
"""The method by which a block chooses experts itself, where its router only scores them."""
LARGEST_BYTE = 255
"""Numbers of experts are kept in a byte each where all of them are smaller than this, which means "unknown" there."""


def replay_obstacle(model: PreTrainedModel) -> str | None:
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
            for layer, name in enumerate(self.layers):
                for module, method in _choosers(self._model, name):
                    setattr(module, method, partial(self._choose, layer, getattr(module, method)))
                    self._wrapped.append((module, method))
        self._imposed = chosen
        try:
            with self.comparing(chosen, counted):
                yield
        finally:
            self._imposed = None

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
