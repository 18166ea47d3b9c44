"""What a rank other than the run's own process does: it holds the same base and roles, and does its lanes' part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rlft.algorithm.protocol import Algorithm
from rlft.config.schema import RunConfig
from rlft.loop.base_loading import layers_of_rank, load_for_training, load_teacher
from rlft.loop.session import critic_source, update_settings
from rlft.loop.shell import deterministic_on_cpu
from rlft.model.backbone import resolve_device
from rlft.model.roles import Roles
from rlft.system.memory import keep_blocks
from rlft.trainer.lane_update import UpdateRecord
from rlft.trainer.local import LocalTrainer, open_optimizers
from rlft.trainer.protocol import TrainerState
from rlft.trainer.ranks import Exchange, Meeting, Share
from rlft.types import Batch


@contextmanager
def opened_trainer(
    config: RunConfig, *, needs_old: bool, teacher_top_k: int = 0, rank: int = 0
) -> Iterator[LocalTrainer]:
    """The trainer of this config on a base and roles of its own, without pretraining text and learned rewards."""
    base = layers_of_rank(config.cluster, rank)
    teacher = load_teacher(config.snapshot, config.model)  # before the base, as in a session
    backbone = load_for_training(config.model, config.lora, config.token_budget, sharded=base)
    roles = Roles(
        backbone,
        config.lora,
        config.snapshot,
        replace(config.critic, init=critic_source(config)),
        temperature=config.generation.temperature,
        token_budget=config.token_budget,
        seed=config.seed,
        teacher=teacher,
    )
    if base is not None and rank > 0:
        base.drop_copies()
    try:
        optimizers = open_optimizers(roles, config.trainer, config.critic.lr)
        settings = update_settings(config)
        yield LocalTrainer(roles, optimizers, settings, needs_old=needs_old, teacher_top_k=teacher_top_k, base=base)
    finally:
        roles.close()


class RankWorker:
    """The object of a member that is a rank; `RankedTrainer` calls its methods.

    Args:
        config: of the run.
        needs_old, teacher_top_k: as in `LocalTrainer`.
        rank: from 1; the run's own process is rank 0.
        lanes: of the run.
    """

    def __init__(self, *, config: RunConfig, needs_old: bool, teacher_top_k: int = 0, rank: int, lanes: int) -> None:
        self._rank, self._lanes = rank, lanes
        self._stack = ExitStack()
        self._stack.enter_context(deterministic_on_cpu(resolve_device(config.model.device)))
        keep_blocks(config.token_budget)
        opened = opened_trainer(config, needs_old=needs_old, teacher_top_k=teacher_top_k, rank=rank)
        self._trainer = self._stack.enter_context(opened)
        self._exchange: Exchange | None = None

    def ready(self) -> None:
        """Answers when the base is loaded."""

    def join(self, meeting: Meeting, state: TrainerState) -> None:
        """Meets the other ranks, and takes over what rank 0 has."""
        self._leave()
        self._exchange = Exchange(meeting, self._rank, self._trainer.roles.backbone.device)
        self._trainer.share = Share(lanes=self._lanes, rank=self._rank, ranks=meeting.ranks, exchange=self._exchange)
        self._trainer.restore(state)

    def annotate(self, batch: Batch, inert_B: Tensor) -> dict[str, Tensor]:
        """{field: `[N, T]`} of the rows of this rank's lanes, lane after lane."""
        rows_of, share = self._trainer.rows_of_lanes(batch, inert_B), self._trainer.share
        assert share is not None, "it has joined"
        rows = torch.cat([rows_of[lane] for lane in share.mine])
        with self._together():
            return {name: values[rows] for name, values in self._trainer.annotations(batch, inert_B).items()}

    def update(
        self, algorithm: Algorithm, batch: Batch, inert_B: Tensor, step: int, texts: list[Batch]
    ) -> list[UpdateRecord]:
        """This rank's part of all updates of a step. texts: of each update, where the algorithm needs text."""
        with self._together():
            return self._trainer.update_lanes(algorithm, batch, inert_B, step, GivenText(texts))

    def refresh(self, step: int) -> None:
        """Moves the snapshots that are due after `step` steps."""
        self._trainer.roles.refresh(step)

    def rehearse(self, algorithm: Algorithm, micro: Batch) -> None:
        with self._together():
            self._trainer.rehearse(algorithm, micro)

    def digest(self) -> str:
        return self._trainer.digest()

    def close(self) -> None:
        self._leave()
        self._stack.close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, ranks exchange something; one that fails leaves, so that no other waits for it."""
        try:
            yield
        except Exception:
            self._leave()
            raise

    def _leave(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()


class GivenText:
    """The texts of a step's updates, which rank 0 has drawn."""

    def __init__(self, texts: list[Batch]) -> None:
        self._texts = texts

    def batch(self, seed: int, step: int, update: int) -> Batch:
        return self._texts[update]
