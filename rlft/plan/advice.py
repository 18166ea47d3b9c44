"""What is published about a run's learning rate and rank, and whether its own are ten times off.

Published are values for models of half a billion parameters and more, with their sources in
docs/explanation/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlft.config.model import EMBEDDED
from rlft.config.trainer import OptimizerKind

FAR = 10
SMALL = 100_000_000  # parameters of a model for which no published value says much

UNSLOTH, TINKER, REGRET = "Unsloth's guide", "Tinker's cookbook", "LoRA Without Regret"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The published values of a key, lowest and highest; both None where there are none."""

    key: str
    value: float
    low: float | None = None
    high: float | None = None
    why: str  # the sources, or why there are no values
    least: float | None = (
        None  # of rlft's recipes for a model that ships with it, which learns nothing far below; or None
    )

    @property
    def warning(self) -> str | None:
        """A warning about a value that is more than ten times off; else None."""
        if self.least is not None and self.value < self.least / FAR:
            problem = f"is more than {FAR} times below that of {RECIPES}, which learn next to nothing there"
            return f"{self.key}: {problem}, got {self.value:g}; write {self.key}={self.least:g}"
        if self.low is None or self.high is None or self.low / FAR <= self.value <= self.high * FAR:
            return None
        where = "below" if self.value < self.low else "above"
        problem = f"is more than {FAR} times {where} published values ({self.why})"
        return f"{self.key}: {problem}, got {self.value:g}; they are from {self.low:g} to {self.high:g}"

    @property
    def row(self) -> tuple[str, str, str]:
        published = "" if self.low is None else f"published: {self.low:g} to {self.high:g}, "
        return self.key, f"{self.value:g}", published + self.why


RECIPES = "rlft's recipes for embedded models"
EMBEDDED_RATE = 1e-3  # the lowest learning rate of an adapter in those recipes, whatever the command

RATES: dict[tuple[str, bool], tuple[float, float, str]] = {
    ("train", True): (5e-6, 1e-4, f"{UNSLOTH} for GRPO and {TINKER} for mathematics"),
    ("train", False): (1e-6, 2e-5, "TRL's default for GRPO and Open-R1's recipe for 1.5B"),
    ("dpo", True): (5e-6, 1e-4, f"{UNSLOTH} for DPO and {TINKER} for RL"),
    ("sft", True): (1e-4, 1e-3, f"{TINKER}'s sweep of models"),
    ("sft", False): (1e-5, 1e-4, f"{TINKER}: a tenth of LoRA's"),
}
"""{(command, whether it trains an adapter): lowest and highest learning rate of AdamW, sources}."""

RANKS = {
    "train": (1, 32, f"{REGRET}: 1 is enough for RL; {TINKER}: 32"),
    "dpo": (1, 32, f"{REGRET}, of RL; {TINKER}: 32"),
    "sft": (32, 256, f"{TINKER}: 32; {REGRET}: 256 for large data"),
}


def advice_for(config: Any, parameters: int) -> Iterator[Advice]:
    """The advice on trainer.lr and lora.rank of a run that trains, on a base of so many parameters."""
    trainer, lora = getattr(config, "trainer", None), getattr(config, "lora", None)
    if trainer is None or config.command not in ("train", "sft", "rm", "dpo"):
        return
    rate = None if trainer.optimizer == OptimizerKind.muon else RATES.get((config.command, lora is not None))
    of_what = f"optimizer {trainer.optimizer}" if trainer.optimizer == OptimizerKind.muon else f"rlft {config.command}"
    of_rate = _advice("trainer.lr", trainer.lr, rate, parameters, of_what)
    is_known = lora is not None and trainer.optimizer == OptimizerKind.adamw
    if parameters < SMALL and is_known and config.model.path.startswith(EMBEDDED):
        of_rate = replace(of_rate, why=f"{of_rate.why}; {RECIPES}: {EMBEDDED_RATE:g} or more", least=EMBEDDED_RATE)
    yield of_rate
    if lora is not None:
        yield _advice("lora.rank", lora.rank, RANKS.get(config.command), parameters, f"rlft {config.command}")


def _advice(key: str, value: float, rule: tuple[float, float, str] | None, parameters: int, of_what: str) -> Advice:
    if parameters < SMALL:
        return Advice(key=key, value=value, why=f"no published value is for a model of {parameters:,} parameters")
    if rule is None:
        return Advice(key=key, value=value, why=f"no published value was found for {of_what}")
    low, high, why = rule
    return Advice(key=key, value=value, low=low, high=high, why=why)
