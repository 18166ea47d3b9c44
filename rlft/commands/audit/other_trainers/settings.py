"""The settings of another trainer's loss, by TRL's names, with the defaults of TRL 1.16 and of verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from rlft.config.bounds import NonNegativeFloat, PositiveFloat, PositiveInt


class Trainer(StrEnum):
    """Whose run it is, which decides the defaults."""

    trl = "trl"
    verl = "verl"


class LossType(StrEnum):
    """How the losses of tokens become that of an update (docs/audit.md), and for cispo and sapo what they are."""

    grpo = "grpo"
    bnpo = "bnpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    luspo = "luspo"
    cispo = "cispo"
    sapo = "sapo"

    @property
    def of_all_tokens(self) -> bool:
        """Whether losses are divided by the tokens of all that was sampled, so that those of micro-batches add up."""
        return self in (LossType.dapo, LossType.cispo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the recomputed numbers depend on.

    Attributes:
        scale_rewards: what advantages are divided by: a group's standard deviation, that of the step, or nothing.
        std: sample (divided by n - 1) or population (n).
        eps: added to the standard deviation.
        reward_weights: in the order of the rewards; None: all are 1.
        reward_columns: the columns of TRL's table that are rewards; None: all with numbers.
        num_generations: rows of a group in TRL's table; None: rows in a row with the same prompt are one.
        multi_objective_aggregation: whether rewards are added before or after they are normalised.
        epsilon, epsilon_high: the clip range is 1 - epsilon .. 1 + epsilon_high; for cispo the cap is epsilon_high.
        delta: the largest ratio where the advantage is negative (dual clip); None: none.
        beta, kl_estimator: coefficient and estimator of the KL to the reference in the loss.
        max_completion_length: in tokens, for dr_grpo.
        divide_by_micro_batches: whether an update's loss is the mean, not the sum, of its micro-batches'; None: as
            loss_type has it.
        also_in_loss: terms of the loss that are not in the file, which therefore cannot be recomputed.
    """

    scale_rewards: Literal["group", "batch", "none"] = "group"
    std: Literal["sample", "population"] = "sample"
    eps: NonNegativeFloat = 1e-4
    reward_weights: Sequence[float] | None = None
    reward_columns: Sequence[str] | None = None
    num_generations: PositiveInt | None = None
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    loss_type: LossType = LossType.dapo
    mask_truncated_completions: bool = False
    importance_sampling_level: Literal["token", "sequence"] = "token"
    epsilon: NonNegativeFloat = 0.2
    epsilon_high: NonNegativeFloat | None = None
    delta: PositiveFloat | None = None
    beta: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3_unbiased"
    max_completion_length: PositiveInt | None = None
    sapo_temperature_pos: PositiveFloat = 1.0
    sapo_temperature_neg: PositiveFloat = 1.05
    divide_by_micro_batches: bool | None = None
    also_in_loss: Sequence[str] = ()

    @property
    def clip_high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def averages_micro_batches(self) -> bool:
        given = self.divide_by_micro_batches
        return not self.loss_type.of_all_tokens if given is None else given

    def weights(self, number: int) -> list[float]:
        """The weights of so many rewards."""
        return [1.0] * number if self.reward_weights is None else list(self.reward_weights)


DEFAULTS: Mapping[Trainer, Mapping[str, Any]] = {
    Trainer.trl: {},
    Trainer.verl: {"eps": 1e-6, "loss_type": "bnpo", "delta": 3.0, "kl_estimator": "k3"},
}
"""What differs from the defaults above, which are TRL's."""
