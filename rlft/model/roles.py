"""Adapters in roles on one frozen base: who is the policy, who was it when it sampled, what is it held to.

The algorithm never sees adapters, only the tensors they produce: `annotate` makes the no-grad ones, `outputs` the
policy's with grad. Switching adapters between a forward and its backward silently drops the policy's gradients (PEFT),
so every no-grad pass is made before the policy's forward, and `check_gradients` looks after the first backward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from rlft.collate import select
from rlft.model.backbone import Backbone
from rlft.model.config import LoraSettings, Old, SnapshotConfig
from rlft.model.forward import Forward, choose
from rlft.types import Adapter, Batch, Outputs, UserError

POLICY, REFERENCE, SAMPLER = "policy", "reference", "sampler"


class Roles:
    """The base with its adapters. `close` takes them off again and leaves the base as it was, for the next job."""

    def __init__(
        self,
        backbone: Backbone,
        lora: LoraSettings,
        snapshot: SnapshotConfig,
        *,
        temperature: float,
        token_budget: int,
        seed: int,
    ) -> None:
        assert not hasattr(backbone.model, "peft_config"), "close the roles that are on this base first"
        self.backbone, self.snapshot = backbone, snapshot
        self.temperature, self.token_budget = temperature, token_budget
        self.forward: Forward = choose(backbone.model)
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        self.lora = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT annotates int, and scales by any number
            lora_dropout=lora.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = PeftModel(backbone.model, self.lora, adapter_name=POLICY)
        self.tuner = cast(LoraModel, self.model.base_model)
        backbone.model.disable_input_require_grads()  # PEFT's hook, for a kind of checkpointing that is not used here
        with ExitStack() as undo:
            undo.callback(self.close)  # a refused adapter must not leave its wrapping on a base that others use
            if lora.path is not None:
                self._warm_start(lora.path)
            if self.has_moving_reference:
                self.model.add_adapter(REFERENCE, self.lora)
                self._restore(REFERENCE, self.weights(POLICY))
            elif snapshot.reference not in ("none", "base"):
                self.model.load_adapter(snapshot.reference, REFERENCE, is_trainable=False)
            self._activate(POLICY)
            self.model.eval()  # PEFT's new modules come in training mode, with dropout
            undo.pop_all()

    # -- what the checkpoint keeps -----------------------------------------------------------------------------------
    @property
    def has_moving_reference(self) -> bool:
        return self.snapshot.reference == "copy"

    @property
    def moving(self) -> tuple[str, ...]:
        """Roles that change during a run, and so belong in every checkpoint."""
        return (POLICY, REFERENCE) if self.has_moving_reference else (POLICY,)

    def weights(self, role: str) -> dict[str, Tensor]:
        """The adapter's tensors under PEFT's names, detached copies."""
        # PEFT would ask the hub about the base's vocabulary to decide on embeddings; they are frozen and never saved.
        state = get_peft_model_state_dict(self.model, adapter_name=role, save_embedding_layers=False)
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def restore(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Sets every moving role to what a checkpoint held: {role: {PEFT name: tensor}}."""
        for role in self.moving:
            self._restore(role, weights[role])

    def adapter_config(self) -> dict[str, Any]:
        """The fields of adapter_config.json."""
        fields = {
            key: sorted(v) if isinstance(v, set) else v for key, v in self.model.peft_config[POLICY].to_dict().items()
        }
        return fields | {"base_model_name_or_path": self.backbone.path, "inference_mode": True}

    # -- the policy --------------------------------------------------------------------------------------------------
    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """The policy adapter's trainable parameters, in a fixed order."""
        return [(name, p) for name, p in self.model.named_parameters() if f".{POLICY}." in name]

    def outputs(self, batch: Batch, entropy: bool) -> Outputs:
        """The current policy on these rows, with grad."""
        return self.forward(batch, self.temperature, entropy)

    @contextmanager
    def training(self) -> Iterator[None]:
        """LoRA dropout is on inside; log-probs for old and reference are always taken without it."""
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def check_gradients(self) -> None:
        """Every policy parameter must have a gradient after the first backward (see the module's docstring)."""
        missing = [name for name, p in self.named_parameters() if p.grad is None]
        assert not missing, f"no gradient reached {len(missing)} policy parameters, e.g. {missing[0]}"

    def publish(self, version: int) -> Adapter:
        return Adapter(version=version, weights=self.weights(POLICY), config=self.adapter_config())

    def refresh(self, step: int) -> bool:
        """After `step` steps: the moving reference becomes a copy of the policy when it is due. True if it did."""
        due = self.has_moving_reference and self.snapshot.refresh_every > 0 and step % self.snapshot.refresh_every == 0
        if due:
            self._restore(REFERENCE, self.weights(POLICY))
        return due

    # -- passes without gradient -------------------------------------------------------------------------------------
    def annotate(self, batch: Batch, inert_B: Tensor, *, needs_old: bool) -> Batch:
        """Adds old and reference log-probs. Rows that are inert (bool `[B]`) teach nothing and stay 0: no forward.

        needs_old: whether `snapshot.old: auto` has to recompute; else old is the current policy, detached, at no cost.
        """
        rows = (~inert_B).nonzero()[:, 0]
        if self.snapshot.old is Old.sampled:
            batch = replace(batch, old_logprobs=batch.sampled_logprobs)
        elif self.snapshot.old is Old.recompute or needs_old:
            batch = replace(batch, old_logprobs=self._logprobs(batch, rows, POLICY))
        if self.snapshot.reference != "none":
            role = None if self.snapshot.reference == "base" else REFERENCE
            batch = replace(batch, reference_logprobs=self._logprobs(batch, rows, role))
        return batch

    def _logprobs(self, batch: Batch, rows: Tensor, role: str | None) -> Tensor:
        """float32 `[B, T]` on the batch's device."""
        logprobs_BT = torch.zeros_like(batch.sampled_logprobs)
        with torch.no_grad(), self.using(role):
            for part in self.forward.micro_batches(batch, rows, self.token_budget):
                logprobs_BT[part] = self.forward(self.to_device(select(batch, part)), self.temperature).logprobs.to(
                    logprobs_BT
                )
        return logprobs_BT

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first by the current policy: the freshness check."""
        with torch.no_grad():
            return [score_sequence(self.model, ids, self.backbone.device) for ids in sequences]

    def to_device(self, batch: Batch) -> Batch:
        device = self.backbone.device
        if device.type == "cpu":
            return batch
        return replace(batch, **{n: v.to(device) for n in Batch.__slots__ if (v := getattr(batch, n)) is not None})

    # -- the sampler's slot, for an engine that shares this base -------------------------------------------------------
    def load_sampler(self, adapter: Adapter) -> None:
        """Copies a published version into the engine's own slot: what it samples with is what was published."""
        if SAMPLER not in self.model.peft_config:
            self.model.add_adapter(SAMPLER, LoraConfig(**{**self.lora.to_dict(), "inference_mode": True}))
            self._activate(POLICY)
            self.model.eval()
        self._restore(SAMPLER, adapter.weights)

    @contextmanager
    def using(self, role: str | None) -> Iterator[PeftModel]:
        """The model with this role's adapter active (None: the bare base). Only for passes without gradient."""
        assert not torch.is_grad_enabled(), "switching roles inside a policy forward would lose its gradients"
        if role is None:
            self.tuner.disable_adapter_layers()
        else:
            self._activate(role)
        try:
            yield self.model
        finally:
            if role is None:
                self.tuner.enable_adapter_layers()
            self._activate(POLICY)

    def close(self) -> None:
        """Takes every adapter off; the base is what it was before. Safe to call twice."""
        self.tuner.unload()

    def _activate(self, role: str) -> None:
        self.tuner.set_adapter(role, inference_mode=role != POLICY)

    def _warm_start(self, path: str) -> None:
        """The policy starts from this adapter: the same tensors, or a refusal. PEFT would leave out what is missing."""
        weights, fresh = load_adapter(path, "lora.path"), self.weights(POLICY)
        odd = sorted(n for n in weights.keys() | fresh.keys() if _shape(weights, n) != _shape(fresh, n))
        if odd:
            raise UserError(
                "lora.path",
                f"{len(odd)} of its tensors do not fit lora.rank and lora.target_modules, e.g. {odd[0]}: "
                f"{_shape(weights, odd[0])} there, {_shape(fresh, odd[0])} here",
                got=path,
                remedy="set both as in its adapter_config.json",
            )
        self._restore(POLICY, weights)

    def _restore(self, role: str, weights: Mapping[str, Tensor]) -> None:
        set_peft_model_state_dict(self.model, dict(weights), adapter_name=role)


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


def score_sequence(model: Any, ids: list[int], device: torch.device) -> list[float]:
    """Natural-log probabilities (temperature 1) of ids[1:], each given those before it."""
    input_ids = torch.tensor([ids], device=device)
    logprobs = model(input_ids=input_ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, input_ids[0, 1:, None])[:, 0].tolist()


def load_adapter(path: str | Path, key: str) -> dict[str, Tensor]:
    """The tensors of a PEFT adapter folder (safetensors only: nothing pickled is ever loaded)."""
    file = Path(path).expanduser() / "adapter_model.safetensors"
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(
            key, f"the adapter cannot be read ({error})", got=path, remedy="point it at a PEFT adapter folder"
        ) from None


def check_adapter_folder(path: str, key: str) -> dict[str, Any]:
    """The adapter_config.json of a PEFT folder; refuses what is not one. Reads no weights."""
    folder = Path(path).expanduser()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(
                key, f"there is no {name} in that folder", got=path, remedy="point it at a PEFT adapter folder"
            )
    return json.loads((folder / "adapter_config.json").read_text())
