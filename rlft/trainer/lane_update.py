"""The updates of a step in lanes: those of `update.py`, with bits that do not depend on how many ranks share the lanes.

A rank computes its own lanes one after the other, each with a gradient of its own. Then every rank adds up all lanes in
their order, and takes the same optimizer step as the others. The dropout of a micro-batch is drawn from (seed, step,
update, its first row), wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlft.algorithm.objective import Objective
from rlft.batch import select
from rlft.model.roles import Roles
from rlft.system.seeds import derive
from rlft.trainer import sharded_base
from rlft.trainer.lanes import Division, balance, divide
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.ranks import Share
from rlft.trainer.sharded_base import ShardedLayers
from rlft.trainer.update import (
    UpdateSettings,
    UpdateText,
    backward,
    begin_step,
    loss_scale,
    minibatches,
    optimizer_step,
    policy_learns,
    text_backward,
)
from rlft.trainer.update_metrics import UpdateMetrics
from rlft.types import Batch, LossScale

BALANCE = "lanes/balance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The metrics of one pass; the other fields are the arguments of `UpdateMetrics.add` and `add_tokens`."""

    metrics: Mapping[str, float]
    share: float
    real: int = 0
    network: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """The metrics of an update.

    Attributes:
        passes: {lane: its passes} for the lanes of this rank.
        costs: the cost of every lane.
        optimizers: metrics of the optimizers.
    """

    passes: Mapping[int, Sequence[Measured]]
    costs: Sequence[float]
    optimizers: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Gradients:
    """The gradients of everything that learns, as one flat tensor."""

    optimizers: Mapping[str, Optimizer]
    _parameters: list[torch.nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self._parameters = [p for optimizer in self.optimizers.values() for p in optimizer.parameters]

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def flat(self) -> Tensor:
        """A copy of the gradients; zeros where there is none."""
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self._parameters])

    def empty(self) -> Tensor:
        return torch.cat([torch.zeros_like(p).flatten() for p in self._parameters])

    def set(self, flat: Tensor) -> None:
        sizes = [p.numel() for p in self._parameters]
        for parameter, part in zip(self._parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)


def update_in_lanes(
    roles: Roles,
    optimizers: Mapping[str, Optimizer],
    algorithm: Objective,
    batch: Batch,
    zero_gradient_B: Tensor,
    step: int,
    settings: UpdateSettings,
    text: UpdateText | None,
    share: Share,
    base: ShardedLayers | None = None,
) -> list[UpdateRecord]:
    """Does what `update.update` does, for one of the ranks that share the lanes; returns the metrics of each update.

    The other arguments are those of `update.update`.

    Args:
        share: the lanes of this rank.
        base: the layers of the base, if the ranks divide them.

    Raises:
        RanksError: another rank is gone or late; the gradients are cleared.
    """
    learns = policy_learns(roles, settings, step)
    begin_step(roles, optimizers, batch, step, settings)
    gradients = Gradients(optimizers=optimizers)
    records: list[UpdateRecord] = []
    order = derive(settings.seed, step, "minibatches")
    try:
        with roles.training():
            for i, rows in enumerate(minibatches(batch, settings.epochs, settings.minibatches, order)):
                work = work_of(roles, algorithm, batch, rows, zero_gradient_B, (step, i), settings, text, share.lanes)
                lanes_with_rows = work.lanes
                passes: dict[int, list[Measured]] = {}
                buffers: dict[int, Tensor] = {}
                with sharded_base.passes(base, share.exchange):
                    for lane in (lane for lane in share.mine if lane in lanes_with_rows):
                        gradients.clear()
                        passes[lane] = list(passes_of(work, lane, roles, algorithm, settings))
                        buffers[lane] = gradients.flat()
                add_up(gradients, buffers, lanes_with_rows, share)
                numbers = optimizer_step(optimizers, settings, step, i, learns)
                records.append(UpdateRecord(passes=passes, costs=work.costs, optimizers=numbers))
    finally:
        gradients.clear()
        torch.manual_seed(derive(settings.seed, step, "dropout"))
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one update, in lanes.

    Attributes:
        at: (finished steps, number of this update in its step).
        batch: the batch of the step.
        scale: sizes of the update's part of the batch.
        division: the live rows of that part, in lanes.
        share_of_tokens: share of the live rows in the update's completion tokens.
        learns: whether the policy learns.
        text: the update's pretraining text, if it has any.
        text_division: the rows of the text, in lanes.
    """

    at: tuple[int, int]
    batch: Batch
    scale: LossScale
    division: Division
    share_of_tokens: float
    learns: bool
    text: Batch | None
    text_division: Division | None

    @property
    def costs(self) -> list[float]:
        """The cost of each lane, in tokens."""
        text = (0.0,) * len(self.division.costs) if self.text_division is None else self.text_division.costs
        return [sum(pair) for pair in zip(self.division.costs, text, strict=True)]

    @property
    def lanes(self) -> list[int]:
        """The lanes that have rows."""
        return [lane for lane, cost in enumerate(self.costs) if cost > 0]


def work_of(
    roles: Roles,
    algorithm: Objective,
    batch: Batch,
    rows: Tensor,
    zero_gradient_B: Tensor,
    at: tuple[int, int],
    settings: UpdateSettings,
    text: UpdateText | None,
    num_lanes: int,
) -> Work:
    """The work of an update on these rows of the batch (int64 `[N]`); every rank computes the same."""
    (step, update), shared_prompts = at, roles.forward.packed
    learns = policy_learns(roles, settings, step)
    scale = loss_scale(select(batch, rows), settings.max_completion_tokens, roles)
    live = rows[~zero_gradient_B[rows]]
    text_batch = text_division = None
    if algorithm.needs_text and learns:
        assert text is not None, "plan/roles.py refuses algorithms that need text without any"
        text_batch = text.batch(settings.seed, step, update)
        all_rows = torch.arange(len(text_batch.rewards))
        text_division = divide(text_batch, all_rows, num_lanes, shared_prompts=shared_prompts)
    return Work(
        at=at,
        batch=batch,
        scale=scale,
        division=divide(batch, live, num_lanes, shared_prompts=shared_prompts),
        share_of_tokens=int(batch.loss_mask[live].sum()) / scale.num_tokens,
        learns=learns,
        text=text_batch,
        text_division=text_division,
    )


def passes_of(
    work: Work, lane: int, roles: Roles, algorithm: Objective, settings: UpdateSettings
) -> Iterator[Measured]:
    """Runs forward and backward through a lane's rows, and adds to the existing gradients."""
    step, update = work.at
    for part_rows in roles.forward.micro_batches(work.batch, work.division.rows[lane], settings.token_budget):
        torch.manual_seed(derive(settings.seed, step, f"dropout {update} {int(part_rows[0])}"))
        micro = roles.to_device(select(work.batch, part_rows))
        metrics = backward(roles, algorithm, micro, work.scale, work.learns)
        tokens = roles.forward.real_tokens(micro), roles.forward.network_tokens(micro)
        yield measured(metrics, work.share_of_tokens, *tokens)
    if work.text is not None and work.text_division is not None and len(work.text_division.rows[lane]):
        torch.manual_seed(derive(settings.seed, step, f"text dropout {update} {lane}"))
        rows = work.text_division.rows[lane]
        yield measured(text_backward(roles, algorithm, work.text, settings.token_budget, rows), 1.0)


def add_up(gradients: Gradients, buffers: dict[int, Tensor], lanes: Iterable[int], share: Share) -> None:
    """Sets the gradients to the sum over all lanes in their order; a lane without rows has no gradient."""
    gradients.clear()
    total: Tensor | None = None
    for lane in lanes:
        buffer = share.sent(lane, buffers.pop(lane) if lane in buffers else gradients.empty())
        total = buffer if total is None else total.add_(buffer)
    if total is not None:
        gradients.set(total)


def measured(metrics: Mapping[str, Tensor], share: float, real: int = 0, network: int = 0) -> Measured:
    numbers = {name: float(value) for name, value in metrics.items()}
    return Measured(metrics=numbers, share=share, real=real, network=network)


def metrics_of(by_rank: Sequence[Sequence[UpdateRecord]]) -> dict[str, float]:
    """The mean metrics of a step's updates, from the records of all ranks; the same for any number of ranks."""
    result = UpdateMetrics()
    for records in zip(*by_rank, strict=True):
        passes_by_lane = {lane: lane_passes for record in records for lane, lane_passes in record.passes.items()}
        for lane in sorted(passes_by_lane):
            for measured_pass in passes_by_lane[lane]:
                result.add(measured_pass.metrics, measured_pass.share)
                result.add_tokens(measured_pass.real, measured_pass.network)
        result.add_update(records[0].optimizers)
    return result.mean() | {BALANCE: balance([record.costs for record in by_rank[0]])}
