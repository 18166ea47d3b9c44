"""The plan of `rlft rm`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlft.config.schema import RmConfig
from rlft.data.examples import RankedTokens, Rankings
from rlft.generation.memory import ModelSizes
from rlft.plan import rules
from rlft.plan.memory_parts import Demand
from rlft.plan.ranking_plan import RankingPlan, read_inputs, scanned
from rlft.plan.rm_checks import check_config, replayed, uses_of
from rlft.types import Split, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RmPlan(RankingPlan):
    """The plan of `rlft rm`; `replay` holds rankings of earlier rounds, or None."""

    config: RmConfig
    replay: Rankings | None

    @property
    def num_new(self) -> int:
        """The number of this round's rankings in an update, at least one."""
        size = self.config.rankings_per_step
        return size if self.replay is None else max(1, size - round(size * self.config.replay.fraction))

    @property
    def learner(self) -> str:
        return f"{self.config.lora.kind} rank {self.config.lora.rank} and a scalar head"

    @property
    def note_of_update(self) -> str:
        return "" if self.replay is None else f", {self.config.rankings_per_step - self.num_new} of them replayed"

    def at(self, step: int) -> list[RankedTokens]:
        """The rankings of the update after `step` steps: this round's, then the replayed ones."""
        rankings = self.train.at(self.config.seed, step, self.num_new, "rankings")
        num_replayed = self.config.rankings_per_step - self.num_new
        if self.replay is None or not num_replayed:
            return rankings
        return [*rankings, *self.replay.at(self.config.seed, step, num_replayed, "replay")]

    def demand(self, model: ModelSizes, recompute: bool) -> Demand:
        """The demand of an adapter and a scalar head beside the policy's adapter; the LM head is not used."""
        trainable = model.lora + model.hidden
        return self.demand_of(model, recompute, adapters=2, trainable=trainable, through_head=False)

    def parameters(self, model: ModelSizes) -> dict[str, int]:
        return {"base (frozen)": model.parameters, "reward (learns)": model.lora + model.hidden + 1}


def make_plan(plain: Mapping[str, Any], *, runs_here: bool = True) -> RmPlan:
    """Checks the whole config, reads the model's config.json and tokenizer, and scans the data.

    Args:
        plain: the resolved config.
        runs_here: False if the run is only planned, so that the libraries for 4-bit weights may be missing.

    Raises:
        UserError: the config, the model or the data are wrong.
    """
    config, loggers = check_config(plain)
    inputs = read_inputs(config, uses_of(config), runs_here=runs_here)
    replay, notes = None, list[str]()
    if config.replay.path is not None:
        try:
            replay, notes = scanned(config, replayed(config), inputs.tokenizer, Split.train)
        except UserError as error:
            raise UserError("replay.path", error.problem, got=error.got, remedy=error.remedy) from None
    plan = RmPlan(
        config=config,
        plain=plain,
        engine=None,
        train=inputs.train,
        held_out=inputs.held_out,
        replay=replay,
        loggers=loggers,
        ends=inputs.ends,
        fingerprints={
            **inputs.fingerprints,
            **({} if replay is None else {"replay_fingerprint": replay.fingerprint}),
        },
        notes=(*inputs.notes, *notes),
    )
    if replay is not None and plan.num_new == config.rankings_per_step:
        problem = f"gives the replay none of the {plan.num_new} rankings of an update"
        remedy = "raise it or rankings_per_step, or leave replay.path out"
        raise UserError("replay.fraction", problem, got=config.replay.fraction, remedy=remedy)
    size, available = config.rankings_per_step, len(inputs.train.rankings)
    rules.check_enough("rankings_per_step", size, plan.num_new, available, "rankings")
    return plan
