"""One role's optimizer by the name of `trainer.optimizer`, whose state is saved under the parameters' names.

The learning rate is a function of the update, so that nothing about it needs saving.

Where ranks divide the moments (ZeRO-1, arXiv 1910.02054), each parameter has one rank that holds its moments, moves it
and sends it to the others. All have the same gradients, so that no bit depends on who does.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rlft.config.trainer import OptimizerKind, Schedule, TrainerConfig
from rlft.system.device import copied
from rlft.system.seeds import derive
from rlft.trainer.ranks import LaneShare

OF_TOKENS = re.compile(r"(^|\.)(\w*embed\w*|lm_head|head|output|shared|wte|wpe|w)\.weight$")
"""Embeddings and output heads, whose rows are vectors of single tokens: no matrix to orthogonalise."""
OF_EXPERTS = re.compile(r"(^|\.)experts\.(base_layer\.)*lora_")
"""Adapters of experts, each of which holds the matrices of all experts in one tensor."""


class NonFiniteGradientError(RuntimeError):
    """The gradient holds NaN or infinity; it was not applied."""


class Optimizer:
    """The optimizer of one role.

    Gradients start at zero, not at None: an update without any gradient still counts as one. Muon ("Muon is Scalable
    for LLM Training", arXiv 2502.16982) moves matrices along their orthogonalised momentum, with AdamW's root mean
    square so that it takes AdamW's learning rate; AdamW has what is no matrix.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Parameter]], config: TrainerConfig, role: str = "policy"
    ) -> None:
        self.role, self.config = role, config
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.max_grad_norm = config.max_grad_norm
        self.divide(LaneShare())
        matrices = [p for name, p in parameters if config.optimizer is OptimizerKind.muon and is_matrix(name, p.shape)]
        known = set(matrices)
        others = [p for p in self.parameters if p not in known]
        self.parts = [make(of) for make, of in ((self._muon, matrices), (self._adamw, others)) if of]

    def _adamw(self, parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
        config = self.config
        kind: Any = torch.optim.AdamW
        if config.optimizer is OptimizerKind.adamw8bit:
            from bitsandbytes.optim import AdamW8bit as kind  # pyright: ignore[reportMissingImports]
        betas = (config.beta1, config.beta2)
        return kind(parameters, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)

    def _muon(self, parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            parameters,
            lr=self.config.lr,
            weight_decay=self.config.weight_decay,
            momentum=self.config.beta1,
            adjust_lr_fn="match_rms_adamw",
        )

    def update(self, lr: float) -> float:
        """One step at this rate with the gradients so far; returns their norm before clipping.

        Raises:
            NonFiniteGradientError: the norm is NaN or infinite; no parameter has been changed.
            RanksError: another rank is gone or late; some parameters may have been changed.
        """
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm).item()
        if not math.isfinite(norm):
            section = self.role if self.role in ("critic", "reward_model") else "trainer"
            raise NonFiniteGradientError(
                f"{self.role}/grad_norm is {norm}: stopped before it reached the weights; the newest checkpoint is "
                f"good. Lower {section}.lr or use model.dtype=float32"
            )
        for p, rank in zip(self.parameters, self._ranks, strict=True):
            if rank != self.share.rank:
                p.grad = None  # a parameter without one is left alone
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        self._exchange_weights()
        # Kernels that torch does not see into count no change, and copies of weights in 16 bits are kept by that count.
        torch.autograd.graph.increment_version(self.parameters)
        self.discard()
        return norm

    def discard(self) -> None:
        """Drops the gradients so far."""
        for parameter in self.parameters:
            parameter.grad = None

    def holds(self, moment: str) -> bool:
        """Whether this rank holds the moment of this name in `state`."""
        return moment.partition("/")[2] in self._held

    def divide(self, share: LaneShare) -> None:
        """Divides the moments among these ranks, of which this is one; at first there is no other."""
        self.share = share
        self._ranks = holders([p.numel() for p in self.parameters], share.ranks)
        self._held = {name for name, rank in zip(self.names, self._ranks, strict=True) if rank == share.rank}

    def _exchange_weights(self) -> None:
        """Sends the parameters that this rank has moved to all others, and gets theirs."""
        exchange = self.share.exchange
        if exchange is not None:
            ranks = zip(self.parameters, self._ranks, strict=True)
            arrivals = [exchange.begin_broadcast(p.detach(), rank, "exchange weights") for p, rank in ranks]
            for wait in arrivals:
                wait()

    def reset(self) -> None:
        """Drops all moments: the next update is like the first one of a new optimizer."""
        for part in self.parts:
            part.state.clear()

    def state(self, *, copies: bool = True) -> dict[str, Tensor]:
        """{"<moment>/<parameter name>": tensor} of what this rank holds; empty before the first update.

        copies: False for the tensors that the optimizer holds and changes.
        """
        moments = {p: state for part in self.parts for p, state in part.state.items()}
        tensors = {
            f"{moment}/{name}": torch.as_tensor(value).detach()
            for name, p in zip(self.names, self.parameters, strict=True)
            for moment, value in sorted(moments.get(p, {}).items())
        }
        return copied(tensors) if copies else tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continues with these moments, of which those are left out that other ranks hold."""
        named: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            moment, _, name = key.partition("/")
            if self.holds(key):
                named.setdefault(name, {})[moment] = value
        places = dict(zip(self.parameters, self.names, strict=True))
        for part in self.parts:
            for p in (p for group in part.param_groups for p in group["params"] if places[p] in named):
                part.state[p] = {moment: self._own(p, moment, v) for moment, v in named[places[p]].items()}

    def _own(self, parameter: Parameter, moment: str, value: Tensor) -> Tensor | int:
        """The number of updates is a tensor in main memory to torch, and a number to bitsandbytes."""
        if moment == "step":
            return int(value) if self.config.optimizer is OptimizerKind.adamw8bit else value.clone()
        return value.clone().to(parameter.device)


def holders(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that holds each of some parameters: the largest first, each goes to the rank that has least.

    >>> holders([5, 1, 4, 4, 3], 2)
    [0, 0, 1, 1, 0]
    """
    loads, result = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        result[number] = rank
        loads[rank] += sizes[number]
    return result


def largest_share(sizes: Sequence[int], ranks: int) -> float:
    """The share of the rank that holds most.

    >>> largest_share([6, 1, 1], 2)
    0.75
    """
    loads = Counter[int]()
    for rank, size in zip(holders(sizes, ranks), sizes, strict=True):
        loads[rank] += size
    return max(loads.values()) / sum(sizes)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of this name maps vectors to vectors: no bias, no decay rates, no rows of single tokens."""
    if len(shape) != 2 or min(shape) < 2 or not name.endswith(".weight"):
        return False
    return not (OF_TOKENS.search(name) or OF_EXPERTS.search(name))


def begin_step(optimizers: Iterable[Optimizer], seed: int, step: int) -> None:
    """Prepares the first update after `step` steps: seeds dropout, and resets the moments that are due."""
    torch.manual_seed(derive(seed, step, "dropout"))
    for optimizer in optimizers:
        if optimizer.config.reset_every and step % optimizer.config.reset_every == 0:
            optimizer.reset()


def optimizer_step(
    optimizers: Iterable[Optimizer], update: int, num_updates: int, resting: Collection[str] = ()
) -> dict[str, float]:
    """One step of every optimizer with the gradients so far; returns `<role>/lr` and `<role>/grad_norm`.

    update: number of this update in the run, from 0. resting: roles that do not learn now, whose gradients are dropped.
    """
    metrics: dict[str, float] = {}
    for optimizer in optimizers:
        rate = norm = 0.0
        if optimizer.role in resting:
            optimizer.discard()
        else:
            rate = learning_rate(optimizer.config, update, num_updates)
            norm = optimizer.update(rate)
        metrics |= {f"{optimizer.role}/lr": rate, f"{optimizer.role}/grad_norm": norm}
    return metrics


def learning_rate(config: TrainerConfig, update: int, num_updates: int) -> float:
    """The rate of this update (from 0): linear warm-up over `warmup` updates, then the schedule down to 0 at the end.

    >>> c = TrainerConfig(
    ...     optimizer=OptimizerKind.adamw, lr=1.0, schedule=Schedule.linear, warmup=2,
    ...     beta1=0, beta2=0, eps=1, weight_decay=0, max_grad_norm=1, reset_every=0,
    ... )
    >>> [learning_rate(c, u, 6) for u in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    if config.schedule is Schedule.constant:
        return config.lr
    done = (update - config.warmup) / max(1, num_updates - config.warmup)
    if config.schedule is Schedule.linear:
        return config.lr * (1 - done)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
