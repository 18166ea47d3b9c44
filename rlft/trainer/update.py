"""An update, a gradient step on whatever learns: its rows in lanes, losses, backward, gradients, a step's metrics.

`LocalTrainer` puts these together. The passes of an update are divided into lanes, so that several ranks can share
them. Which rows are in which lane follows from the batch alone. Every lane adds up gradients of its own, and the lanes
are added in their order; so the bits of a result depend on the number of lanes, and not on how many ranks share them.

A lane costs about total / lanes: whole groups are assigned first, the most expensive first, each to the cheapest lane;
then rows move from the most expensive lane to the cheapest one while that lowers the higher cost of the two. A prompt
counts once in each lane that has rows of its group.

Ranks exchange gradients in buckets of a fixed size. Those that share a lane's tokens have a part of its gradient each.
The sum is taken in the order of parts, so that no bit of it depends on the number of ranks or on the size of a bucket.
With one lane per rank the sum takes no memory besides that lane's gradient but two buckets.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, tensor
from torch.nn import Parameter

from rlft.algorithm.objective import WEIGHT, WEIGHT_SQUARED, Objective
from rlft.algorithm.ops.kl import KLAnchor
from rlft.model.critic import CRITIC
from rlft.model.forward import MicroBatch
from rlft.model.networks import Networks
from rlft.model.packing import prompt_lengths
from rlft.system.device import BUCKET, Bucket, buckets
from rlft.trainer.ranks import LaneShare
from rlft.types import Batch, LossScale

# -- lanes -------------------------------------------------------------------------------------------------------------
PAIRS_PER_TOKEN = 6144.0
"""Number of query-key pairs that cost as much as a token: a layer of width h does 24 h^2 flops for a token outside of
attention and 4 h for a pair, so the number is 6 h; h = 1024."""
MOST_MOVES = 4096
MIN_GAIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of rows, in tokens."""

    rows: Sequence[float]  # cost of each row without its prompt
    prompts: Sequence[float]  # cost of each row's prompt
    groups: Sequence[int]  # the group with which each row shares its prompt


def divide(
    batch: Batch, rows: Tensor, num_lanes: int, *, shared_prompts: bool
) -> tuple[tuple[Tensor, ...], list[float]]:
    """(int64 indices of each lane's rows, in the order of the batch; the lanes' costs in tokens) of rows of a batch.

    A lane may be empty. rows: int64 `[N]`. shared_prompts: whether rows of a group share their prompt in the forward;
    else each row costs its whole length.
    """
    lanes, costs = assign(costs_of(batch, rows, shared_prompts=shared_prompts), num_lanes)
    return tuple(rows[tensor(lane, dtype=rows.dtype)] for lane in lanes), costs


def costs_of(batch: Batch, rows: Tensor, *, shared_prompts: bool) -> Costs:
    """The costs of the passes over these rows."""
    prompts = prompt_lengths(batch)[rows].tolist()
    lengths = batch.attention_mask.sum(1)[rows].tolist()
    groups = batch.group_ids[rows].tolist()
    if not shared_prompts:
        return Costs(rows=[token_cost(0, n) for n in lengths], prompts=[0.0] * len(groups), groups=groups)
    row_costs = [token_cost(p, n - p) for p, n in zip(prompts, lengths, strict=True)]
    return Costs(rows=row_costs, prompts=[token_cost(0, p) for p in prompts], groups=groups)


def token_cost(before: int, own: int) -> float:
    """The cost of `own` tokens after `before` others, to which each of them attends."""
    return own + own * (before + own / 2) / PAIRS_PER_TOKEN


def assign(costs: Costs, num_lanes: int) -> tuple[list[list[int]], list[float]]:
    """(indices of each lane's rows in ascending order, the lanes' costs)."""
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(costs.groups):
        rows_of.setdefault(group, []).append(row)
    whole = {g: costs.prompts[rows[0]] + sum(costs.rows[row] for row in rows) for g, rows in rows_of.items()}
    lanes = _Lanes(costs, num_lanes)
    for group in sorted(rows_of, key=lambda group: (-whole[group], rows_of[group][0])):
        lane = lanes.cheapest
        lanes.rows[lane] += rows_of[group]
        lanes.totals[lane] += whole[group]
        lanes.siblings[lane][group] += len(rows_of[group])
    for _ in range(MOST_MOVES):
        if not (moves := lanes.best_moves()):
            break
        for move in moves:
            lanes.move(*move)
    return [sorted(rows) for rows in lanes.rows], lanes.totals


class _Lanes:
    """Indices of the rows of each lane, and the lanes' costs."""

    def __init__(self, costs: Costs, num_lanes: int) -> None:
        self.costs = costs
        self.rows: list[list[int]] = [[] for _ in range(num_lanes)]
        self.totals = [0.0] * num_lanes
        self.siblings: list[Counter[int]] = [Counter() for _ in range(num_lanes)]  # number of rows of each group

    @property
    def cheapest(self) -> int:
        """The lane that costs least; the first of several."""
        return min(range(len(self.totals)), key=lambda i: (self.totals[i], i))

    def move(self, row: int, source: int, target: int) -> None:
        self.totals[source] -= self._saved(source, row)
        self.totals[target] += self._added(target, row)
        self.rows[source].remove(row)
        self.rows[target].append(row)
        self.siblings[source][self.costs.groups[row]] -= 1
        self.siblings[target][self.costs.groups[row]] += 1

    def best_moves(self) -> list[tuple[int, int, int]]:
        """The move (row, from, to), or the two of a swap, that most lower the highest cost; empty if nothing does."""
        costs, totals = self.costs, self.totals
        full, free = max(range(len(totals)), key=lambda i: (totals[i], -i)), self.cheapest
        best, moves = totals[full] - MIN_GAIN, list[tuple[int, int, int]]()
        for row in self.rows[full]:
            higher = max(totals[full] - self._saved(full, row), totals[free] + self._added(free, row))
            if higher < best:
                best, moves = higher, [(row, full, free)]
        if moves:
            return moves
        gap = totals[full] - totals[free]
        others = sorted(self.rows[free], key=lambda row: (costs.rows[row], row))
        for row in sorted(self.rows[full], key=lambda row: (-costs.rows[row], row))[:64]:
            for other in others[:64]:
                if not 0 < costs.rows[row] - costs.rows[other] < gap or costs.groups[row] == costs.groups[other]:
                    continue
                higher = max(
                    totals[full] - self._saved(full, row) + self._added(full, other),
                    totals[free] + self._added(free, row) - self._saved(free, other),
                )
                if higher < best:
                    best, moves = higher, [(row, full, free), (other, free, full)]
        return moves

    def _saved(self, lane: int, row: int) -> float:
        """What a lane saves without this row; the prompt is still needed if a sibling is in the lane."""
        alone = self.siblings[lane][self.costs.groups[row]] == 1
        return self.costs.rows[row] + (self.costs.prompts[row] if alone else 0.0)

    def _added(self, lane: int, row: int) -> float:
        return self.costs.rows[row] + (0.0 if self.siblings[lane][self.costs.groups[row]] else self.costs.prompts[row])


def balance(costs: Sequence[Sequence[float]]) -> float:
    """The mean cost of a lane divided by that of the most expensive one, over all updates; 1 where no lane waits."""
    longest = sum(max(lanes) for lanes in costs)
    return sum(sum(lanes) / len(lanes) for lanes in costs) / longest if longest else 1.0


# -- gradients ---------------------------------------------------------------------------------------------------------
class LaneGradients:
    """The gradients of an update: each of several parts has one of its own; a single one simply stays in place."""

    def __init__(self, parameters: Sequence[Parameter], share: LaneShare) -> None:
        self._parameters, self._share = parameters, share
        self._of_parts: dict[int, list[Tensor]] = {}

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def set_aside(self, lane: int) -> None:
        """Keeps the gradients so far as those of this lane, with zeros where there are none, and clears them.

        Rank 0 has the first parts, so that it adds each to the sum of those before at once.
        """
        if self._share.parts == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self.clear()
        if self._share.rank == 0 and self._of_parts:
            [so_far] = self._of_parts.values()
            for total, gradient in zip(so_far, gradients, strict=True):
                total.add_(gradient)
        else:
            self._of_parts[self._share.part_of(lane)] = [gradient.contiguous() for gradient in gradients]

    def add_up(self, lanes: Sequence[int]) -> None:
        """Sets the gradients to the sum over the lanes that have one, in ascending order; to nothing if there are none.

        Raises RanksError: another rank is gone or late.
        """
        share = self._share
        if share.parts == 1 or not lanes:
            return
        parts = [number * share.lanes + lane for number in range(share.sequence) for lane in lanes]
        first = [part for part in parts if share.owner(part) == 0]
        terms = [*first[:1], *parts[len(first) :]]
        own, self._of_parts = self._of_parts, {}
        result = next(iter(own.values()), None) or [
            torch.empty_like(p, memory_format=torch.contiguous_format) for p in self._parameters
        ]
        for bucket in buckets(result, BUCKET) if share.exchange is not None else ():
            total = functools.reduce(
                Tensor.add_, (share.sent(term, _flat(bucket, own.get(term), result)) for term in terms)
            )
            places = _parts(bucket, result)
            for place, part in zip(places, total.split([len(place) for place in places]), strict=True):
                place.copy_(part)
        for parameter, gradient in zip(self._parameters, result, strict=True):
            parameter.grad = gradient


def most_gradients(parts: int, ranks: int) -> int:
    """The most gradients that a rank holds at a time: those of its parts; rank 0 the sum so far and the next one's."""
    of_each = parts // ranks
    return of_each if ranks > 1 else min(2, of_each)


def _parts(bucket: Bucket, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views `[n]` of the bucket's parts."""
    return [tensors[number].view(-1)[start:stop] for number, start, stop in bucket]


def _flat(bucket: Bucket, own: Sequence[Tensor] | None, like: Sequence[Tensor]) -> Tensor:
    """A copy of this rank's own tensors in a row; for another rank's, memory like that of such tensors."""
    parts = _parts(bucket, like if own is None else own)
    return parts[0].new_empty(sum(map(len, parts))) if own is None else torch.cat(parts)


# -- updates -----------------------------------------------------------------------------------------------------------
def minibatches(batch: Batch, epochs: int, num_minibatches: int, seed: int) -> list[Tensor]:
    """Row indices (int64) of each update: every epoch deals the groups, shuffled, to `num_minibatches` updates."""
    if num_minibatches == 1:
        return [torch.arange(len(batch.group_ids))] * epochs
    generator = torch.Generator().manual_seed(seed)
    groups = batch.group_ids.unique()
    return [
        torch.isin(batch.group_ids, dealt).nonzero()[:, 0]
        for _ in range(epochs)
        for dealt in groups[torch.randperm(len(groups), generator=generator)].chunk(num_minibatches)
    ]


def loss_scale(minibatch: Batch, max_completion_tokens: int, roles: Networks) -> LossScale:
    """Sizes of the whole minibatch; rows that are never forwarded count, too."""
    return LossScale(
        num_tokens=int(minibatch.loss_mask.sum()),
        num_sequences=len(minibatch.rewards),
        max_completion_tokens=max_completion_tokens,
        value_scale=1.0 if roles.critic is None else roles.critic.value_scale,
    )


# -- passes with gradient ----------------------------------------------------------------------------------------------
def backward(
    roles: Networks,
    algorithm: Objective,
    micro: MicroBatch,
    scale: LossScale,
    policy_learns: bool,
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Adds a micro-batch's gradients to the critic's and, if it learns, to the policy's.

    Returns the loss's metrics, and the policy's log-probs `[B, T]`. A critic with an adapter of its own goes first,
    forward and backward, so that only one network's activations are alive at a time; the policy's loss then sees its
    values as constants.
    """
    values, batch, layout = None, micro.batch, micro.layout
    if algorithm.needs_values and roles.critic_adapter is not None:
        with roles.learning(roles.critic_adapter):
            values = roles.values(batch, layout)
            algorithm.value_loss(values, batch, scale).backward()
        roles.check_gradients(roles.critic_adapter)
    to = algorithm.exact_kl_to
    anchor = None if to is None else roles.anchor(batch, layout, old=to == KLAnchor.old)
    with roles.replaying(batch, layout):  # also while layers are recomputed
        with torch.set_grad_enabled(policy_learns or values is None):
            has_top_k = algorithm.teacher_top_k > 0
            outputs = roles.outputs(batch, algorithm.needs_entropy, layout, top_k=has_top_k, anchor=anchor)
            outputs = outputs if values is None else replace(outputs, values=values.detach())
            loss = algorithm.loss(outputs, batch, scale)
        routing = roles.routing.metrics(scale.num_tokens)
        if loss.total.requires_grad:
            loss.total.backward()
            roles.check_gradients()
            if algorithm.needs_values and values is None:
                roles.check_gradients(CRITIC)
    return {**loss.metrics, **routing}, outputs.logprobs.detach()


def text_passes(
    learner: Networks,
    text: Batch,
    token_budget: int,
    loss_of: Callable[[Tensor, Tensor, int], Tensor],  # of log-probs `[B, T]`, their mask, and the texts' tokens
    rows: Tensor | None = None,  # int64 `[N]`, the rows to forward; None for all
) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Adds the gradient of an update's texts by micro-batches; yields each of these with its part `[]` of the loss."""
    forward, num_tokens = learner.forward, int(text.loss_mask.sum())
    for _, micro in forward.parts(text, token_budget, rows):
        logprobs = forward(micro.batch, 1.0, layout=micro.layout).logprobs
        loss = loss_of(logprobs, micro.batch.loss_mask, num_tokens)
        loss.backward()
        learner.check_gradients()
        yield micro, loss.detach()


# -- metrics -----------------------------------------------------------------------------------------------------------
def numbers_of(metrics: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """The numbers `[]` of several passes, which are read together: each reading waits until a GPU has computed all."""
    tensors = [tensor for of_pass in metrics for tensor in of_pass.values()]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [{name: next(numbers) for name in of_pass} for of_pass in metrics]


def total_of(losses: Sequence[Tensor]) -> float:
    """The sum of numbers `[]`, which are read together."""
    [numbers] = numbers_of([{str(i): loss for i, loss in enumerate(losses)}])
    return added_up(numbers.values())


def added_up(numbers: Iterable[float]) -> float:
    """The numbers added one after the other; sum() of Python 3.12 compensates for rounding, and gives other bits."""
    return functools.reduce(operator.add, numbers, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """What a forward and backward pass leaves."""

    # Metrics of its loss; until `records_of` has read them together, tensors `[]` on the device.
    metrics: Mapping[str, Any]
    # Share of the minibatch's completion tokens that are in rows which are forwarded at all. Metrics of tokens
    # (entropy, KL, clip fractions) are means over these tokens; losses are those of the whole minibatch.
    share: float = 1.0
    real: int = 0  # number of tokens that the network had to see
    network: int = 0  # number of tokens that entered it, with padding


def records_of(passes: Mapping[int, Sequence[PassRecord]], share: float) -> dict[int, list[PassRecord]]:
    """{lane: the records of its passes} with the numbers of the metrics and this share."""
    numbers = iter(numbers_of([done.metrics for lane in passes.values() for done in lane]))
    return {
        lane: [replace(done, metrics=next(numbers), share=share) for done in of_lane]
        for lane, of_lane in passes.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What an update leaves."""

    passes: Mapping[int, Sequence[PassRecord]]  # {lane: its passes} for the lanes of this rank
    costs: Sequence[float]  # the cost of every lane
    optimizers: Mapping[str, float]  # metrics of the optimizers


def step_metrics(by_rank: Sequence[Sequence[UpdateRecord]]) -> dict[str, float]:
    """The metrics of a step from its updates' records of all ranks; the same for any number of ranks.

    Passes are added up and updates averaged; of names ending in `_max` it is the maximum. kl/old_last is the kl/old of
    the last update alone, measured by its forward: how far all updates but that one have moved the policy.
    sampler/effective_sample_size is (sum w)^2 / (n sum w^2) over tokens, with the importance weights w before any cut.
    """
    sums: dict[str, float] = {"loss/total": 0.0, "loss/policy": 0.0}
    real = network = 0
    old_before = old_last = 0.0
    for records in zip(*by_rank, strict=True):
        passes = {lane: of_lane for record in records for lane, of_lane in record.passes.items()}
        for done in (done for lane in sorted(passes) for done in passes[lane]):
            real, network = real + done.real, network + done.network
            for name, value in done.metrics.items():
                so_far = sums.get(name, 0.0)
                if name.endswith("_max"):
                    sums[name] = value if math.isnan(value) else max(so_far, value)
                else:
                    sums[name] = so_far + (value if name.startswith("loss/") else value / done.share)
        for name, value in records[0].optimizers.items():
            sums[name] = sums.get(name, 0.0) + value
        total = sums.get("kl/old", 0.0)
        old_last, old_before = total - old_before, total
    means = {name: s if name.endswith("_max") else s / max(1, len(by_rank[0])) for name, s in sums.items()}
    if WEIGHT in means:
        weight, squared = means.pop(WEIGHT), means.pop(WEIGHT_SQUARED)
        means["sampler/effective_sample_size"] = weight**2 / squared if squared > 0 else 0.0
    means |= {"kl/old_last": old_last, "tokens/trained": real}
    means["waste/padding_fraction"] = (network - real) / max(1, network)
    costs = [record.costs for record in by_rank[0]]
    return means | ({"lanes/balance": balance(costs)} if any(len(lanes) > 1 for lanes in costs) else {})
