"""An update, a gradient step on whatever learns: its rows, its losses, backward, and a step's metrics.

Functions of their arguments alone, which `LocalTrainer` puts together, in one lane or in several.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlft.algorithm.objective import WEIGHT, WEIGHT_SQUARED, Objective
from rlft.algorithm.ops.kl import KLAnchor
from rlft.model.critic import CRITIC
from rlft.model.forward import MicroBatch
from rlft.model.networks import Networks
from rlft.trainer.lanes import balance
from rlft.types import Batch, LossScale


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
