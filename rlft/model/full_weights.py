"""The model's own weights as the policy, all of them trained, without an adapter; and frozen copies in other roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter
from transformers.core_model_loading import revert_weight_conversion

from rlft.config.model import CriticConfig, CriticKind, Old, SnapshotConfig
from rlft.model.adapter_folder import OLD, POLICY, REFERENCE, SAMPLER
from rlft.model.backbone import Backbone
from rlft.model.critic import CRITIC
from rlft.model.experts import Routing, mixture_of
from rlft.model.networks import NO_CRITIC, NO_SNAPSHOTS, Kept, Networks
from rlft.system.device import copied
from rlft.types import Adapter, require

MODEL = "model"
"""The policy's folder in a checkpoint, a complete Hugging Face model; and its role where nothing else has one."""
OWN = (POLICY, MODEL, SAMPLER)  # roles that are the weights being trained
UNLIMITED = 2**62
"""A token budget that no batch exceeds, where only losses of texts are computed, which have budgets of their own."""


def copied_roles(snapshot: SnapshotConfig) -> list[str | None]:
    """The roles that are frozen copies of all weights; None is the model as the run found it."""
    roles: list[str | None] = [None] if "base" in (snapshot.reference, snapshot.teacher) else []
    roles += [REFERENCE] if snapshot.reference in ("copy", "ema") else []
    return roles + ([OLD] if snapshot.old is Old.copy else [])


class WholeModel(Networks):
    """The roles of a run that trains all weights of its backbone, which nobody else may use.

    The policy is the model itself. Another role is a frozen copy of its weights, which takes their place for that
    role's passes. An engine on this backbone samples from the policy's own weights: publishing copies nothing, and
    what it holds is proven by their addresses and by torch's count of writes into them.

    critic: no critic, or one whose head reads the policy's features.
    """

    is_whole: ClassVar[bool] = True

    def __init__(
        self,
        backbone: Backbone,
        snapshot: SnapshotConfig = NO_SNAPSHOTS,
        critic: CriticConfig = NO_CRITIC,
        *,
        temperature: float = 1.0,
        token_budget: int = UNLIMITED,
        teacher: Any = None,
    ) -> None:
        self.model = backbone.model
        self.model.requires_grad_(True)
        super().__init__(backbone, snapshot, temperature=temperature, token_budget=token_budget, teacher=teacher)
        self._own = list(self.model.named_parameters())  # tied ones only once; they are written into, never replaced
        self._copies = {role: copied(self.tensors(POLICY)) for role in copied_roles(snapshot)}
        self._published: dict[str, tuple[int, int]] = {}
        if critic.kind is not CriticKind.none:
            assert critic.kind is CriticKind.shared, "plan/roles.py refuses a critic with an adapter"
            path = None if critic.init == "base" else critic.init
            self._add_head(CRITIC, path, "critic.init")
            self._set_critic(POLICY, path, normalize=critic.normalize_values)
        self._open_routing(Routing(self.model, mixture_of(self.model)))

    def network_parameters(self, role: str) -> list[tuple[str, Parameter]]:
        return self._own if role in OWN else []

    def tensors(self, role: str | None) -> dict[str, Tensor]:
        """{name: tensor} of the role's weights; writing into them changes it."""
        if role in OWN:
            return {name: parameter.detach() for name, parameter in self._own}
        return self._copies[role]

    @contextmanager
    def using(self, role: str | None) -> Iterator[Any]:
        """The model with this role's weights in the place of its own (None: the base's)."""
        assert not torch.is_grad_enabled(), "gradients would be those of another role's weights"
        if role in OWN:
            yield self.model
            return
        own = self.tensors(POLICY)
        try:
            self._place(self._copies[role])
            yield self.model
        finally:
            self._place(own)

    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._own:
            parameter.data = tensors[name]

    def has(self, role: str | None) -> bool:
        return role in OWN or role in self._copies

    @contextmanager
    def learning(self, role: str) -> Iterator[None]:
        assert role in OWN, "no other role's weights are trained"
        yield

    # -- what checkpoints keep -----------------------------------------------------------------------------------------
    @property
    def moving(self) -> tuple[str, ...]:
        """As in `Networks`, without the old policy, which is the policy between two steps."""
        return tuple(role for role in self.changing if role != OLD)

    def kept(self, roles: Sequence[str]) -> Kept:
        return {}, {_folder_of(role): partial(self.write, role=role) for role in roles}

    def adapter_config(self) -> dict[str, Any]:
        return {}

    def write(self, folder: Path, role: str = POLICY) -> None:
        """Writes a model folder that transformers and vLLM can load: weights, config, tokenizer."""
        with torch.no_grad(), self.using(role):
            self.model.save_pretrained(folder)
        self.backbone.tokenizer.save_pretrained(folder)

    def restore_roles(
        self, roles: Sequence[str], adapters: Mapping[str, Mapping[str, Tensor]], folder: Path | None
    ) -> None:
        assert folder is not None, "a checkpoint was loaded from a folder"
        for role in roles:
            self.restore_role(folder / _folder_of(role), role)
        if OLD in self._copies:
            self.copy(POLICY, OLD)

    def restore_role(self, folder: Path, role: str = POLICY) -> None:
        """Loads the weights that `write` has saved."""
        weights = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
        with torch.no_grad(), self.using(role):
            report = self.model.load_state_dict(weights, strict=False)
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        mismatched = [*(name for name in report.missing_keys if name not in tied), *report.unexpected_keys]
        assert not mismatched, f"these weights are another model's: {mismatched[:3]}"

    # -- what engines sample from --------------------------------------------------------------------------------------
    def publish(self, version: int) -> Adapter:
        """The weights themselves, not copies: an engine with weights of its own has to copy them when it loads them.

        They have the names of a checkpoint, except in a mixture of experts: renaming would copy its stacked tensors.
        """
        self._published, weights = self._marks(), self.tensors(POLICY)
        if not mixture_of(self.model).stacked:
            weights = revert_weight_conversion(self.model, weights)
        return Adapter(version=version, weights=weights, config={})

    def load_sampler(self, adapter: Adapter, *, weights: str = "apart") -> None:
        """Does nothing: the engine's model is the trainer's."""

    def sampler_tensors(self) -> tuple[dict[str, Tensor] | None, list[str]]:
        """(None, names of the weights that were written or replaced since the last publish)."""
        return None, [name for name, mark in self._marks().items() if self._published.get(name) != mark]

    def _marks(self) -> dict[str, tuple[int, int]]:
        """{name: (the weight's address, how often it was written into)}."""
        return {name: (parameter.data_ptr(), parameter._version) for name, parameter in self._own}


class FollowingModel(WholeModel):
    """The policy of a run in another process, which sends its weights: an engine here samples from its own copy.

    Raises UserError: by the key cluster.engines: a checkpoint of this model has other tensors than the model itself.
    """

    def __init__(self, backbone: Backbone, **limits: Any) -> None:
        super().__init__(backbone, **limits)
        own = {parameter.untyped_storage().data_ptr() for _, parameter in self._own}
        self._held = dict(self.publish(0).weights)
        copies = [name for name, tensor in self._held.items() if tensor.untyped_storage().data_ptr() not in own]
        problem = f"send tensors as a checkpoint has them, and those of a {self.model.config.model_type} are others"
        remedy = "set it to 0, or use generation=vllm"
        require(not copies, "cluster.engines", problem, got=next(iter(copies), ""), remedy=remedy)

    def sampler_tensors(self) -> tuple[dict[str, Tensor], list[str]]:
        return self._held, []


def _folder_of(role: str) -> str:
    return MODEL if role in OWN else role
