"""Adapters in roles on one frozen base, a few MB each: policy, old, reference, teacher, critic, reward.

Switching adapters between a forward and its backward silently drops gradients (PEFT), so a forward with grad is
followed by its backward before any switch, and `check_gradients` checks after the first backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from peft import LoraConfig, LoraModel, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import Parameter

from rlft.config.model import CriticConfig, CriticKind, LoraSettings, SnapshotConfig
from rlft.model.adapter_folder import (
    OLD,
    POLICY,
    REFERENCE,
    SAMPLER,
    TEACHER,
    check_adapter_folder,
    load_tensors,
    own_tensors,
)
from rlft.model.backbone import Backbone, BaseWeights, load_backbone
from rlft.model.critic import CRITIC
from rlft.model.experts import Routing, mixture_of
from rlft.model.kernels.lora_linear import LoraLinear
from rlft.model.lora_config import as_configured, folder_config, folder_fields, lora_config, named_inside, unadapted
from rlft.model.networks import NO_CRITIC, NO_SNAPSHOTS, Kept, Networks
from rlft.model.text_model import names_of
from rlft.system.device import copied, copy_each
from rlft.system.products import Weight
from rlft.system.seeds import derive
from rlft.types import Adapter, UserError, counted


class Roles(Networks):
    """The base with its adapters. `close` removes them and leaves the base as it was, for the next job.

    backbone: the base, without adapters.
    lora, snapshot, critic: the config's sections; `snapshot` chooses reference, old policy and teacher.
    """

    def __init__(
        self,
        backbone: Backbone,
        lora: LoraSettings,
        snapshot: SnapshotConfig,
        critic: CriticConfig,
        *,
        temperature: float,
        token_budget: int,
        seed: int,
        teacher: Any = None,
    ) -> None:
        assert not hasattr(backbone.model, "peft_config"), "close the roles that are on this base first"
        super().__init__(backbone, snapshot, temperature=temperature, token_budget=token_budget, teacher=teacher)
        self.seed, self.names = seed, names_of(backbone.model)
        self._adapters: dict[str, list[tuple[str, Parameter]]] = {}
        self.lora = lora_config(lora, backbone.model)
        self._base = BaseWeights(backbone.model)
        mixture = mixture_of(backbone.model)
        self._settings = lora
        self._rounded: dict[nn.Linear, Weight] = {}  # copies of weights without adapters, for the sampler's passes
        backbone.kernels.choose_layers(self.lora, backbone.model)
        with torch.random.fork_rng(devices=[]), as_configured():
            torch.manual_seed(seed)
            self.model = PeftModel(backbone.model, self.lora, adapter_name=POLICY)
        self.tuner = cast(LoraModel, self.model.base_model)
        self._scale_gradients_of(parameter for _, parameter in self.named_parameters())
        backbone.model.disable_input_require_grads()  # only re-entrant checkpointing needs PEFT's hook
        with ExitStack() as undo:
            undo.callback(self.close)  # after a refusal the base, which others use, must not stay wrapped
            if lora.path is not None:
                self.load_role(POLICY, lora.path, "lora.path")
            for role in (REFERENCE, OLD):
                if role in self.moving:
                    self._add_adapter(role, self.lora)
                    self.copy(POLICY, role)
            if self.reference_role is not None and REFERENCE not in self.moving:
                self.load_role(REFERENCE, snapshot.reference, "snapshot.reference", frozen=True)
            if snapshot.teacher_adapter is not None:
                self.load_role(TEACHER, snapshot.teacher_adapter, "snapshot.teacher", frozen=True)
            if critic.kind is not CriticKind.none:
                self._add_critic(critic)
            self._activate(POLICY)
            self.model.eval()  # PEFT's new modules are in training mode, with dropout
            self._open_routing(Routing(backbone.model, mixture))  # with adapters in its modules' places by now
            undo.pop_all()

    # -- what checkpoints keep ---------------------------------------------------------------------------------------
    def weights(self, role: str) -> dict[str, Tensor]:
        """The adapter's tensors under the names that PEFT gives them on the folder's own class, detached copies."""
        return copied({self.names.outside(name): tensor for name, tensor in self.tensors(role).items()})

    def kept(self, roles: Sequence[str]) -> Kept:
        return {role: self.weights(role) for role in roles}, {}

    def restore_roles(
        self, roles: Sequence[str], adapters: Mapping[str, Mapping[str, Tensor]], folder: Path | None
    ) -> None:
        for role in roles:
            self.restore_role(role, adapters[role])

    def restore_role(self, role: str, weights: Mapping[str, Tensor]) -> None:
        """Sets one adapter to these tensors, under PEFT's names on the folder's own class or on the trained model."""
        own, found = self.tensors(role), self.names.all_inside(weights)
        assert own.keys() == found.keys(), f"these are another adapter's: {sorted(own.keys() ^ found.keys())[:3]}"
        copy_each(list(own.values()), [found[name] for name in own])

    def adapter_config(self) -> dict[str, Any]:
        return dict(self._folder_fields)

    @functools.cached_property
    def _folder_fields(self) -> dict[str, Any]:
        """They stay as they are: on a GPU's host they took a tenth of a second of each publish and checkpoint."""
        names = map(self.names.outside, self.tensors(POLICY))
        fields = folder_fields(self.model.peft_config[POLICY], names, self.backbone.model)
        return fields | {"base_model_name_or_path": self.backbone.path, "inference_mode": True}

    # -- what learns -------------------------------------------------------------------------------------------------
    def network_parameters(self, role: str) -> list[tuple[str, Parameter]]:
        """As of all networks: the adapter's, in PEFT's order."""
        # They are cached: adapters are never replaced, only written into. A search through all modules takes longer
        # than the check of a micro-batch's gradients, and PEFT's own search longer than the rest of a publish.
        parameters = self._adapters.get(role)
        if not parameters:
            parameters = [(name, p) for name, p in self.model.named_parameters() if f".{role}." in name]
            names = [_of_peft(name, role) for name, _ in parameters]
            assert not names or names == list(own_tensors(self.model, role)), "PEFT names the adapter otherwise"
            self._adapters[role] = parameters
        return parameters

    def tensors(self, role: str) -> dict[str, Tensor]:
        """{PEFT's name on the trained model: tensor} of the role's adapter; writing into them changes it."""
        return {_of_peft(name, role): parameter.detach() for name, parameter in self.network_parameters(role)}

    @contextmanager
    def learning(self, role: str) -> Iterator[None]:
        self._activate(role)
        try:
            yield
        finally:
            self._activate(POLICY)

    def publish(self, version: int) -> Adapter:
        return Adapter(version=version, weights=self.weights(POLICY), config=self.adapter_config())

    # -- the sampler's slot, for an engine that shares this base -------------------------------------------------------
    def load_sampler(self, adapter: Adapter, *, weights: str = "apart") -> None:
        """Copies a published version into the engine's own slot, so that the engine samples with what was published.

        With weights `merged`, or `merged_<dtype>`, it is also added to a copy of the base's linear weights, for faster
        decoding (`LoraLinear.add_up`), unless kernels are plain. With a dtype that is rounded, and so are copies of
        layers without an adapter and of the LM head, unless it is `adapted_<dtype>`.
        """
        if SAMPLER not in self.model.peft_config:
            self._add_adapter(SAMPLER, LoraConfig(**{**self.lora.to_dict(), "inference_mode": True}))
            self._activate(POLICY)
            self.model.eval()
        self.restore_role(SAMPLER, adapter.weights)
        if weights == "apart":
            return
        dtype = getattr(torch, weights.rpartition("_")[2], None)  # of merged: None
        for layer in self._lora_layers.values():
            layer.add_up(SAMPLER, dtype)
        if dtype is None or not weights.startswith("merged"):
            self._rounded = {}
        elif all(copy.dtype != dtype for copy in self._rounded.values()):
            layers = unadapted(self.backbone.model, self._settings)
            self._rounded = {each: Weight.of(each.weight.t(), dtype) for each in layers if each.weight.itemsize > 2}

    def sampler_tensors(self) -> tuple[dict[str, Tensor], list[str]]:
        """(the sampler's slot, each B times its layer's scale; layers that would compute with something else)."""
        tensors = {}
        for name, tensor in self.tensors(SAMPLER).items():
            if name.endswith(".lora_B.weight"):
                layer = cast(LoraLayer, self.model.get_submodule(name.removesuffix(".lora_B.weight")))
                tensor = tensor * layer.scaling[SAMPLER]
            tensors[self.names.outside(name)] = tensor
        flags: dict[nn.Module, Tensor | None] = {
            layer: layer.differs(SAMPLER) for layer in self._lora_layers.values() if SAMPLER in layer.lora_A
        }
        flags |= {layer: copy.differs(Weight.of(layer.weight.t(), copy.dtype)) for layer, copy in self._rounded.items()}
        known = {layer: flag for layer, flag in flags.items() if flag is not None}
        # A GPU is waited for once, not once a layer.
        values = torch.stack(list(known.values())).tolist() if known else []
        wrong = {layer for layer, differs in zip(known, values, strict=True) if differs}
        return tensors, [name for name, layer in self.model.named_modules() if layer in wrong] if wrong else []

    def share_merged_weights(self) -> None:
        """Lets the policy learn with the sampler's sums while their weights are the same (`LoraLinear.lend`).

        Call it only after the freshness check, in which the policy's passes must not depend on the sampler's weights.
        """
        if SAMPLER in self.model.peft_config:
            for layer in self._lora_layers.values():
                layer.lend(SAMPLER, POLICY)

    @functools.cached_property
    def _lora_layers(self) -> Mapping[str, LoraLinear]:
        """The layers with adapters that can have sums, which PEFT's own cannot."""
        return {name: layer for name, layer in self.model.named_modules() if isinstance(layer, LoraLinear)}

    @contextmanager
    def using(self, role: str | None) -> Iterator[PeftModel]:
        """The model with this role's adapter active (None: the bare base). Only for passes without gradient."""
        assert not torch.is_grad_enabled(), "switching roles inside a policy forward would lose its gradients"
        before = self._active
        if role is None:
            self.tuner.disable_adapter_layers()
        else:
            self._activate(role)
        try:
            with ExitStack() as stack:
                for layer, weight in self._rounded.items() if role == SAMPLER else ():
                    product = functools.partial(weight.times, bias=layer.bias)
                    stack.enter_context(mock.patch.object(layer, "forward", product))
                yield self.model
        finally:
            if role is None:
                self.tuner.enable_adapter_layers()
            self._activate(before)

    def close(self) -> None:
        super().close()
        self.tuner.unload()

    # -- roles with a head -------------------------------------------------------------------------------------------
    def add_scalar_role(self, role: str, path: str | None, key: str, *, learns: bool) -> None:
        """Adds an adapter with a scalar head, from the folder of a reward or critic, or a new one with a head of zeros.

        `key` is the config's key of the folder, for refusals; `learns`: whether its parameters are trained in this run.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, 0, role))
            self._add_adapter(role, self.lora)
        self._scale_gradients_of(parameter for _, parameter in self.named_parameters(role))
        if path is not None:
            self.load_role(role, path, key)
        self._add_head(role, path, key)
        if learns:
            self._learning.add(role)
        self._activate(POLICY)
        self.model.eval()

    def _add_critic(self, config: CriticConfig) -> None:
        path = None if config.init == "base" else config.init
        role = CRITIC if config.kind is CriticKind.adapter else POLICY
        if role == CRITIC:
            self.add_scalar_role(CRITIC, path, "critic.init", learns=True)
        else:
            self._add_head(CRITIC, path, "critic.init")
        self._set_critic(role, path, normalize=config.normalize_values)

    def _add_adapter(self, role: str, config: LoraConfig) -> None:
        with as_configured():
            self.model.add_adapter(role, config)
        vars(self).pop("switched", None)

    def _activate(self, role: str) -> None:
        self._active = role
        self.tuner.set_adapter(role, inference_mode=role not in self._learning)

    def load_role(self, role: str, path: str, key: str, *, frozen: bool = False) -> None:
        """Copies this folder's adapter to the role; a frozen role gets one with the folder's rank, scale and targets.

        Raises:
            UserError: the adapter has other tensors than the role, where PEFT would skip what is missing, or loading it
                has changed the base.
        """
        before, weights = self._base.fingerprint(), load_tensors(path, key)
        if frozen:
            config = folder_config(check_adapter_folder(path, key), self.backbone.model)
            if self.names.prefixes:  # the folder's may be names in its own class
                named_inside(config, self.names, weights)
            self.backbone.kernels.choose_layers(config, self.backbone.model)
            self._add_adapter(role, config)
        weights, initial = self.names.all_outside(weights), self.weights(role)
        wrong = sorted(n for n in weights.keys() | initial.keys() if _shape(weights, n) != _shape(initial, n))
        if wrong:
            settings = "its adapter_config.json" if frozen else "lora.rank and lora.target_modules"
            shapes = f"{_shape(weights, wrong[0])} there, {_shape(initial, wrong[0])} here"
            problem = f"{len(wrong)} of its tensors do not fit {settings}, e.g. {wrong[0]}: {shapes}"
            remedy = "save it again with PEFT" if frozen else "set both as in its adapter_config.json"
            raise UserError(key, problem, got=path, remedy=remedy)
        self.restore_role(role, weights)
        after = self._base.fingerprint()
        if changed := [name for name, value in after.items() if value != before[name]]:
            load_backbone.cache_clear()  # another job of a sweep must not get this base
            number = counted(len(changed), "weight")
            problem = f"loading it as the {role} has changed {number} of the base, e.g. {changed[0]}"
            remedy = "merge it into the base that it was trained on, and set model.path to the result"
            raise UserError(key, problem, got=path, remedy=remedy)


def _of_peft(name: str, role: str) -> str:
    """The name in PEFT's files of a role's parameter with this name in the model."""
    stem, _, field = name.rpartition(f".{role}.")
    return stem if stem.endswith(".lora_magnitude_vector") else f"{stem}.{field}"


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


def policy_alone(
    backbone: Backbone,
    lora: LoraSettings,
    *,
    token_budget: int,
    seed: int,
    temperature: float = 1.0,
    reference: str = "none",
) -> Roles:
    """The policy's adapter on the base, without old policy or critic, and the reference's if that is a folder."""
    snapshot = replace(NO_SNAPSHOTS, reference=reference)
    return Roles(backbone, lora, snapshot, NO_CRITIC, temperature=temperature, token_budget=token_budget, seed=seed)
