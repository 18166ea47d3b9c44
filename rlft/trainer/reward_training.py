"""Trains the learned reward between steps of the policy, as iterative GRPO does.

Siblings that a rule reward tells apart become pairs; every `refresh_every` steps the reward's adapter and head learn
from the newest pairs and a share of earlier ones (2402.03300, algorithm 1: "continuous training using a replay
mechanism that incorporates 10% of historical data"). There it is a loop around the policy's training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import torch
from torch import Tensor

from rlft.algorithm.preference import accuracy, bradley_terry
from rlft.config.model import RewardModelConfig
from rlft.config.trainer import TrainerConfig
from rlft.model.reward_model import last_scores, parts_within, rows_of, score_rows, scoring_batch
from rlft.model.roles import Roles
from rlft.system.seeds import derive
from rlft.trainer.optimizer import Optimizer
from rlft.trainer.update import total_of
from rlft.types import Group, Scores

SECTION = "reward_model"
PARTS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two completions of a prompt, as sampled token ids."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def completions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.chosen, self.rejected


class RewardRefresh:
    """Pairs that wait for the next training, earlier pairs that are kept for later trainings, and the optimizer.

    Random choices are functions of (seed, step). `state` gives its tensors for a checkpoint; the roles save the adapter
    and the head. The learning rate is constant.
    """

    def __init__(self, config: RewardModelConfig, roles: Roles, role: str, trainer: TrainerConfig, seed: int) -> None:
        self.config, self.roles, self.role, self.seed = config, roles, role, seed
        self.waiting: deque[Pair] = deque(maxlen=config.pairs)
        self.earlier: deque[Pair] = deque(maxlen=config.capacity)
        self.optimizer = Optimizer(roles.named_parameters(role), replace(trainer, lr=config.lr), SECTION)

    def collect(self, step: int, groups: Sequence[Group], scores: Scores) -> None:
        """Adds pairs of a finished step: siblings with different labels, at most `pairs_per_group` of a group."""
        assert self.config.labels is not None, "plan/roles.py refuses a training without labels"
        generator = torch.Generator().manual_seed(derive(self.seed, step, "reward pairs"))
        for group, labels in zip(groups, scores.by_reward[self.config.labels].tolist(), strict=True):
            pairs = pairs_of(group, labels)
            drawn = torch.randperm(len(pairs), generator=generator)[: self.config.pairs_per_group]
            self.waiting.extend(pairs[i] for i in drawn.tolist())

    def train_if_due(self, step: int) -> dict[str, float]:
        """Trains after `step` steps if a training is due and there are new pairs; returns its metrics, else nothing.

        accuracy is that of the newest pairs before the training, which has not seen them yet; loss and grad_norm are
        means over the training. Afterwards the newest pairs belong to the earlier ones.
        """
        config = self.config
        if not config.refresh_every or step % config.refresh_every or not self.waiting:
            return {}
        newest = list(self.waiting)
        pairs = [*newest, *self._replayed(step, len(newest))]
        metrics = {"accuracy": self.accuracy(newest), "pairs": float(len(pairs))}
        torch.manual_seed(derive(self.seed, step, "reward dropout"))
        generator = torch.Generator().manual_seed(derive(self.seed, step, "reward updates"))
        losses, norms = [], []
        num_updates = -(-len(pairs) // config.pairs_per_update)
        with self.roles.training():
            for _ in range(config.epochs):
                for indices in torch.randperm(len(pairs), generator=generator).tensor_split(num_updates):
                    losses.append(self._backward([pairs[i] for i in indices.tolist()]) * len(indices) / len(pairs))
                    norms.append(self.optimizer.update(config.lr))
        self.earlier.extend(newest)
        self.waiting.clear()
        metrics |= {"loss": sum(losses) / config.epochs, "grad_norm": sum(norms) / len(norms)}
        return {f"{SECTION}/{name}": value for name, value in metrics.items()}

    def accuracy(self, pairs: Sequence[Pair]) -> float:
        """The share of pairs whose chosen completion has the higher score; equal scores count half."""
        scores = score_rows(self.roles, self.role, rows_of(pairs), self.roles.token_budget)
        scores_2N = torch.tensor(scores, dtype=torch.float64)
        return accuracy(scores_2N[0::2], scores_2N[1::2]).item()

    def _replayed(self, step: int, num_newest: int) -> list[Pair]:
        """Earlier pairs, drawn without repetition, whose share of all pairs is `replay`; all if there are fewer."""
        count = round(num_newest * self.config.replay / (1 - self.config.replay))
        generator = torch.Generator().manual_seed(derive(self.seed, step, "reward replay"))
        return [self.earlier[i] for i in torch.randperm(len(self.earlier), generator=generator)[:count].tolist()]

    def _backward(self, pairs: Sequence[Pair]) -> float:
        """Adds the gradient of the mean Bradley-Terry loss over an update's pairs; returns that loss."""
        roles, losses = self.roles, []
        parts = parts_within(pairs, roles.token_budget, packed=roles.forward.packed, ending=1)
        micros = roles.forward.placed([scoring_batch(rows_of(part)) for part in parts])
        for part, micro in zip(parts, micros, strict=True):
            with roles.learning(self.role):
                scores_2N = last_scores(roles, self.role, micro.batch, micro.layout)
                loss = bradley_terry(scores_2N[0::2], scores_2N[1::2], None) * (len(part) / len(pairs))
                loss.backward()
            roles.check_gradients(self.role)
            losses.append(loss.detach())
        return total_of(losses)

    def state(self) -> dict[str, Tensor]:
        """{name: tensor} of all pairs and the optimizer's moments, for checkpoints."""
        pairs = {"waiting": self.waiting, "earlier": self.earlier}
        return self.optimizer.state() | {
            f"{SECTION}/{name}/{part}": tensor for name, kept in pairs.items() for part, tensor in flat(kept).items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continues from what `state` returned, or from a mapping that includes it."""
        self.optimizer.restore(state)
        for name, kept in (("waiting", self.waiting), ("earlier", self.earlier)):
            kept.clear()
            kept.extend(unflat({part: state[f"{SECTION}/{name}/{part}"] for part in ("token_ids", "lengths")}))


def pairs_of(group: Group, labels: Sequence[float]) -> list[Pair]:
    """Every (better, worse) pair of siblings with different labels, in order; pairs of the same tokens count once."""
    shared, paths = group.last_paths()
    prompt, siblings = tuple(shared), [tuple(path) for path in paths]
    pairs = (
        Pair(prompt=prompt, chosen=siblings[i], rejected=siblings[j])
        for i, j in product(range(len(siblings)), repeat=2)
        if labels[i] > labels[j]
    )
    return list(dict.fromkeys(pairs))


def flat(pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """The pairs as tensors: all token ids concatenated (int32), and the lengths of the parts (int32 `[N, 3]`)."""
    parts = [getattr(pair, name) for pair in pairs for name in PARTS]
    return {
        "token_ids": torch.tensor([token for part in parts for token in part], dtype=torch.int32),
        "lengths": torch.tensor([len(part) for part in parts], dtype=torch.int32).view(-1, 3),
    }


def unflat(tensors: Mapping[str, Tensor]) -> list[Pair]:
    """The pairs from the tensors that `flat` returned."""
    remaining = iter(tensors["token_ids"].tolist())
    return [
        Pair(**{name: tuple(islice(remaining, length)) for name, length in zip(PARTS, row, strict=True)})
        for row in tensors["lengths"].tolist()
    ]
