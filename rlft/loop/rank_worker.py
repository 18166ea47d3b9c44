"""A rank in a process of its own: it holds the same base and roles, and computes its lanes' part of each pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.config.schema import RunConfig
from rlft.loop.base_loading import layers_of_rank, load_teacher
from rlft.loop.driver import deterministic_on_cpu
from rlft.loop.parts import open_roles, update_settings
from rlft.model.backbone import resolve_device
from rlft.system.memory import keep_blocks
from rlft.trainer.local import LocalTrainer, open_optimizers
from rlft.trainer.protocol import TrainerState
from rlft.trainer.ranks import Exchange, LaneShare, Rendezvous
from rlft.trainer.update import UpdateRecord
from rlft.types import Batch


@contextmanager
def opened_trainer(
    config: RunConfig, *, needs_old: bool, teacher_top_k: int = 0, rank: int = 0
) -> Iterator[LocalTrainer]:
    """The trainer of this config on a base and roles of its own, without pretraining text and learned rewards."""
    base = layers_of_rank(config.cluster, rank)
    teacher = load_teacher(config.snapshot, config.model)  # before the base, as in a session
    with open_roles(config, teacher, base=base) as roles:
        if base is not None and rank > 0:
            base.drop_copies()
        optimizers = open_optimizers(roles, config.trainer, config.critic.lr)
        settings = update_settings(config)
        yield LocalTrainer(roles, optimizers, settings, needs_old=needs_old, teacher_top_k=teacher_top_k, base=base)


class RankWorker:
    """The object of a member that is a rank; `RankedTrainer` calls its methods.

    Args:
        config: the run's config.
        needs_old: as in `LocalTrainer`.
        teacher_top_k: as in `LocalTrainer`.
        rank: the rank's number from 1 on; the run's own process is rank 0.
        lanes: number of lanes of the run.
    """

    def __init__(self, *, config: RunConfig, needs_old: bool, teacher_top_k: int = 0, rank: int, lanes: int) -> None:
        self._rank, self._lanes = rank, lanes
        self._stack = ExitStack()
        self._stack.enter_context(deterministic_on_cpu(resolve_device(config.model.device)))
        keep_blocks(config.token_budget)
        trainer = opened_trainer(config, needs_old=needs_old, teacher_top_k=teacher_top_k, rank=rank)
        self._trainer = self._stack.enter_context(trainer)
        self._exchange: Exchange | None = None

    def ready(self) -> None:
        """Returns once the base is loaded."""

    def join(self, rendezvous: Rendezvous, state: TrainerState) -> None:
        """Connects to the other ranks, and takes over rank 0's state."""
        self._leave()
        self._exchange = Exchange(rendezvous, self._rank, self._trainer.roles.backbone.device)
        self._trainer.share = LaneShare(
            lanes=self._lanes, rank=self._rank, ranks=rendezvous.ranks, exchange=self._exchange
        )
        self._trainer.restore(state)

    def annotate(self, batch: Batch, zero_gradient_B: Tensor) -> dict[str, Tensor]:
        """{field: values `[N, T]`} for the rows of this rank's lanes, one lane after the other."""
        rows_of_lane = self._trainer.rows_of_lanes(batch, zero_gradient_B)
        rows = torch.cat([rows_of_lane[lane] for lane in self._trainer.share.mine])
        with self._exchanging():
            return {name: values[rows] for name, values in self._trainer.annotations(batch, zero_gradient_B).items()}

    def update(
        self, algorithm: Objective, batch: Batch, zero_gradient_B: Tensor, step: int, texts: list[Batch]
    ) -> list[UpdateRecord]:
        """Computes this rank's part of all updates of a step.

        Args:
            algorithm: the algorithm.
            batch: the step's batch after credit.
            zero_gradient_B: bool `[B]`, rows that contribute nothing.
            step: number of finished steps.
            texts: the text of each update, where the algorithm needs pretraining text; else empty.
        """
        self._trainer.text = DrawnText(texts)
        with self._exchanging():
            return self._trainer.update_lanes(algorithm, batch, zero_gradient_B, step)

    def refresh(self, step: int) -> None:
        """Moves the snapshots that are due after `step` steps."""
        self._trainer.roles.refresh(step)

    def rehearse(self, algorithm: Objective, micro: Batch) -> None:
        with self._exchanging():
            self._trainer.rehearse(algorithm, micro)

    def digest(self) -> str:
        return self._trainer.digest()

    def close(self) -> None:
        self._leave()
        self._stack.close()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Leaves the exchange between ranks if the code inside fails, so that no other rank waits for this one."""
        try:
            yield
        except Exception:
            self._leave()
            raise

    def _leave(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()


class DrawnText:
    """The texts that rank 0 has drawn for the updates of a step."""

    def __init__(self, texts: list[Batch]) -> None:
        self._texts = texts

    def batch(self, seed: int, step: int, update: int) -> Batch:
        return self._texts[update]
