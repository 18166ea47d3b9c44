"""The networks of a run by their roles: policy, old, reference, teacher and critic, whatever they are made of.

The algorithm never sees networks, only the tensors that they produce: `annotate` makes those without grad, `outputs`
and `values` those with grad. `Roles` has an adapter for each role on one frozen base, `WholeModel` the base's own
weights as the policy and frozen copies of them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rlft.batch import score_sequences
from rlft.config.model import CriticConfig, CriticKind, Old, RoutingSource, SnapshotConfig
from rlft.model.adapter_folder import HEAD, OLD, POLICY, REFERENCE, TEACHER, load_tensors, read_record
from rlft.model.backbone import Backbone, Switched, decoder_layers, set_training_mode, switched_modules
from rlft.model.critic import CRITIC, Critic, ScalarHead
from rlft.model.experts import Routing
from rlft.model.forward import Forward, choose, open_prefix_cache, scale_down
from rlft.model.kernels.lm_head import Anchor
from rlft.model.kernels.prefix_cache import PrefixCache
from rlft.model.packing import Layout
from rlft.model.teacher import Part, teacher_logprobs, teacher_logprobs_by_engine
from rlft.system.device import copy_each
from rlft.types import Adapter, Batch, ImageRows, Outputs, Prompt, UserError

NO_SNAPSHOTS = SnapshotConfig(reference="none", refresh_every=0, ema_decay=None, old=Old.auto)
NO_CRITIC = CriticConfig(kind=CriticKind.none, init="base", lr=1.0, warmup_steps=0, normalize_values=False)


Kept = tuple[dict[str, dict[str, Tensor]], dict[str, Callable[[Path], None]]]
"""({role: {PEFT name: copy of the tensor}}; of whole models, which are not copied, {name: what writes this folder})."""


class Networks(ABC):
    """The roles of a run. `critic` is where values come from, or None; `heads` is {role: scalar head}."""

    model: Any
    is_whole: ClassVar[bool] = False
    """Whether the model's own weights are the policy, of which nothing is copied that could be left out."""

    def __init__(
        self,
        backbone: Backbone,
        snapshot: SnapshotConfig,  # chooses reference, old policy and teacher
        *,
        temperature: float,  # temperature at which log-probs are taken
        token_budget: int,  # the most tokens in a forward
        # The forward of a teacher that is a separate model, or the engine that computes it; otherwise None.
        teacher: Any,
    ) -> None:
        self.backbone, self.snapshot = backbone, snapshot
        self.temperature, self.token_budget = temperature, token_budget
        self.forward: Forward = choose(backbone.model, backbone.kernels)
        self.heads: dict[str, ScalarHead] = {}
        self.critic: Critic | None = None
        self._teacher = teacher if isinstance(teacher, Forward) else None
        self._teacher_engine = None if isinstance(teacher, Forward) else teacher
        self._learning = {POLICY}
        self._routing: Routing | None = None

    # -- what networks are made of -------------------------------------------------------------------------------------
    @abstractmethod
    def network_parameters(self, role: str) -> list[tuple[str, Parameter]]:
        """The parameters of the role's own network by the model's names, in a fixed order; none if it has none."""

    def named_parameters(self, role: str = POLICY) -> list[tuple[str, Parameter]]:
        """The role's trainable parameters in a fixed order: its network's own, if it has any, and its head's."""
        head = self.heads[role].named_parameters() if role in self.heads else ()
        return [*self.network_parameters(role), *((f"{role}.head.{name}", parameter) for name, parameter in head)]

    @abstractmethod
    def tensors(self, role: str) -> dict[str, Tensor]:
        """{name, the same in every role: tensor} of the role's network; writing into them changes it."""

    @abstractmethod
    def using(self, role: str | None) -> AbstractContextManager[Any]:
        """The model as this role (None: the bare base). Only for passes without gradient."""

    def has(self, role: str | None) -> bool:
        """Whether the network of this role is held; that of the bare base (None) is on a base that does not learn."""
        return True

    @abstractmethod
    def learning(self, role: str) -> AbstractContextManager[None]:
        """Inside, forwards with grad are this role's. The backward must happen inside, too."""

    @abstractmethod
    def kept(self, roles: Sequence[str]) -> Kept:
        """What a checkpoint keeps of these roles."""

    @abstractmethod
    def adapter_config(self) -> dict[str, Any]:
        """The fields of adapter_config.json, the same for every role that rlft makes; empty without adapters."""

    @abstractmethod
    def restore_roles(
        self, roles: Sequence[str], adapters: Mapping[str, Mapping[str, Tensor]], folder: Path | None
    ) -> None:
        """Sets these roles to what `kept` gave: {role: {PEFT name: tensor}}, and the checkpoint's folder."""

    @abstractmethod
    def publish(self, version: int) -> Adapter:
        """The policy as it is now, for an engine."""

    @abstractmethod
    def load_sampler(self, adapter: Adapter, *, weights: str = "apart") -> None:
        """Makes a published version what an engine on this base samples from."""

    @abstractmethod
    def sampler_tensors(self) -> tuple[dict[str, Tensor] | None, list[str]]:
        """(what such an engine holds, None if those are the policy's own tensors; names of outdated ones)."""

    def share_merged_weights(self) -> None:  # noqa: B027 (only adapters have sums)
        """Lets the policy learn with the sampler's sums of base and adapter, where there are any."""

    def close(self) -> None:
        """Leaves the base as it was before, as far as it has not learned. Safe to call twice."""
        if self._routing is not None:
            self._routing.close()

    # -- what checkpoints keep ---------------------------------------------------------------------------------------
    @property
    def critic_adapter(self) -> str | None:
        """The critic's own adapter; None if it has none, or there is no critic."""
        return CRITIC if self.critic is not None and self.critic.role == CRITIC else None

    @property
    def reference_role(self) -> str | None:
        """The role of the reference; None: the bare base, also if there is no reference."""
        return None if self.snapshot.reference in ("none", "base") else REFERENCE

    @property
    def changing(self) -> tuple[str, ...]:
        """Roles whose networks change during a run."""
        roles = [POLICY]
        if self.snapshot.reference in ("copy", "ema"):
            roles.append(REFERENCE)
        if self.snapshot.old is Old.copy:
            roles.append(OLD)
        return (*roles, *sorted(self._learning - {POLICY}))

    @property
    def moving(self) -> tuple[str, ...]:
        """Those of them that every checkpoint includes."""
        return self.changing

    @property
    def learning_roles(self) -> tuple[str, ...]:
        """Roles with parameters that are trained in this run."""
        shared = self.critic is not None and self.critic_adapter is None
        return (*sorted(self._learning, key=lambda role: (role != POLICY, role)), *([CRITIC] if shared else []))

    def restore(
        self,
        adapters: Mapping[str, Mapping[str, Tensor]],
        heads: Mapping[str, Mapping[str, Tensor]] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Sets every moving role to what a checkpoint held, and heads to {role: {name: tensor}}."""
        self.restore_roles(self.moving, adapters, folder)
        for role, weights in (heads or {}).items():
            if role in self.heads:
                self.heads[role].load_state_dict(weights)

    # -- passes with gradient ----------------------------------------------------------------------------------------
    def outputs(
        self,
        batch: Batch,
        entropy: bool,
        layout: Layout | None = None,
        *,
        top_k: bool = False,
        anchor: Anchor | None = None,
    ) -> Outputs:
        """The current policy on these rows, with grad (`Forward`); with values if the critic reads its features."""
        critic = self.critic
        if critic is None or critic.role != POLICY:
            return self.forward(batch, self.temperature, entropy, layout=layout, top_k=top_k, anchor=anchor)
        outputs = self.forward(batch, self.temperature, entropy, critic.head, layout, top_k, anchor)
        assert outputs.values is not None, "the forward was given a head"
        return replace(outputs, values=critic.values(outputs.values, batch.loss_mask))

    def values(self, batch: Batch, layout: Layout | None = None) -> Tensor:
        """The critic's values `[B, T]` for these rows in units of reward, with the active adapter."""
        assert self.critic is not None, "plan/roles.py refuses algorithms that need values without a critic"
        return self.critic.values(self.forward.values(batch, self.critic.head, layout), batch.loss_mask)

    def anchor(self, batch: Batch, layout: Layout | None, *, old: bool = False) -> Anchor:
        """The reference on these rows, without gradient or dropout, for KL(policy || reference); with `old` the old
        policy, which has a network of its own, for KL(old || policy).
        """
        in_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        replay = self.replaying(batch, layout) if old else nullcontext()
        with torch.no_grad(), self.using(OLD if old else self.reference_role), replay:
            anchor = self.forward.anchor(batch, self.temperature, layout)
        for module in in_training:
            module.training = True
        return anchor._replace(is_first=old)

    @contextmanager
    def training(self, *, dropout: bool = True) -> Iterator[None]:
        """Inside, the model is in the mode of updates, with LoRA dropout unless `dropout` is False."""
        set_training_mode(self.switched, recomputed=True, dropout=dropout)
        try:
            yield
        finally:
            set_training_mode(self.switched, recomputed=False, dropout=False)

    @functools.cached_property
    def switched(self) -> Switched:
        """The modules that `training` switches; a role that brings new ones has them sought again."""
        return switched_modules(self.model)

    def check_gradients(self, role: str = POLICY) -> None:
        """Checks that every parameter of the role has a gradient, after a backward (see the module's docstring)."""
        missing = [name for name, p in self.named_parameters(role) if p.grad is None]
        assert not missing, f"no gradient reached {len(missing)} parameters of {role}, e.g. {missing[0]}"

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
            policy = self.tensors(POLICY)
            for name, tensor in self.tensors(REFERENCE).items():
                tensor.copy_(decay * tensor + (1 - decay) * policy[name])
            due.append(REFERENCE)
        if self.snapshot.old is Old.copy:
            self.copy(POLICY, OLD)
            due.append(OLD)
        return tuple(due)

    def copy(self, source: str, target: str) -> None:
        """Copies source's network exactly to target's; they share no tensors."""
        own, found = self.tensors(target), self.tensors(source)
        copy_each(list(own.values()), [found[name] for name in own])

    # -- passes without gradient -------------------------------------------------------------------------------------
    def annotate(self, batch: Batch, zero_gradient_B: Tensor, **asked: Any) -> Batch:
        """Adds old, reference and teacher log-probs and old values as far as needed, with one pass for each role.

        Args:
            zero_gradient_B: bool `[B]`, rows that teach nothing; they are not forwarded and stay 0.
            asked: the further arguments of `annotations`.
        """
        parts = self.forward.micro_batches(batch, (~zero_gradient_B).nonzero()[:, 0], self.token_budget)
        fields = self.annotations(batch, parts, **asked)
        return replace(batch, **fields) if fields else batch

    def annotations(
        self,
        batch: Batch,
        micro_batches: Sequence[Tensor],
        *,
        needs_old: bool,
        teacher_top_k: int = 0,
        reference_field: str | None = "reference_logprobs",
    ) -> dict[str, Tensor]:
        """The fields that `annotate` adds, {field: `[B, T, ..]`}, for these micro-batches (int64 indices of rows).

        Args:
            needs_old: whether `snapshot.old: auto` has to recompute old log-probs; otherwise the loss takes those of
                the current policy, detached, at no cost.
            teacher_top_k: number of the teacher's most likely tokens whose log-probs are added, too.
            reference_field: what is added of the reference, if there is one; None: nothing.
        """
        results: dict[str, Tensor] = {}
        fields_by_role: dict[str | None, set[str]] = defaultdict(set)
        old, reference = self.snapshot.old, self.snapshot.reference
        if old is Old.sampled:
            results["old_logprobs"] = batch.sampled_logprobs
        elif old is Old.copy:
            fields_by_role[OLD].add("old_logprobs")
        elif old is Old.recompute or needs_old:
            fields_by_role[POLICY].add("old_logprobs")
        olds = OLD if old is Old.copy else POLICY
        is_compared = (
            self.snapshot.routing is RoutingSource.free and self.routing.sizes_known and olds in fields_by_role
        )
        if self.snapshot.routing is RoutingSource.old or is_compared:
            fields_by_role[olds].add("experts")
        if reference != "none" and reference_field is not None:
            fields_by_role[olds if reference_field == "reference_kl" else self.reference_role].add(reference_field)
        if self.critic is not None:
            fields_by_role[self.critic.role].add("old_values")
        engine, has_teacher = self._teacher_engine, self.snapshot.teacher != "none"
        parts: list[Part] = []
        if fields_by_role or (has_teacher and engine is None):  # packed once for the passes of all roles
            micros = self.forward.placed([batch.select(rows) for rows in micro_batches])
            parts = list(zip(micro_batches, micros, strict=True))
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
        self, batch: Batch, parts: Iterable[Part], role: str | None, fields: set[str]
    ) -> dict[str, Tensor]:
        """{field: float32 `[B, T]` on the batch's device} of log-probs and values by this role, without dropout.

        `experts` are those of the same pass, as in Batch. The passes of the policy and of the old one are replays of
        what the engine chose, if `snapshot.routing` says so.
        """
        result = {field: torch.zeros_like(batch.sampled_logprobs) for field in fields - {"experts"}}
        if "experts" in fields:
            result["experts"] = self.routing.unknown(batch.token_ids.shape)
        with torch.no_grad(), self.using(role):
            for rows, micro_batch in parts:
                micro, layout = micro_batch.batch, micro_batch.layout
                anchor = self.anchor(micro, layout) if "reference_kl" in fields else None
                routing: AbstractContextManager[Any] = nullcontext()
                if "experts" in fields:
                    routing = self.routing.noting()
                elif role in (POLICY, OLD):  # other roles choose experts themselves
                    routing = self.replaying(micro, layout)
                with routing as noted:
                    if fields == {"old_values"}:
                        outputs = Outputs(logprobs=micro.sampled_logprobs, values=self.values(micro, layout))
                    elif "old_values" in fields:
                        outputs = self.outputs(micro, entropy=False, layout=layout, anchor=anchor)
                    else:
                        outputs = self.forward(micro, self.temperature, layout=layout, anchor=anchor)
                    if noted is not None:
                        result["experts"][rows] = self.forward.experts_by_row(noted(), micro, layout).cpu()
                for field in fields - {"experts"}:
                    others = {"old_values": outputs.values, "reference_kl": outputs.kl}
                    computed = others.get(field, outputs.logprobs)
                    assert computed is not None, "the pass computes what is requested"
                    result[field][rows] = computed.to(result[field])
        return result

    def logprobs(self, batch: Batch, role: str | None) -> Tensor:
        """float32 `[B, T]` of every row by this role (None: the bare base), without gradient or dropout."""
        parts = self.forward.parts(batch, self.token_budget)
        return self._without_gradient(batch, parts, role, {"logprobs"})["logprobs"]

    def score(self, sequences: list[list[int]], *, rounded: bool = False) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first by the current policy: the freshness check.

        `rounded`: with one more rounding in each layer.
        """
        with torch.no_grad(), rounded_once_more(self.backbone.model) if rounded else nullcontext():
            return score_sequences(self.model, sequences, self.backbone.device)

    def images_of(self, prompts: Sequence[Prompt]) -> ImageRows | None:
        """What the base reads in place of the images of these prompts; None if they have none."""
        return self.backbone.image_rows(prompts, max(len(prompt.token_ids) for prompt in prompts))

    def prefix_cache(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, images: ImageRows | None = None
    ) -> PrefixCache | None:
        """A cache for decoding these prompts with the active role; None if the model cannot use one."""
        return open_prefix_cache(self.forward, prompts, max_tokens, images)

    # -- which experts tokens go to ------------------------------------------------------------------------------------
    @property
    def routing(self) -> Routing:
        """The choices of the base's routers, which are none without experts."""
        assert self._routing is not None, "the roles are complete"
        return self._routing

    @contextmanager
    def replaying(self, micro: Batch, layout: Layout | None) -> Iterator[None]:
        """Inside, passes over these rows send tokens to `micro.experts`, unless `snapshot.routing` leaves them free:
        then metrics compare with these.
        """
        if micro.experts is None:
            yield
            return
        assert layout is not None, "the trainer lays out its rows before their passes"
        is_free = self.snapshot.routing is RoutingSource.free
        using = self.routing.comparing if is_free else self.routing.imposing
        with using(*self.forward.experts_by_token(micro, layout)):
            yield

    def _open_routing(self, routing: Routing) -> None:
        """Takes the model's routing, made once its modules are in their places. UserError: it cannot be imposed."""
        self._routing = routing
        source = self.snapshot.routing
        if source is RoutingSource.free:
            if routing.layers:
                with suppress(KeyError, RuntimeError):  # layers that a pass leaves out, or of other numbers of experts
                    routing.learn_sizes()
        elif (problem := routing.check()) is not None:
            remedy = "set it to free, or use another model"
            raise UserError("snapshot.routing", problem, got=source, remedy=remedy)

    # -- heads ---------------------------------------------------------------------------------------------------------
    def _set_critic(self, role: str, path: str | None, *, normalize: bool) -> None:
        """The critic that reads this role's features, with the statistics that the folder of its head has recorded."""
        self.critic = Critic(role, self.heads[CRITIC], normalize)
        if path is not None and (returns := read_record(path, "critic.init").get("returns")) is not None:
            self.critic.restore_statistics(returns)
            self.critic.forget_statistics()

    def _add_head(self, role: str, path: str | None, key: str) -> None:
        size = self.backbone.model.config.get_text_config().hidden_size
        head = self.heads[role] = ScalarHead(size, self.backbone.device, self.backbone.model.dtype)
        self._scale_gradients_of(head.parameters())
        if path is not None:
            head.load_state_dict(load_tensors(path, key, HEAD))

    def _scale_gradients_of(self, parameters: Iterable[Parameter]) -> None:
        """Takes back from the gradients of these what `Forward` multiplies those of a float16 network with."""
        if self.backbone.model.dtype == torch.float16:
            for parameter in parameters:
                scale_down(parameter)


# -- roundings to 16 bits ----------------------------------------------------------------------------------------------
@contextmanager
def rounded_once_more(model: nn.Module) -> Iterator[None]:
    """Inside, the output of each decoder layer is off by up to half a unit in the last place, as after a rounding.

    Two programs that compute a model in 16 bits add up in other orders and round at other places. What becomes of that
    depends on the model: in bfloat16 from 0.01 to 0.1 nats of a log-prob. A model in float32 has the errors of
    bfloat16, to which such an engine rounds. The errors are the same each time; there are none in a model whose layers
    are not a single list (`decoder_layers`).
    """

    def off(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return off(module, args, output[0]), *output[1:]
        states: Tensor = output
        drawn = torch.rand(states.shape, generator=dice, dtype=torch.float32)
        dtype = torch.float16 if states.dtype == torch.float16 else torch.bfloat16
        errors = torch.finfo(dtype).eps * (drawn.to(states.device) - 0.5)
        return (states.float() * (1 + errors)).to(states.dtype)

    dice = torch.Generator().manual_seed(0)
    with ExitStack() as hooks:
        for layer in decoder_layers(model):
            hooks.callback(layer.register_forward_hook(off).remove)
        yield
