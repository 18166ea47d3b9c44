"""The trainer of several ranks: the run's own process is rank 0, the others are workers that hold the same roles.

Every rank gets the whole batch and does its lanes' part of each pass. No step is lost to a rank that dies, raises or is
late: it is replaced, all ranks get rank 0's state from the start of the step, and the work is done again. Where all
weights learn, of which no copy is kept, the run ends instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait as wait_for
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.system.process.running_time import TICK_S, RunningTime
from rlft.system.process.worker import Launcher, Worker, WorkerError, WorkerSpec, where_it_wrote
from rlft.trainer.local import LocalTrainer, TrainerState
from rlft.trainer.ranks import Exchange, LaneShare, LateRankError, RanksError, Rendezvous, open_store, shapes_of
from rlft.trainer.update import step_metrics
from rlft.types import Batch, Rollouts, UserError

MOST_FAILURES = 3  # after this many failures in a row, without answers of all ranks in between, the run stops
START_S = 900.0  # the least time limit of a rank that starts: it imports torch and loads the base
GRACE_S = 2.0  # how long a rank may take to notice that another one has failed, before it is replaced, too
DEATH_S = 60.0  # how long a busy machine may take to say that a rank has died, after the connection to it was lost
OWN_ERROR_S = 5.0
"""Seconds that rank 0 continues after another rank has raised an error, since it may meet and raise the same error."""

Result = TypeVar("Result")


class RankError(RuntimeError):
    """The ranks cannot continue: one fails again and again, or their weights differ."""


class RankedTrainer:
    """Trains on several ranks, of which `LocalTrainer` is one; its methods are as there.

    Args:
        local: the trainer of rank 0.
        launcher: starts the other ranks; whoever opened it closes it.
        specs, workers: what ranks 1, 2, .. are, and those that have been started.
        lanes, sequence: as in `LaneShare`.
        timeout: seconds that a rank may be behind the others.
        note: takes a sentence for the person watching.
        again: the command that resumes from the newest checkpoint.
    """

    def __init__(
        self,
        local: LocalTrainer,
        launcher: Launcher,
        specs: Sequence[WorkerSpec],
        workers: Sequence[Worker],
        *,
        lanes: int,
        sequence: int,
        timeout: float,
        note: Callable[[str], None],
        again: str,
    ) -> None:
        self._local, self._launcher, self._specs = local, launcher, specs
        self._timeout, self._note, self._again = timeout, note, again
        self._workers: list[Worker | None] = list(workers)
        self._pending: dict[Worker, Future[Any]] = {}
        self._exchange: Exchange | None = None
        self._store: Any = None
        self._num_rendezvous = self._num_failures = 0
        self._first_error_at: float | None = None
        self._limit = timeout  # seconds, for what is waited for now
        self._share = local.share = LaneShare(lanes=lanes, ranks=1 + len(specs), sequence=sequence)
        self._restored: Mapping[str, Tensor] | None = None  # moments that other ranks are to hold

    # -- what ranks do together ----------------------------------------------------------------------------------------
    def annotate(self, batch: Batch, zero_gradient_B: Tensor) -> Batch:
        local, share = self._local, self._share
        shared_batch = self._launcher.share(batch)

        def together() -> Batch:
            self._call("annotate", shared_batch, zero_gradient_B)
            fields = local.annotations(batch, zero_gradient_B)
            rows_of = local.rows_of_lanes(batch, zero_gradient_B)
            for rank, values in enumerate(self._answers("annotate"), start=1):
                rows = torch.cat([rows_of[lane] for lane in share.lanes_of(rank)])
                for name, values_NT in values.items():
                    fields[name] = fields[name].index_copy(0, rows, values_NT)
            return replace(batch, **fields)

        return self._without_losing_a_step(together)

    def update(self, algorithm: Objective, batch: Batch, zero_gradient_B: Tensor, step: int) -> dict[str, float]:
        local, texts = self._local, self._texts(algorithm, step)
        shared_batch = self._launcher.share(batch)
        start_state = None if local.roles.is_whole else local.state()

        def together() -> dict[str, float]:
            self._call("update", algorithm, shared_batch, zero_gradient_B, step, texts)
            records = local.update_lanes(algorithm, batch, zero_gradient_B, step)
            return step_metrics([records, *self._answers("update")])

        return self._without_losing_a_step(together, start_state)

    def refresh(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        metrics = self._local.refresh(step, rollouts)
        try:
            if self._exchange is not None:
                self._call("refresh", step)
                self._answers("refresh")
        except RanksError as error:
            self._recover(error)  # when the ranks meet again, all get the state that rank 0 has now
        return metrics

    def rehearse(self, algorithm: Objective, micro: Batch) -> None:
        def together() -> None:
            self._call("rehearse", algorithm, micro)
            self._local.rehearse(algorithm, micro)
            self._answers("rehearse")

        self._without_losing_a_step(together)

    def state(self, *, alone: bool = False) -> TrainerState:
        """The state of all ranks. Raises RankError, unless `alone`, if their weights or optimizers differ."""
        if alone:
            assert not self._local.roles.is_whole, "rank 0 has only its own moments"
            return self._local.state()

        def together() -> TrainerState:
            self._call("digest")
            own_digest = self._local.digest()
            for worker, digest in zip(self._workers, self._answers("digest"), strict=True):
                if digest != own_digest:
                    assert worker is not None, "it has answered"
                    raise RankError(
                        f"{worker.name} has come to another adapter or optimizer than rank 0, so this step is not "
                        "saved: resume from the newest checkpoint; if it happens again, give them machines of one kind"
                    )

            state = self._local.state()
            return replace(state, optimizer=self._gathered_moments()) if self._local.roles.is_whole else state

        return self._without_losing_a_step(together)

    def _gathered_moments(self) -> dict[str, Tensor]:
        """The moments that the ranks hold, in main memory."""
        self._call("shapes_of_moments")
        shapes = [shapes_of(self._local.moments()), *self._answers("shapes_of_moments")]
        self._call("gather", shapes)
        moments = self._local.gather(shapes)
        self._answers("gather")
        return moments

    def restore(self, state: TrainerState) -> None:
        self._local.restore(state)
        self._restored = state.optimizer if self._local.roles.is_whole else None
        self._leave()  # when the ranks meet again, all get this state

    # -- meeting, and meeting again ------------------------------------------------------------------------------------
    def _without_losing_a_step(self, together: Callable[[], Result], before: TrainerState | None = None) -> Result:
        """The result of work that the ranks do together; after each failure of a rank it is done again from the start.

        `before` is the state that rank 0 restores before it starts again, if the work changes it.
        """
        while True:
            try:
                self._meet()
                result = together()
            except RanksError as error:
                self._recover(error)
                if before is not None:
                    self._local.restore(before)
            except BaseException:  # also a signal: workers may be anywhere in their work
                for worker in self._workers:
                    if worker is not None:
                        worker.kill()
                self._leave()  # after the kills, since it waits until no other rank is connected
                raise
            else:
                self._num_failures = 0
                return result

    def _meet(self) -> None:
        """Starts missing ranks, connects all of them, and gives all the state of rank 0."""
        if self._exchange is not None:
            return
        for i, spec in enumerate(self._specs):
            self._workers[i] = self._workers[i] or self._launcher.start(spec)
        self._call("ready")
        self._answers("start", max(START_S, self._timeout))
        if self._store is None:
            self._store = open_store(self._launcher.address)
        self._num_rendezvous += 1
        rendezvous = Rendezvous(
            host=self._launcher.address,
            port=self._store.port,
            name=str(self._num_rendezvous),
            ranks=self._share.ranks,
            sequence=self._share.sequence,
            timeout=self._timeout,
        )
        moments = self._local.moments() if self._restored is None else self._restored
        start = shapes_of(moments), self._local.critic_statistics()
        self._call("join", rendezvous, *start)
        device = self._local.roles.backbone.device
        self._exchange = Exchange(rendezvous, 0, device, self._watch)
        self._local.share = replace(self._share, exchange=self._exchange)
        self._local.join(*start, moments)
        self._answers("join")
        self._restored = None

    def _leave(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._local.share = self._share
        if exchange is not None:
            exchange.close()

    def _recover(self, error: RanksError) -> None:
        """Ends the workers that have failed or do not answer.

        Raises RankError: there were too many failures in a row, or all weights learn.
        """
        self._num_failures += 1
        self._leave()
        self._wait_for_causes(error)
        causes: list[str] = []
        for i, worker in enumerate(self._workers):
            future = None if worker is None else self._pending.get(worker)
            if worker is None or future is None or _has_only_lost_another(future):
                continue
            causes.append(_cause(worker, future, self._limit))
            worker.kill()
            self._workers[i] = None
        self._pending.clear()
        text = "; ".join(causes) or str(error)
        if self._local.roles.is_whole:
            raise RankError(
                "the run ends, because with lora=null no copy of all weights is kept from which a step could be done "
                f"again; resume from the newest checkpoint with: {self._again}; {text}"
            ) from error
        if self._num_failures >= MOST_FAILURES:
            raise RankError(f"the ranks failed {MOST_FAILURES} times in a row; the last time {text}") from error
        self._note(f"a rank is replaced, and the work of the ranks done again: {text.splitlines()[0]}")

    def _wait_for_causes(self, error: RanksError) -> None:
        """Until each worker has answered or had its time; where a connection was lost, until it is known who failed."""
        pending, clock = self._pending.values(), RunningTime()
        limit = GRACE_S if isinstance(error, LateRankError) else DEATH_S
        while late := wait_for(pending, TICK_S).not_done:
            is_known = any(future not in late and not _has_only_lost_another(future) for future in pending)
            if clock() >= (GRACE_S if is_known else limit):
                return

    # -- calls and answers ---------------------------------------------------------------------------------------------
    def _call(self, method: str, *args: Any) -> None:
        """Calls this method of every worker; `_answers` waits for the answers."""
        assert not self._pending, "the answers to the last call have been taken"
        self._first_error_at, self._limit = None, self._timeout
        for worker in self._workers:
            assert worker is not None, "the ranks have met"
            self._pending[worker] = worker.call(method, *args)

    def _answers(self, what: str, limit: float | None = None) -> list[Any]:
        """The answers in the order of ranks. Raises RanksError if a rank has failed or exceeds the limit."""
        self._limit = limit = self._timeout if limit is None else limit
        clock = RunningTime()
        while late := wait_for(self._pending.values(), TICK_S).not_done:
            self._watch(patience=0.0)
            if clock() >= limit:
                names = ", ".join(worker.name for worker, future in self._pending.items() if future in late)
                raise LateRankError(f"no answer to {what} from {names} in {limit:g} s (cluster.timeout)")
        self._watch(patience=0.0)
        answers = [future.result() for future in self._pending.values()]
        self._pending.clear()
        return answers

    def _watch(self, patience: float = OWN_ERROR_S) -> None:
        """Raises RanksError if a worker has failed; if the worker raised an error, only after `patience` seconds."""
        errors = {w.name: e for w, f in self._pending.items() if f.done() and (e := f.exception()) is not None}
        for error in errors.values():
            if isinstance(error, UserError):
                raise error
            if isinstance(error, WorkerError):
                raise RanksError(str(error)) from error
        for name, error in errors.items():
            self._first_error_at = self._first_error_at or time.monotonic()
            if time.monotonic() - self._first_error_at >= patience:
                raise RanksError(f"{name} failed: {type(error).__name__}: {error}") from error

    def _texts(self, algorithm: Objective, step: int) -> list[Batch]:
        """The text of each update of a step, for ranks that have none."""
        text, config = self._local.text, self._local.config
        if not algorithm.needs_text or text is None or not self._local.policy_learns(step):
            return []
        return [text(config.seed, step, i) for i in range(config.updates_per_step)]


Trainer = LocalTrainer | RankedTrainer


def _has_only_lost_another(future: Future[Any]) -> bool:
    """Whether a worker itself is sound: it has answered, or has noticed that another rank is gone."""
    return future.done() and (future.exception() is None or isinstance(future.exception(), RanksError))


def _cause(worker: Worker, future: Future[Any], limit: float) -> str:
    """How a worker failed, which had `limit` seconds."""
    if future.done():
        error = future.exception()
        return (
            str(error) if isinstance(error, WorkerError) else f"{worker.name} failed: {type(error).__name__}: {error}"
        )
    return f"{worker.name} has not answered for {limit:g} s (cluster.timeout); {where_it_wrote(worker.log)}"
