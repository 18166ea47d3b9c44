"""How long a step of several engines and ranks takes, from what its parts take in one process.

A step samples (units of groups wait in a queue for the engines, scoring begins as they finish), credits, updates (each
rank goes through its lanes, then the lanes' gradients are exchanged), and publishes. Engines and ranks that share a
machine slow each other down by measured speeds; those with a device of their own do not. Nothing here measures.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlft.trainer.lanes import Costs as RowCosts
from rlft.trainer.lanes import assign, token_cost

Group = tuple[int, Sequence[int]]
"""Tokens of a prompt, and of each of its completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds that parts of a step take in a process that has a core or a GPU of its own.

    Args:
        unit, position, token: of an engine for each call, for each position that it decodes (as many as the longest
            completion of the call has), and for each token that it samples.
        score: of a reward worker for a completion.
        credit: of the driver for a completion: the batch, advantages, metrics.
        update, update_token: of a rank for an update, and for each token of cost (`lanes.token_cost`) of its lanes.
        send: of the driver for handing one completion to the ranks.
        exchange, exchange_byte: for one lane's gradient between two ranks, and for each byte of it.
        publish, load: of the driver, and of each engine, for one adapter.
        rest: of the driver for what no stage counts, such as the files of a step.
        adapter_bytes, gradient_bytes, completion_bytes: that travel: an adapter, a lane's gradient, a completion with
            its log-probs.
        speeds: of 1, 2, .. processes on as many cores of one machine, each beside a single one; empty: each process has
            a device of its own.
        bandwidth: bytes a second into or out of the driver's machine; inf within one machine.
    """

    unit: float
    position: float
    token: float
    score: float
    credit: float
    update: float
    update_token: float
    send: float
    exchange: float
    exchange_byte: float
    publish: float
    load: float
    rest: float
    adapter_bytes: int
    gradient_bytes: int
    completion_bytes: float
    speeds: Sequence[float] = ()
    bandwidth: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """engines sample, ranks train in `lanes` lanes, workers score; a machine holds as many engines and ranks."""

    engines: int = 1
    ranks: int = 1
    lanes: int = 1
    workers: int = 1
    at_once: int = 64
    a_machine: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of each stage of a step, and what the driver alone needs of them.

    Args:
        sample: until the last completion is there. score: from then until the last one is scored.
        busy: share of `sample` in which an engine computes. balance: as the metric lanes/balance.
        driver: name to seconds of all that only the driver's machine can do, also beside other work.
    """

    sample: float
    score: float
    credit: float
    update: float
    publish: float
    rest: float
    busy: float
    balance: float
    driver: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """One stage after the other."""
        return self.sample + self.score + self.credit + self.update + self.publish + self.rest

    @property
    def overlapped(self) -> float:
        """With overlap.lag=1 the next step is sampled beside the others; the driver's own work is not divided."""
        beside = max(self.sample + self.score, self.credit + self.update + self.rest)
        return max(beside, sum(self.driver.values())) + self.publish


def simulate(
    groups: Sequence[Group], costs: StageCosts, layout: Layout, trained: Sequence[Group] | None = None
) -> StepTime:
    """The step in which these groups are sampled and trained on once.

    trained: those that teach something; others are left out of the update. None: all.
    """
    completions = sum(len(lengths) for _, lengths in groups)
    finished, busy = sampled(groups, costs, layout)
    sample = finished[-1][0]
    updated, balance = update_seconds(groups if trained is None else trained, costs, layout)
    machines = max(1, math.ceil(layout.engines / layout.a_machine))
    rank_machines = max(0, math.ceil(layout.ranks / layout.a_machine) - 1)
    driver = {
        "scores": costs.score * completions / layout.workers,
        "rollouts in": costs.completion_bytes * completions / costs.bandwidth,
        "adapters out": costs.adapter_bytes * machines / costs.bandwidth,
        "batch out": costs.completion_bytes * completions * rank_machines / costs.bandwidth,
        "credit and files": (costs.credit * completions) + costs.rest,
    }
    return StepTime(
        sample=max(sample, driver["rollouts in"]),
        score=max(0.0, scored(finished, costs, layout) - sample),
        credit=costs.credit * completions,
        update=updated + driver["batch out"],
        publish=costs.publish + costs.load / speed(costs.speeds, layout.engines) + driver["adapters out"],
        rest=costs.rest,
        busy=busy,
        balance=balance,
        driver=driver,
    )


def sampled(groups: Sequence[Group], costs: StageCosts, layout: Layout) -> tuple[list[tuple[float, int]], float]:
    """((second at which a unit is sampled, its completions), in that order; share of time in which engines work)."""
    units = [
        (
            costs.unit + costs.position * max(max(n) for _, n in part) + costs.token * sum(sum(n) for _, n in part),
            sum(len(n) for _, n in part),
        )
        for part in parts(groups, layout.at_once)
    ]
    finished = served([seconds for seconds, _ in units], layout.engines, costs.speeds)
    in_order = sorted((at, units[i][1]) for i, at in enumerate(finished))
    work = sum(seconds for seconds, _ in units)
    share = work / (in_order[-1][0] * layout.engines)
    return in_order, share


def parts(groups: Sequence[Group], at_once: int) -> list[Sequence[Group]]:
    """The groups of each call of an engine."""
    size = max(1, at_once // len(groups[0][1]))
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def served(work: Sequence[float], servers: int, speeds: Sequence[float]) -> list[float]:
    """When each piece of work is done that waits in one queue for so many servers.

    speeds: as in `StageCosts`; a server is as fast as those that work at the time let it be.
    """
    if not speeds:
        free = [0.0] * min(servers, len(work))
        done = []
        for seconds in work:
            at = heapq.heappop(free) + seconds
            heapq.heappush(free, at)
            done.append(at)
        return done
    now, done, waiting = 0.0, [0.0] * len(work), list(range(len(work)))[::-1]
    left: dict[int, float] = {}
    while waiting or left:
        while waiting and len(left) < servers:
            piece = waiting.pop()
            left[piece] = work[piece]
        rate = speed(speeds, len(left))
        passed = min(left.values()) / rate
        now += passed
        left = {piece: seconds - passed * rate for piece, seconds in left.items()}
        for piece in [piece for piece, seconds in left.items() if seconds <= 1e-12]:
            done[piece] = now
            del left[piece]
    return done


def speed(speeds: Sequence[float], processes: int) -> float:
    """Of each of so many processes; those beyond the cores take turns with the others."""
    if not speeds or processes <= 1:
        return 1.0
    if processes <= len(speeds):
        return speeds[processes - 1]
    return speeds[-1] * len(speeds) / processes


def scored(finished: Sequence[tuple[float, int]], costs: StageCosts, layout: Layout) -> float:
    """The second at which the last completion is scored, by workers that begin as units come."""
    at = 0.0
    for there, completions in finished:
        at = max(at, there) + costs.score * completions / layout.workers
    return at


def update_seconds(groups: Sequence[Group], costs: StageCosts, layout: Layout) -> tuple[float, float]:
    """(seconds of an update with the exchange of its gradients, lanes/balance)."""
    lanes = lane_costs(groups, layout.lanes)
    share = layout.lanes // layout.ranks
    by_rank = [sum(lanes[rank * share : (rank + 1) * share]) for rank in range(layout.ranks)]
    passes = max(served([costs.update_token * cost for cost in by_rank], layout.ranks, costs.speeds))
    balance = sum(lanes) / len(lanes) / max(lanes)
    if layout.ranks == 1:
        return costs.update + passes, balance
    completions = sum(len(lengths) for _, lengths in groups)
    hops = math.ceil(math.log2(layout.ranks))  # a broadcast goes down a tree
    lane = costs.exchange + costs.gradient_bytes * max(costs.exchange_byte, 1 / costs.bandwidth)
    fixed = costs.update / speed(costs.speeds, layout.ranks)  # every rank takes the optimizer's step
    return fixed + costs.send * completions + passes + layout.lanes * hops * lane, balance


def lane_costs(groups: Sequence[Group], lanes: int) -> list[float]:
    """The cost of each lane, in tokens, as a run deals rows out."""
    rows, prompts, numbers = [], [], []
    for number, (prompt, lengths) in enumerate(groups):
        rows += [token_cost(prompt, length) for length in lengths]
        prompts += [token_cost(0, prompt)] * len(lengths)
        numbers += [number] * len(lengths)
    return assign(RowCosts(rows=rows, prompts=prompts, groups=numbers), lanes)[1]


def apart(costs: StageCosts, bandwidth: float) -> StageCosts:
    """The same costs where each engine and rank has a device of its own and machines are connected by a network."""
    return replace(costs, speeds=(), bandwidth=bandwidth)
