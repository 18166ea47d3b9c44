"""The plan of `rlft dpo`, made before a weight is loaded; bad input is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlft.algorithm.preference.preference_loss import PreferenceLoss
from rlft.config.schema import DpoConfig
from rlft.generation.memory import ModelSizes
from rlft.model.adapter_folder import num_parameters
from rlft.plan import rules
from rlft.plan.dpo_checks import REFERENCE, check_config, reference_of, uses_of
from rlft.plan.memory_parts import Demand
from rlft.plan.ranking_plan import RankingPlan, read_inputs
from rlft.plan.startup_table import TableRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoPlan(RankingPlan):
    """The plan of `rlft dpo`.

    Attributes:
        loss: the loss of a ranking.
        reference: what the loss compares the policy with: `none`, `base`, or the folder of an adapter.
    """

    config: DpoConfig
    loss: PreferenceLoss
    reference: str

    def positions(self, step: int) -> list[int]:
        """The positions of the training rankings of the update after `step` steps."""
        return self.train.positions(self.config.seed, step, self.num_new, "rankings")

    @property
    def has_reference_adapter(self) -> bool:
        return self.reference not in ("none", "base")

    @property
    def _reference_parameters(self) -> int:
        """Number of parameters of the reference's adapter, as its folder has it."""
        return num_parameters(self.reference, REFERENCE) if self.has_reference_adapter else 0

    @property
    def reference_fingerprint(self) -> str:
        """Fingerprint of what the reference's log-probs depend on: the preferences, the base, and its adapter."""
        key = next((k for k in (REFERENCE, "lora.path") if f"{k}_fingerprint" in self.fingerprints), "")
        adapter = self.fingerprints[f"{key}_fingerprint"] if self.has_reference_adapter else "base"
        return f"{self.fingerprints['preferences_fingerprint']} {self.fingerprints['base_fingerprint']} {adapter}"

    @property
    def saved_beside(self) -> int:
        """The reference's log-probs of all completions, in float64, and one position per ranking, in int64."""
        if self.reference == "none":
            return 0
        return 2 * sum(1 + len(ranking.completions) for ranking in self.train.rankings)

    def own_rows(self) -> list[TableRow]:
        section = dict(self.config.loss)
        name = section.pop("_target_").rsplit(".", 2)[-2]
        keys = ", ".join(f"{key} {str(value).lower()}" for key, value in section.items())
        explained = {
            "none": "the loss needs none",
            "base": "no adapter; its log-probs are computed once for each completion",
        }
        from_an_adapter = f"its log-probs are computed once for each completion; {self.reference}"
        reference_name = "adapter" if self.has_reference_adapter else self.reference
        return [("loss", name, keys), ("reference", reference_name, explained.get(self.reference, from_an_adapter))]

    def demand(self, model: ModelSizes, recompute: bool) -> Demand:
        """The demand of the policy's adapter, and of the reference's where it has one."""
        demand = self.demand_of(model, recompute, adapters=1, trainable=model.lora, through_head=True)
        return replace(demand, frozen=self._reference_parameters)

    def parameters(self, model: ModelSizes) -> dict[str, int]:
        reference = {"reference (frozen)": self._reference_parameters} if self.has_reference_adapter else {}
        return {"base (frozen)": model.parameters, "policy (learns)": model.lora, **reference}


def make_plan(plain: Mapping[str, Any], *, runs_here: bool = True) -> DpoPlan:
    """Checks the whole config, reads the model's config.json and tokenizer, and scans the data.

    Args:
        plain: the resolved config.
        runs_here: False if the run is only planned, so that the libraries for 4-bit weights may be missing.

    Raises:
        UserError: the config, the model or the data are wrong.
    """
    config, loss, loggers = check_config(plain)
    inputs = read_inputs(config, uses_of(config, loss), runs_here=runs_here)
    size = config.rankings_per_step
    rules.check_enough("rankings_per_step", size, size, len(inputs.train.rankings), "rankings")
    return DpoPlan(
        config=config,
        plain=plain,
        engine=None,
        train=inputs.train,
        held_out=inputs.held_out,
        loss=loss,
        reference=reference_of(config, loss),
        loggers=loggers,
        ends=inputs.ends,
        fingerprints=inputs.fingerprints,
        notes=inputs.notes,
    )
