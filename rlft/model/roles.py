"""Adapters in roles on one frozen base: policy, old, reference, teacher, critic, reward; each a few MB beside the base.

The algorithm never sees adapters, only the tensors that they produce: `annotate` makes those without grad, `outputs`
and `values` those with grad. Switching adapters between a forward and its backward silently drops gradients (PEFT), so
a forward with grad is followed by its backward before any switch, and `check_gradients` checks after the first
backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from peft import LoraConfig, LoraModel, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn import Parameter

from rlft.batch import score_sequences, select
from rlft.config.model import CriticConfig, CriticKind, LoraSettings, Old, RoutingSource, SnapshotConfig
from rlft.model.adapter_folder import (
    OLD,
    POLICY,
    REFERENCE,
    SAMPLER,
    TEACHER,
    check_adapter_folder,
    load_adapter,
    load_head,
    own_tensors,
    read_record,
)
from rlft.model.backbone import Backbone, BaseWeights, load_backbone, set_training_mode
from rlft.model.critic import CRITIC, Critic, ScalarHead
from rlft.model.experts import mixture_of
from rlft.model.forward import Forward, choose, scale_down
from rlft.model.kernels import selection
from rlft.model.kernels.prefix_cache import PrefixCache, open_prefix_cache
from rlft.model.lora_config import as_configured, folder_config, folder_fields, lora_config, named_inside
from rlft.model.packing import Layout
from rlft.model.routing import Routing
from rlft.model.teacher import Part, TeacherEngine, teacher_logprobs, teacher_logprobs_by_engine
from rlft.model.text_model import names_of
from rlft.system.seeds import derive
from rlft.types import Adapter, Batch, Outputs, UserError, counted


class Roles:
    """The base with its adapters. `close` removes them and leaves the base as it was, for the next job.

    `critic` is where values come from, or None; `heads` is {role: scalar head} of critic and rewards.

    Args:
        backbone: the base, without adapters.
        lora, snapshot, critic: the config's sections; `snapshot` chooses reference, old policy and teacher.
        temperature: temperature at which log-probs are taken.
        token_budget: the most tokens in a forward.
        teacher: the forward of a teacher that is a separate model, or the engine that computes it; otherwise None.
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
        teacher: Forward | TeacherEngine | None = None,
    ) -> None:
        assert not hasattr(backbone.model, "peft_config"), "close the roles that are on this base first"
        self.backbone, self.snapshot, self.seed = backbone, snapshot, seed
        self.names = names_of(backbone.model)
        self.temperature, self.token_budget = temperature, token_budget
        self.forward: Forward = choose(backbone.model, backbone.kernels)
        self.heads: dict[str, ScalarHead] = {}
        self.critic: Critic | None = None
        self._teacher = teacher if isinstance(teacher, Forward) else None
        self._teacher_engine = None if isinstance(teacher, Forward) else teacher
        self._learning = {POLICY}
        self._adapters: dict[str, list[tuple[str, Parameter]]] = {}
        self._routing: Routing | None = None
        self.lora = lora_config(lora, backbone.model)
        self._base = BaseWeights(backbone.model)
        mixture = mixture_of(backbone.model)
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
            self._routing = Routing(backbone.model, mixture)  # with adapters in its modules' places by now
            if snapshot.routing is not RoutingSource.free and (problem := self._routing.check()) is not None:
                remedy = "set it to free, or use another model"
                raise UserError("snapshot.routing", problem, got=snapshot.routing, remedy=remedy)
            undo.pop_all()

    @property
    def critic_adapter(self) -> str | None:
        """The critic's own adapter; None if it has none, or there is no critic."""
        return CRITIC if self.critic is not None and self.critic.role == CRITIC else None

    # -- what checkpoints keep ---------------------------------------------------------------------------------------
    @property
    def reference_role(self) -> str | None:
        """The role of the reference; None: the bare base, also if there is no reference."""
        return None if self.snapshot.reference in ("none", "base") else REFERENCE

    @property
    def moving(self) -> tuple[str, ...]:
        """Adapters that change during a run, so that every checkpoint includes them."""
        roles = [POLICY]
        if self.snapshot.reference in ("copy", "ema"):
            roles.append(REFERENCE)
        if self.snapshot.old is Old.copy:
            roles.append(OLD)
        return (*roles, *sorted(self._learning - {POLICY}))

    @property
    def learning_roles(self) -> tuple[str, ...]:
        """Roles with parameters that are trained in this run."""
        shared = self.critic is not None and self.critic_adapter is None
        return (*sorted(self._learning, key=lambda role: (role != POLICY, role)), *([CRITIC] if shared else []))

    def weights(self, role: str) -> dict[str, Tensor]:
        """The adapter's tensors under the names that PEFT gives them on the folder's own class, detached copies."""
        return {self.names.outside(name): tensor.clone() for name, tensor in self._tensors(role).items()}

    def restore(
        self, adapters: Mapping[str, Mapping[str, Tensor]], heads: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> None:
        """Sets every moving role to what a checkpoint held: {role: {PEFT name: tensor}}, {role: {name: tensor}}."""
        for role in self.moving:
            self.restore_role(role, adapters[role])
        for role, weights in (heads or {}).items():
            if role in self.heads:
                self.heads[role].restore(weights)

    def restore_role(self, role: str, weights: Mapping[str, Tensor]) -> None:
        """Sets one adapter to these tensors, under PEFT's names on the folder's own class or on the trained model."""
        own, found = self._tensors(role), self.names.all_inside(weights)
        assert own.keys() == found.keys(), f"these are another adapter's: {sorted(own.keys() ^ found.keys())[:3]}"
        for name, tensor in own.items():
            tensor.copy_(found[name])

    def adapter_config(self) -> dict[str, Any]:
        """The fields of adapter_config.json, the same for every role that rlft makes."""
        names = map(self.names.outside, self._tensors(POLICY))
        fields = folder_fields(self.model.peft_config[POLICY], names, self.backbone.model)
        return fields | {"base_model_name_or_path": self.backbone.path, "inference_mode": True}

    # -- what learns -------------------------------------------------------------------------------------------------
    def named_parameters(self, role: str = POLICY) -> list[tuple[str, Parameter]]:
        """The role's trainable parameters in a fixed order: its adapter, if it has one, and its head."""
        head = self.heads[role].named_parameters() if role in self.heads else ()
        return [*self._adapter(role), *((f"{role}.head.{name}", parameter) for name, parameter in head)]

    def _adapter(self, role: str) -> list[tuple[str, Parameter]]:
        """The adapter's parameters by the model's names, in PEFT's order; none if the role has no adapter."""
        # They are cached: adapters are never replaced, only written into. A search through all modules takes longer
        # than the check of a micro-batch's gradients, and PEFT's own search longer than the rest of a publish.
        parameters = self._adapters.get(role)
        if not parameters:
            parameters = [(name, p) for name, p in self.model.named_parameters() if f".{role}." in name]
            names = [_of_peft(name, role) for name, _ in parameters]
            assert not names or names == list(own_tensors(self.model, role)), "PEFT names the adapter otherwise"
            self._adapters[role] = parameters
        return parameters

    def _tensors(self, role: str) -> dict[str, Tensor]:
        """{PEFT's name on the trained model: tensor} of the role's adapter; writing into them changes it."""
        return {_of_peft(name, role): parameter.detach() for name, parameter in self._adapter(role)}

    def outputs(self, batch: Batch, entropy: bool, layout: Layout | None = None, *, top_k: bool = False) -> Outputs:
        """The current policy on these rows, with grad (`Forward`); with values if the critic reads its features."""
        critic = self.critic
        if critic is None or critic.role != POLICY:
            return self.forward(batch, self.temperature, entropy, layout=layout, top_k=top_k)
        outputs = self.forward(batch, self.temperature, entropy, critic.head, layout, top_k)
        assert outputs.values is not None, "the forward was given a head"
        return replace(outputs, values=critic.values(outputs.values, batch.loss_mask))

    def values(self, batch: Batch, layout: Layout | None = None) -> Tensor:
        """The critic's values `[B, T]` for these rows in units of reward, with the active adapter."""
        assert self.critic is not None, "plan/roles.py refuses algorithms that need values without a critic"
        return self.critic.values(self.forward.values(batch, self.critic.head, layout), batch.loss_mask)

    @contextmanager
    def training(self, *, dropout: bool = True) -> Iterator[None]:
        """Inside, the model is in the mode of updates, with LoRA dropout unless `dropout` is False."""
        set_training_mode(self.model, dropout=dropout)
        try:
            yield
        finally:
            self.model.eval()

    @contextmanager
    def learning(self, role: str) -> Iterator[None]:
        """Inside, forwards with grad use this role's adapter. The backward must happen inside, too."""
        self._activate(role)
        try:
            yield
        finally:
            self._activate(POLICY)

    def check_gradients(self, role: str = POLICY) -> None:
        """Checks that every parameter of the role has a gradient, after a backward (see the module's docstring)."""
        missing = [name for name, p in self.named_parameters(role) if p.grad is None]
        assert not missing, f"no gradient reached {len(missing)} parameters of {role}, e.g. {missing[0]}"

    def publish(self, version: int) -> Adapter:
        return Adapter(version=version, weights=self.weights(POLICY), config=self.adapter_config())

    # -- snapshots in time -------------------------------------------------------------------------------------------
    def refresh(self, step: int) -> tuple[str, ...]:
        """After `step` steps, moves the snapshots that are due, and returns their roles.

        old becomes the policy that samples next. A `copy` reference becomes the policy every `refresh_every` steps; an
        `ema` reference moves towards it each step: reference <- decay x reference + (1 - decay) x policy, by tensor.
        """
        due = []
        every, decay = self.snapshot.refresh_every, self.snapshot.ema_decay
        if self.snapshot.reference == "copy" and every > 0 and step % every == 0:
            self.copy(POLICY, REFERENCE)
            due.append(REFERENCE)
        if self.snapshot.reference == "ema":
            assert decay is not None, "plan/roles.py refuses ema without a decay"
            policy = self.weights(POLICY)
            moved = {name: decay * old + (1 - decay) * policy[name] for name, old in self.weights(REFERENCE).items()}
            self.restore_role(REFERENCE, moved)
            due.append(REFERENCE)
        if self.snapshot.old is Old.copy:
            self.copy(POLICY, OLD)
            due.append(OLD)
        return tuple(due)

    def copy(self, source: str, target: str) -> None:
        """Copies source's adapter exactly to target's; they share no tensors."""
        self.restore_role(target, self.weights(source))

    # -- passes without gradient -------------------------------------------------------------------------------------
    def annotate(self, batch: Batch, zero_gradient_B: Tensor, *, needs_old: bool, teacher_top_k: int = 0) -> Batch:
        """Adds old, reference and teacher log-probs and old values as far as needed, with one pass for each role.

        Args:
            zero_gradient_B: bool `[B]`, rows that teach nothing; they are not forwarded and stay 0.
            needs_old: whether `snapshot.old: auto` has to recompute old log-probs; otherwise the loss takes those of
                the current policy, detached, at no cost.
            teacher_top_k: number of the teacher's most likely tokens whose log-probs are added, too.
        """
        parts = self.forward.micro_batches(batch, (~zero_gradient_B).nonzero()[:, 0], self.token_budget)
        fields = self.annotations(batch, parts, needs_old=needs_old, teacher_top_k=teacher_top_k)
        return replace(batch, **fields) if fields else batch

    def annotations(
        self, batch: Batch, micro_batches: Sequence[Tensor], *, needs_old: bool, teacher_top_k: int = 0
    ) -> dict[str, Tensor]:
        """The fields that `annotate` adds, {field: `[B, T, ..]`}, for these micro-batches (int64 indices of rows)."""
        results: dict[str, Tensor] = {}
        fields_by_role: dict[str | None, set[str]] = defaultdict(set)
        old, reference = self.snapshot.old, self.snapshot.reference
        if old is Old.sampled:
            results["old_logprobs"] = batch.sampled_logprobs
        elif old is Old.copy:
            fields_by_role[OLD].add("old_logprobs")
        elif old is Old.recompute or needs_old:
            fields_by_role[POLICY].add("old_logprobs")
        if self.snapshot.routing is RoutingSource.old:
            fields_by_role[OLD if old is Old.copy else POLICY].add("experts")
        if reference != "none":
            fields_by_role[self.reference_role].add("reference_logprobs")
        if self.critic is not None:
            fields_by_role[self.critic.role].add("old_values")
        engine, has_teacher = self._teacher_engine, self.snapshot.teacher != "none"
        parts: list[Part] = []
        if fields_by_role or (has_teacher and engine is None):  # packed once for the passes of all roles
            micros = self.forward.placed([select(batch, rows) for rows in micro_batches])
            parts = [(rows, m.batch, m.layout) for rows, m in zip(micro_batches, micros, strict=True)]
        for role, fields in fields_by_role.items():
            results |= self._without_gradient(batch, parts, role, fields)
        asked = {"top_k": teacher_top_k, "vocabulary": self.backbone.model.config.get_text_config().vocab_size}
        if engine is not None:
            results |= teacher_logprobs_by_engine(engine, batch, micro_batches, **asked)
        elif has_teacher:
            role = TEACHER if self.snapshot.teacher_adapter is not None else None
            with torch.no_grad(), self.using(role) if self._teacher is None else nullcontext():
                teacher = self._teacher or self.forward
                results |= teacher_logprobs(teacher, batch, parts, token_budget=self.token_budget, **asked)
        return results

    def _without_gradient(
        self, batch: Batch, parts: Sequence[Part], role: str | None, fields: set[str]
    ) -> dict[str, Tensor]:
        """{field: float32 `[B, T]` on the batch's device} of log-probs and values by this role, without dropout.

        `experts` are those of the same pass, as in Batch. The passes of the policy and of the old one are replays of
        what the engine chose, if `snapshot.routing` says so.
        """
        result = {field: torch.zeros_like(batch.sampled_logprobs) for field in fields - {"experts"}}
        if "experts" in fields:
            result["experts"] = self.routing.unknown(batch.token_ids.shape)
        with torch.no_grad(), self.using(role):
            for part, micro, layout in parts:
                noting = self.routing.noting() if "experts" in fields else self._replaying_as(role, micro, layout)
                with noting as noted:
                    if fields == {"old_values"}:
                        outputs = Outputs(logprobs=micro.sampled_logprobs, values=self.values(micro, layout))
                    elif "old_values" in fields:
                        outputs = self.outputs(micro, entropy=False, layout=layout)
                    else:
                        outputs = self.forward(micro, self.temperature, layout=layout)
                    if noted is not None:
                        result["experts"][part] = self.forward.experts_by_row(noted(), micro, layout).cpu()
                for field in fields - {"experts"}:
                    computed = outputs.values if field == "old_values" else outputs.logprobs
                    assert computed is not None, "the pass computes what is requested"
                    result[field][part] = computed.to(result[field])
        return result

    def logprobs(self, batch: Batch, role: str | None) -> Tensor:
        """float32 `[B, T]` of every row by this role (None: the bare base), without gradient or dropout."""
        result = torch.zeros_like(batch.sampled_logprobs)
        with torch.no_grad(), self.using(role):
            for part, micro in self.forward.parts(batch, self.token_budget):
                with self._replaying_as(role, micro.batch, micro.layout):
                    outputs = self.forward(micro.batch, self.temperature, layout=micro.layout)
                result[part] = outputs.logprobs.to(result)
        return result

    def scalars(self, role: str, batch: Batch, layout: Layout | None = None) -> Tensor:
        """The role's head at each completion token `[B, T]`; a role with an adapter must be the active one."""
        return self.forward.values(batch, self.heads[role], layout)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first by the current policy: the freshness check."""
        with torch.no_grad():
            return score_sequences(self.model, sequences, self.backbone.device)

    # -- the sampler's slot, for an engine that shares this base -------------------------------------------------------
    def load_sampler(self, adapter: Adapter, *, weights: str = "apart") -> None:
        """Copies a published version into the engine's own slot, so that the engine samples with what was published.

        With weights `merged` or `merged_bfloat16` it is also added to a copy of the base's linear weights, for faster
        decoding (`LoraLinear.add_up`), unless kernels are plain.
        """
        if SAMPLER not in self.model.peft_config:
            self._add_adapter(SAMPLER, LoraConfig(**{**self.lora.to_dict(), "inference_mode": True}))
            self._activate(POLICY)
            self.model.eval()
        self.restore_role(SAMPLER, adapter.weights)
        if weights != "apart":
            selection.add_up(self.model, SAMPLER, torch.bfloat16 if weights == "merged_bfloat16" else None)

    def sampler_tensors(self) -> tuple[dict[str, Tensor], list[str]]:
        """(the sampler's slot, each B times its layer's scale; layers that would compute with something else)."""
        tensors = {}
        for name, tensor in self._tensors(SAMPLER).items():
            if name.endswith(".lora_B.weight"):
                layer = cast(LoraLayer, self.model.get_submodule(name.removesuffix(".lora_B.weight")))
                tensor = tensor * layer.scaling[SAMPLER]
            tensors[self.names.outside(name)] = tensor
        return tensors, selection.outdated(self.model, SAMPLER)

    def share_merged_weights(self) -> None:
        """Lets the policy learn with the sampler's sums while their weights are the same (`LoraLinear.lend`).

        Call it only after the freshness check, in which the policy's passes must not depend on the sampler's weights.
        """
        if SAMPLER in self.model.peft_config:
            selection.lend(self.model, SAMPLER, POLICY)

    def prefix_cache(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> PrefixCache | None:
        """A cache for decoding these prompts with the active role; None if the model cannot use one."""
        return open_prefix_cache(self.forward, prompts, max_tokens)

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
        """Removes every adapter, which leaves the base as it was before. Safe to call twice."""
        if self._routing is not None:
            self._routing.close()
        self.tuner.unload()

    # -- which experts tokens go to ------------------------------------------------------------------------------------
    @property
    def routing(self) -> Routing:
        """The choices of the base's routers, which are none without experts."""
        assert self._routing is not None, "the roles are complete"
        return self._routing

    @contextmanager
    def replaying(self, micro: Batch, layout: Layout | None) -> Iterator[None]:
        """Inside, passes over these rows send tokens to `micro.experts`, unless `snapshot.routing` leaves them free."""
        if self.snapshot.routing is RoutingSource.free or micro.experts is None:
            yield
            return
        assert layout is not None, "the trainer lays out its rows before their passes"
        with self.routing.imposing(*self.forward.experts_by_token(micro, layout)):
            yield

    def _replaying_as(self, role: str | None, micro: Batch, layout: Layout | None) -> AbstractContextManager[None]:
        """`replaying` for the policy and the old one; other roles choose experts themselves."""
        return self.replaying(micro, layout) if role in (POLICY, OLD) else nullcontext()

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
        self.critic = Critic(role, self.heads[CRITIC], config.normalize_values)
        if path is not None and (returns := read_record(path, "critic.init").get("returns")) is not None:
            self.critic.restore_statistics(returns)
            self.critic.forget_statistics()

    def _add_head(self, role: str, path: str | None, key: str) -> None:
        size = self.backbone.model.config.get_text_config().hidden_size
        head = self.heads[role] = ScalarHead(size, self.backbone.device, self.backbone.model.dtype)
        self._scale_gradients_of(head.parameters())
        if path is not None:
            head.restore(load_head(path, key))

    def _scale_gradients_of(self, parameters: Iterable[Parameter]) -> None:
        """Takes back from the gradients of these what `Forward` multiplies those of a float16 network with."""
        if self.backbone.model.dtype == torch.float16:
            for parameter in parameters:
                scale_down(parameter)

    def _add_adapter(self, role: str, config: LoraConfig) -> None:
        with as_configured():
            self.model.add_adapter(role, config)

    def _activate(self, role: str) -> None:
        self.tuner.set_adapter(role, inference_mode=role not in self._learning)

    def load_role(self, role: str, path: str, key: str, *, frozen: bool = False) -> None:
        """Copies this folder's adapter to the role; a frozen role gets one with the folder's rank, scale and targets.

        Raises:
            UserError: the adapter has other tensors than the role, where PEFT would skip what is missing, or loading it
                has changed the base.
        """
        with self._base_kept(role, path, key):
            weights = load_adapter(path, key)
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
                raise UserError(
                    key,
                    f"{len(wrong)} of its tensors do not fit {settings}, e.g. {wrong[0]}: "
                    f"{_shape(weights, wrong[0])} there, {_shape(initial, wrong[0])} here",
                    got=path,
                    remedy="save it again with PEFT" if frozen else "set both as in its adapter_config.json",
                )
            self.restore_role(role, weights)

    @contextmanager
    def _base_kept(self, role: str, path: str, key: str) -> Iterator[None]:
        """Checks that what is done inside, with this folder's adapter, leaves every weight of the base as it is."""
        before = self._base.fingerprint()
        yield
        after = self._base.fingerprint()
        if changed := [name for name, value in after.items() if value != before[name]]:
            load_backbone.cache_clear()  # another job of a sweep must not get this base
            number = counted(len(changed), "weight")
            raise UserError(
                key,
                f"loading it as the {role} has changed {number} of the base, e.g. {changed[0]}",
                got=path,
                remedy="merge it into the base that it was trained on, and set model.path to the result",
            )


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
    snapshot = SnapshotConfig(reference=reference, refresh_every=0, ema_decay=None, old=Old.auto)
    critic = CriticConfig(kind=CriticKind.none, init="base", lr=1.0, warmup_steps=0, normalize_values=False)
    return Roles(backbone, lora, snapshot, critic, temperature=temperature, token_budget=token_budget, seed=seed)
