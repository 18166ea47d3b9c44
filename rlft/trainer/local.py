"""The trainer in this process: adapters in roles on the one base, and their optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.config.trainer import TrainerConfig
from rlft.model.critic import CRITIC
from rlft.model.roles import POLICY, Roles
from rlft.trainer import sharded_base
from rlft.trainer.lane_update import UpdateRecord, metrics_of, update_in_lanes
from rlft.trainer.lanes import divide
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.protocol import TrainerState
from rlft.trainer.ranks import Share
from rlft.trainer.reward_training import RewardRefresh
from rlft.trainer.sharded_base import ShardedLayers
from rlft.trainer.update import UpdateSettings, UpdateText, backward, loss_scale, policy_learns, update
from rlft.types import Adapter, Batch, Rollouts


class LocalTrainer:
    """A `Trainer`, whose protocol says what its methods do.

    Args:
        roles: the adapters; whoever opened them closes them.
        optimizers: {role: optimizer} for every role that the algorithm trains (`open_optimizers`).
        settings: how a batch is divided into updates.
        needs_old: whether `snapshot.old: auto` has to recompute the old policy's log-probs.
        teacher_top_k: number of the teacher's most likely tokens whose log-probs are computed; 0: none of them.
        text: pretraining text of each update, for algorithms that need it.
        reward_training: the training of the learned reward between steps; None if it is not trained.
        share: the lanes of this process, if passes are divided into lanes; None: they are not divided.
        base: the layers of the base, if the ranks that share the lanes also divide the base; None: it is whole.
    """

    def __init__(
        self,
        roles: Roles,
        optimizers: Mapping[str, Optimizer],
        settings: UpdateSettings,
        *,
        needs_old: bool,
        teacher_top_k: int = 0,
        text: UpdateText | None = None,
        reward_training: RewardRefresh | None = None,
        share: Share | None = None,
        base: ShardedLayers | None = None,
    ) -> None:
        self.roles, self.optimizers, self.settings = roles, optimizers, settings
        self.needs_old, self.teacher_top_k = needs_old, teacher_top_k
        self.text, self.reward_training = text, reward_training
        self.share, self.base = share, base

    def annotate(self, batch: Batch, zero_gradient_B: Tensor) -> Batch:
        if self.share is None:
            return self.roles.annotate(
                batch, zero_gradient_B, needs_old=self.needs_old, teacher_top_k=self.teacher_top_k
            )
        return replace(batch, **self.annotations(batch, zero_gradient_B))

    def annotations(self, batch: Batch, zero_gradient_B: Tensor) -> dict[str, Tensor]:
        """{field: float32 `[B, T]`} with values in the rows of this process's lanes, and 0 in the others."""
        assert self.share is not None, "only passes that are divided have lanes"
        roles, rows_of = self.roles, self.rows_of_lanes(batch, zero_gradient_B)
        parts = [
            part
            for lane in self.share.mine
            for part in roles.forward.micro_batches(batch, rows_of[lane], roles.token_budget)
        ]
        with self.passes():
            return roles.annotations(batch, parts, needs_old=self.needs_old, teacher_top_k=self.teacher_top_k)

    def passes(self) -> AbstractContextManager[None]:
        """Inside, this process does its part of passes in which all ranks take part."""
        return sharded_base.passes(self.base, None if self.share is None else self.share.exchange)

    def rows_of_lanes(self, batch: Batch, zero_gradient_B: Tensor) -> tuple[Tensor, ...]:
        """Indices of the rows that each lane annotates."""
        assert self.share is not None, "only passes that are divided have lanes"
        live = (~zero_gradient_B).nonzero()[:, 0]
        return divide(batch, live, self.share.lanes, shared_prompts=self.roles.forward.packed).rows

    def update(self, algorithm: Objective, batch: Batch, zero_gradient_B: Tensor, step: int) -> dict[str, float]:
        if self.share is None:
            return update(
                self.roles, self.optimizers, algorithm, batch, zero_gradient_B, step, self.settings, self.text
            )
        return metrics_of([self.update_lanes(algorithm, batch, zero_gradient_B, step, self.text)])

    def update_lanes(
        self, algorithm: Objective, batch: Batch, zero_gradient_B: Tensor, step: int, text: UpdateText | None
    ) -> list[UpdateRecord]:
        """Does all updates of the step, for the lanes of this process."""
        assert self.share is not None, "only passes that are divided have lanes"
        return update_in_lanes(
            self.roles,
            self.optimizers,
            algorithm,
            batch,
            zero_gradient_B,
            step,
            self.settings,
            text,
            self.share,
            self.base,
        )

    def publish(self, version: int) -> Adapter:
        return self.roles.publish(version)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        return self.roles.score(sequences)

    def engine_verified(self) -> None:
        if self.share is None:  # other ranks have no sampler's sums to use, and must get the same bits
            self.roles.lend_sums()

    def refresh(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        self.roles.refresh(step)
        if self.reward_training is None:
            return {}
        self.reward_training.collect(step, rollouts.groups, rollouts.scores)
        with sharded_base.passes(self.base, None):  # other ranks have no learned reward
            return self.reward_training.train_if_due(step)

    def policy_learns(self, step: int) -> bool:
        return policy_learns(self.roles, self.settings, step)

    def rehearse(self, algorithm: Objective, micro: Batch) -> None:
        roles = self.roles
        if roles.snapshot.teacher != "none":  # no other role's pass takes more than the policy's own
            none_zero = torch.zeros(len(micro.rewards), dtype=torch.bool)
            with self.passes():
                micro = roles.annotate(micro, none_zero, needs_old=False, teacher_top_k=self.teacher_top_k)
        scale = loss_scale(micro, self.settings.max_completion_tokens, roles)
        with torch.random.fork_rng(), roles.training(), self.passes():
            backward(roles, algorithm, roles.to_device(micro), scale, policy_learns=True)
        for role in roles.learning_roles:
            for _, parameter in roles.named_parameters(role):
                parameter.grad = None

    def state(self) -> TrainerState:
        roles = self.roles
        tensors = {name: t for optimizer in self.optimizers.values() for name, t in optimizer.state().items()}
        return TrainerState(
            adapters={role: roles.weights(role) for role in roles.moving},
            optimizer=tensors | ({} if self.reward_training is None else self.reward_training.state()),
            heads={role: head.weights() for role, head in roles.heads.items()},
            critic=None if roles.critic is None else roles.critic.state(),
        )

    def digest(self) -> str:
        """The sha256 of what must be equal on every rank: all that changes but the learned reward, which rank 0 has."""
        roles, reward_role = self.roles, None if self.reward_training is None else self.reward_training.role
        tensors = {
            f"{role}/{n}": t for role in roles.moving if role != reward_role for n, t in roles.weights(role).items()
        }
        if roles.critic is not None:
            tensors |= {f"{CRITIC}.head/{name}": tensor for name, tensor in roles.critic.head.weights().items()}
        for optimizer in self.optimizers.values():
            tensors |= optimizer.state()
        digest = hashlib.sha256(repr(None if roles.critic is None else roles.critic.state()).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def restore(self, state: TrainerState) -> None:
        self.roles.restore(state.adapters, state.heads)
        for optimizer in self.optimizers.values():
            optimizer.reset()
            optimizer.restore(state.optimizer)
        if self.roles.critic is not None:
            assert state.critic is not None, "a run with a critic saves its statistics"
            self.roles.critic.restore_statistics(state.critic)
        if self.reward_training is not None:
            self.reward_training.restore(state.optimizer)


def open_optimizers(roles: Roles, config: TrainerConfig, critic_lr: float) -> dict[str, Optimizer]:
    """An optimizer for the policy, and one with a learning rate of its own for the critic, if there is one."""
    optimizers = {POLICY: Optimizer(roles.named_parameters(), config)}
    if roles.critic is not None:
        optimizers[CRITIC] = Optimizer(roles.named_parameters(CRITIC), replace(config, lr=critic_lr), CRITIC)
    return optimizers
