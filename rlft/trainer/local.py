"""The trainer in this process: adapters in roles on the one base, or its own weights, and their optimizers.

Arguments and results are batches, numbers and tensors on the CPU, so that several processes can share the work
(`ranked_trainer.py`). The loop's other interface is `Generator`. The passes of a step are divided into
lanes, one or several, which several ranks can share. Each of several lanes has a gradient of its own, and each of its
passes dropout of its own, so that no bit depends on who computes it: every rank adds up all lanes in their order, and
takes the same optimizer step as the others. Where ranks share the tokens of each pass (`rlft.model.sequence`), a lane
has a gradient on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.config.schema import RunConfig
from rlft.config.trainer import TrainerConfig
from rlft.model.adapter_folder import POLICY
from rlft.model.critic import CRITIC
from rlft.model.networks import Networks
from rlft.model.sequence import sharing_tokens
from rlft.system.device import fork_rng
from rlft.system.files import digest_of_json, digest_of_tensors
from rlft.system.seeds import derive
from rlft.trainer import sharded_base, update as updates
from rlft.trainer.optimizer import Optimizer, begin_step, optimizer_step
from rlft.trainer.ranks import LaneShare, Shapes, sent, take_over
from rlft.trainer.reward_training import RewardRefresh
from rlft.trainer.sharded_base import ShardedLayers
from rlft.trainer.update import LaneGradients, divide
from rlft.types import Batch, LossScale, Rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Copies of all that changes in a trainer, for checkpoints."""

    adapters: Mapping[str, Mapping[str, Tensor]]  # {role: {PEFT name: tensor}}
    optimizer: Mapping[str, Tensor]  # moments by parameter name, and the learned reward's pairs of tokens
    heads: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # {role: {name: tensor}} of scalar heads
    critic: Mapping[str, Any] | None = None  # the statistics that normalise the critic's values; None without a critic
    # {name: function that writes the folder of this name}, for whole models, whose weights are not copied.
    folders: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    folder: Path | None = None  # the checkpoint that the state was read from; None if it was not read


@dataclass(eq=False)
class LocalTrainer:
    """Trains in this process. Minibatches and dropout derive from (seed, step)."""

    roles: Networks  # the adapters; whoever opened them closes them
    optimizers: Mapping[str, Optimizer]  # {role: optimizer} for every role that the algorithm trains
    config: RunConfig
    _: KW_ONLY
    needs_old: bool  # whether `snapshot.old: auto` has to recompute the old policy's log-probs
    teacher_top_k: int = 0  # number of the teacher's most likely tokens whose log-probs are computed
    reference_field: str | None = "reference_logprobs"  # what is computed of the reference before the updates
    text: Callable[[int, int, int], Batch] | None = None  # (seed, step, update) -> pretraining text, if it is needed
    reward_training: RewardRefresh | None = None  # of the learned reward between steps; None if it is not trained
    base: ShardedLayers | None = None  # its layers, if ranks that share the lanes also divide it; None: it is whole
    # Judges, before the first update of a step, whether its policy is the one that has sampled these rows: called with
    # the distances `[n]`, in nats, of their log-probs, or None if no pass was over them, and the number of finished
    # steps. All lanes must be this process's.
    check_samples: Callable[[Batch, Tensor | None, int], None] | None = None

    def __post_init__(self) -> None:
        self.share = LaneShare()

    # -- lanes ---------------------------------------------------------------------------------------------------------
    @property
    def share(self) -> LaneShare:
        """The lanes of this process. Ranks that train all weights divide the moments as well."""
        return self._share

    @share.setter
    def share(self, share: LaneShare) -> None:
        self._share = share
        if self.roles.is_whole:
            for optimizer in self.optimizers.values():
                optimizer.divide(share)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Inside, this process does its part of passes in which all ranks take part."""
        with sharded_base.passes(self.base, self.share.exchange), sharing_tokens(self.share.tokens):
            yield

    def rows_of_lanes(self, batch: Batch, zero_gradient_B: Tensor) -> tuple[Tensor, ...]:
        """Indices of the rows that each lane annotates."""
        return self._divide(batch, (~zero_gradient_B).nonzero()[:, 0])[0]

    def _divide(self, batch: Batch, rows: Tensor) -> tuple[tuple[Tensor, ...], list[float]]:
        return divide(batch, rows, self.share.lanes, shared_prompts=self.roles.forward.packed)

    def _seed_pass(self, step: int, purpose: str) -> None:
        """Seeds dropout again where a step has several parts; with one it is seeded once, as the step begins."""
        share = self.share
        if share.parts > 1:
            place = f" {share.rank % share.sequence}" * (share.sequence > 1)
            torch.manual_seed(derive(self.config.seed, step, purpose + place))

    # -- the stages of a step ------------------------------------------------------------------------------------------
    def annotate(self, batch: Batch, zero_gradient_B: Tensor) -> Batch:
        """The batch with the log-probs of old policy, reference and teacher and the old values that are needed.

        Rows that teach nothing, bool `[B]`, are not forwarded.
        """
        return replace(batch, **self.annotations(batch, zero_gradient_B))

    def annotations(self, batch: Batch, zero_gradient_B: Tensor) -> dict[str, Tensor]:
        """{field: float32 `[B, T]`} with values in the rows of this process's lanes, and 0 in the others."""
        roles, rows_of = self.roles, self.rows_of_lanes(batch, zero_gradient_B)
        parts = [
            part
            for lane in self.share.mine
            for part in roles.forward.micro_batches(batch, rows_of[lane], roles.token_budget)
        ]
        with self.passes():
            asked = {"teacher_top_k": self.teacher_top_k, "reference_field": self.reference_field}
            return roles.annotations(batch, parts, needs_old=self.needs_old, **asked)

    def update(self, algorithm: Objective, batch: Batch, zero_gradient_B: Tensor, step: int) -> dict[str, float]:
        """All updates of the step that follows `step` finished steps; returns their mean metrics."""
        return updates.step_metrics([self.update_lanes(algorithm, batch, zero_gradient_B, step)])

    def update_lanes(
        self, algorithm: Objective, batch: Batch, zero_gradient_B: Tensor, step: int
    ) -> list[updates.UpdateRecord]:
        """Does all updates of the step, with the passes of this process's lanes.

        Raises RanksError: another rank is gone or late; the gradients are cleared.
        """
        roles, config, optimizers = self.roles, self.config, self.optimizers.values()
        begin_step(optimizers, config.seed, step)
        if roles.critic is not None and batch.returns is not None:
            roles.critic.observe(batch.returns, batch.loss_mask)
        gradients = LaneGradients([p for optimizer in optimizers for p in optimizer.parameters], self.share)
        order, records = derive(config.seed, step, "minibatches"), []
        try:
            with roles.training():
                for i, rows in enumerate(updates.minibatches(batch, config.epochs, config.minibatches, order)):
                    records.append(self._update(algorithm, batch, rows, zero_gradient_B, (step, i), gradients))
        finally:
            gradients.clear()
            self._seed_pass(step, "dropout")
        return records

    def _update(
        self,
        algorithm: Objective,
        batch: Batch,
        rows: Tensor,
        zero_gradient_B: Tensor,
        at: tuple[int, int],
        gradients: LaneGradients,
    ) -> updates.UpdateRecord:
        """The update on these rows (int64 `[N]`); at: (finished steps, number of this update in its step)."""
        (step, number), config, learns = at, self.config, self.policy_learns(at[0])
        live = rows[~zero_gradient_B[rows]]
        scale = updates.loss_scale(batch.select(rows), config.generation.max_tokens, self.roles)
        share = int(batch.loss_mask[live].sum()) / scale.num_tokens
        (rows_of, costs), text, rows_of_text = self._divide(batch, live), None, ()
        if algorithm.needs_text and learns:
            assert self.text is not None, "plan/roles.py refuses algorithms that need text without any"
            text = self.text(config.seed, step, number)
            rows_of_text, text_costs = self._divide(text, torch.arange(len(text.rewards)))
            costs = [sum(pair) for pair in zip(costs, text_costs, strict=True)]
        passes: dict[int, list[updates.PassRecord]] = {}
        gaps: list[tuple[Tensor, Tensor]] | None = None  # (distances, which of them are tokens) `[B, T]` of each pass
        if number == 0 and self.check_samples is not None:
            gaps = []
        with self.passes():
            for lane in (lane for lane in self.share.mine if costs[lane] > 0):
                passes[lane] = list(self._passes(algorithm, batch, rows_of[lane], scale, at, gaps))
                if text is not None and len(rows_of_text[lane]):
                    self._seed_pass(step, f"text dropout {number} {lane}")
                    passes[lane].append(self._text_pass(algorithm, text, rows_of_text[lane]))
                gradients.set_aside(lane)
        gradients.add_up([lane for lane, cost in enumerate(costs) if cost > 0])
        records = updates.records_of(passes, share)
        if gaps is not None and self.check_samples is not None:
            sampled = live if len(live) else (~zero_gradient_B).nonzero()[:, 0]
            gaps_M = torch.cat([gap_BT[mask_BT] for gap_BT, mask_BT in gaps]).cpu() if gaps else None
            if len(sampled):
                self.check_samples(batch.select(sampled), gaps_M, step)
        done, total = (steps * config.updates_per_step for steps in (step, config.steps))
        resting = () if learns else (POLICY,)
        numbers = optimizer_step(self.optimizers.values(), done + number, total, resting)
        return updates.UpdateRecord(passes=records, costs=costs, optimizers=numbers)

    def _passes(
        self,
        algorithm: Objective,
        batch: Batch,
        rows: Tensor,
        scale: LossScale,
        at: tuple[int, int],
        gaps: list[tuple[Tensor, Tensor]] | None,
    ) -> Iterator[updates.PassRecord]:
        (step, number), roles = at, self.roles
        for part, micro in roles.forward.parts(batch, roles.token_budget, rows):
            self._seed_pass(step, f"dropout {number} {int(part[0])}")
            metrics, logprobs = updates.backward(roles, algorithm, micro, scale, self.policy_learns(step))
            if gaps is not None:
                gaps.append(((logprobs - micro.batch.sampled_logprobs).abs(), micro.batch.loss_mask))
            yield updates.PassRecord(metrics=metrics, real=micro.real_tokens, network=micro.network_tokens)

    def _text_pass(self, algorithm: Objective, text: Batch, rows: Tensor) -> updates.PassRecord:
        """Forward and backward through these rows of an update's text; the loss is their part of the whole text's."""
        total = torch.zeros((), device=self.roles.backbone.device)
        for _, loss in updates.text_passes(self.roles, text, self.roles.token_budget, algorithm.text_loss, rows):
            total += loss
        return updates.PassRecord(metrics={"loss/text": total, "loss/total": total})

    def refresh(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        """After `step` steps, moves the snapshots that are due and trains the learned reward if that is due.

        `rollouts` are of the step that is just finished. Returns the metrics of that training.
        """
        self.roles.refresh(step)
        if self.reward_training is None:
            return {}
        self.reward_training.collect(step, rollouts.groups, rollouts.scores)
        with sharded_base.passes(self.base, None):  # other ranks have no learned reward
            return self.reward_training.train_if_due(step)

    def policy_learns(self, step: int) -> bool:
        """False in the first steps, in which only the critic learns."""
        return step >= self.config.critic.warmup_steps

    def rehearse(self, algorithm: Objective, micro: Batch) -> None:
        """Runs a teacher's pass, and forward and backward, of one micro-batch, and leaves no trace.

        Gradients are dropped, and no stream of random numbers moves on.
        """
        roles = self.roles
        if roles.snapshot.teacher != "none":  # no other role's pass takes more than the policy's own
            no_row = torch.zeros(len(micro.rewards), dtype=torch.bool)
            with self.passes():
                micro = roles.annotate(micro, no_row, needs_old=False, teacher_top_k=self.teacher_top_k)
        scale = updates.loss_scale(micro, self.config.generation.max_tokens, roles)
        with fork_rng(roles.backbone.device), roles.training(), self.passes():
            [placed] = roles.forward.placed([micro])
            updates.backward(roles, algorithm, placed, scale, policy_learns=True)
        for role in roles.learning_roles:
            for _, parameter in roles.named_parameters(role):
                parameter.grad = None

    def state(self, *, alone: bool = False) -> TrainerState:
        """All that changes; `alone`: without a proof that other ranks have come to the same."""
        roles = self.roles
        adapters, folders = roles.kept(roles.moving)
        return TrainerState(
            adapters=adapters,
            folders=folders,
            # A whole model is written as it is: nothing of it is copied.
            optimizer=self.moments(copies=not roles.is_whole)
            | ({} if self.reward_training is None else self.reward_training.state()),
            heads={role: head.weights() for role, head in roles.heads.items()},
            critic=self.critic_statistics(),
        )

    # -- what ranks have in common -------------------------------------------------------------------------------------
    def weights(self) -> dict[str, Tensor]:
        """{name: tensor} of all weights that change, which are equal on every rank; writing into them changes them.

        A learned reward's are left out, which rank 0 alone has.
        """
        roles, reward_role = self.roles, None if self.reward_training is None else self.reward_training.role
        tensors = {
            f"{role}/{n}": t for role in roles.changing if role != reward_role for n, t in roles.tensors(role).items()
        }
        if roles.critic is not None:
            head = roles.critic.head.named_parameters()
            tensors |= {f"{CRITIC}.head/{name}": parameter.detach() for name, parameter in head}
        return tensors

    def moments(self, *, copies: bool = False) -> dict[str, Tensor]:
        """{name: tensor} of the moments that this rank holds; `copies`: not the tensors that its optimizers have."""
        return {n: t for optimizer in self.optimizers.values() for n, t in optimizer.state(copies=copies).items()}

    def critic_statistics(self) -> Mapping[str, Any] | None:
        return None if self.roles.critic is None else self.roles.critic.state()

    def digest(self) -> str:
        """The sha256 of what must be equal on every rank."""
        moments = {} if self.roles.is_whole else self.moments()
        return digest_of_json([digest_of_tensors(self.weights() | moments), self.critic_statistics()])

    def join(
        self, shapes: Shapes, critic: Mapping[str, Any] | None, moments: Mapping[str, Tensor] | None = None
    ) -> None:
        """Gives the state of rank 0, which this is or joins, to every other rank. RanksError: a rank is gone or late.

        Args:
            shapes: of all moments, also those that other ranks than 0 will hold.
            critic: rank 0's `critic_statistics`.
            moments: on rank 0 all moments; on other ranks None.
        """
        exchange, rank = self.share.exchange, self.share.rank
        assert exchange is not None, "the ranks have met"
        take_over(exchange, rank, self.weights())
        kept = {}
        for name, tensor in sent(exchange, rank, shapes, moments or {}, self.roles.backbone.device):
            if rank > 0 and any(optimizer.holds(name) for optimizer in self.optimizers.values()):
                kept[name] = tensor
        if rank > 0:
            self._restore_optimizers(kept, critic)

    def gather(self, shapes: Sequence[Shapes]) -> dict[str, Tensor]:
        """On rank 0 {name: tensor in main memory} of the moments of all ranks, which have these shapes; else nothing.

        Raises RanksError: another rank is gone or late.
        """
        exchange, rank, own = self.share.exchange, self.share.rank, self.moments()
        assert exchange is not None, "the ranks have met"
        gathered = {}
        for root, of_root in enumerate(shapes):
            for name, tensor in sent(exchange, rank, of_root, own, self.roles.backbone.device, root):
                if rank == 0:
                    gathered[name] = tensor.cpu()
        return gathered

    def restore(self, state: TrainerState) -> None:
        """Continues from a state that `state` returned."""
        self.roles.restore(state.adapters, state.heads, state.folder)
        self._restore_optimizers(state.optimizer, state.critic)
        if self.reward_training is not None:
            self.reward_training.restore(state.optimizer)

    def _restore_optimizers(self, moments: Mapping[str, Tensor], critic: Mapping[str, Any] | None) -> None:
        for optimizer in self.optimizers.values():
            optimizer.reset()
            optimizer.restore(moments)
        if self.roles.critic is not None:
            assert critic is not None, "a run with a critic saves its statistics"
            self.roles.critic.restore_statistics(critic)


def open_optimizers(roles: Networks, config: TrainerConfig, critic_lr: float) -> dict[str, Optimizer]:
    """An optimizer for the policy, and one with a learning rate of its own for the critic, if there is one."""
    optimizers = {POLICY: Optimizer(roles.named_parameters(), config)}
    if roles.critic is not None:
        optimizers[CRITIC] = Optimizer(roles.named_parameters(CRITIC), replace(config, lr=critic_lr), CRITIC)
    return optimizers
