"""The plan of a run of any command: what is known before a weight is loaded, and advice on its rate and rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from rlft.config.model import EMBEDDED, LoraSettings, Recompute
from rlft.config.trainer import OptimizerKind
from rlft.logger.forecast import number_due
from rlft.logger.interface import Logger

if TYPE_CHECKING:  # not at run time: a command from outside the tree plans in the module that `rlft --help` imports
    from rlft.data.prompts import PromptSet
    from rlft.generation.memory import ModelSizes
    from rlft.plan.demand import Demand
    from rlft.plan.roofline import StepWork
    from rlft.plan.startup_table import Facts, TableRow
    from rlft.tokens.ends import TurnEnds

LINE = 2048  # bytes of a line of metrics or of the chain, or of a completion's line besides its text and tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The numbers of a run's steps, evaluations and checkpoints."""

    steps: int
    first_evaluation: int | None  # number of steps before the first one that follows a step; None without evaluations
    evaluations: int  # the one before the first step included
    checkpoints: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ABC):
    """The plan that every command makes; the defaults here are for a command that has nothing of the kind."""

    config: Any  # the command's typed config
    plain: Mapping[str, Any]  # the resolved config as dicts and lists
    fingerprints: Mapping[str, str]  # {<section>_fingerprint: that of its data or weights}; a resume needs the same
    engine: str | None  # the name of the engine that samples; None if nothing is sampled
    notes: tuple[str, ...] = ()  # what the person watching should know about its config, data, tokenizer and rewards
    loggers: tuple[Logger, ...] = ()  # receive the numbers of each step, after the run's own files and the console
    ends: TurnEnds | None = None  # what ends a turn; None for a command that does not say

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number of steps of the whole run."""

    @property
    def schedule(self) -> Schedule:
        evaluates, saves = (getattr(self.config, name, None) for name in ("eval", "checkpoint"))
        every = 0 if evaluates is None else evaluates.every
        return Schedule(
            steps=self.num_steps,
            first_evaluation=min(every, self.num_steps) if every else None,
            evaluations=1 + number_due(every, self.num_steps) if every else 0,
            checkpoints=0 if saves is None else number_due(saves.every, self.num_steps),
        )

    @property
    def lora_settings(self) -> LoraSettings | None:
        """The shape of the run's adapters; None if the base itself is trained."""
        return self.config.lora

    @property
    def images(self) -> int:
        """The most images of a prompt that is sampled."""
        return 0

    @property
    def scored_prompts(self) -> PromptSet | None:
        """Prompts whose completions the rewards of `config.reward` score; None if nothing is scored."""
        return None

    def sampled_by(self, engine: str, itemsize: int) -> Self:
        """The plan of the run with the engine that `auto` chooses where a weight has these bytes, for `rlft plan`."""
        return self

    def notes_with(self, facts: Facts) -> list[str]:
        """All notes with which the run begins; facts: of its model, loaded or planned.

        `rlft plan`, `rlft reward try` and the start of a run print this list. Only what is measured with the weights is
        known later: that packed and padded log-probs differ, that kernels were removed, how adapters are compared.
        """
        advice = advice_for(self.config, facts.base)
        return [*self.notes, *(one.warning for one in advice if one.warning), *facts.notes]

    def planned_rows(self) -> list[TableRow]:
        """The rows of the start-up table that are known before weights are loaded, without those of the config."""
        return self.end_rows()

    def end_rows(self) -> list[TableRow]:
        """The row of the start-up table about what ends a turn."""
        return [] if self.ends is None else [self.ends.row]

    def loaded_rows(self, facts: Facts) -> list[TableRow]:
        """The rows of the start-up table that the model adds, once it is loaded."""
        return facts.rows()

    def demand(self, model: ModelSizes, recompute: Recompute) -> Demand | None:
        """The memory demand, with gradient checkpointing if `recompute`; if None, `rlft plan` refuses the command."""
        return None

    def step_work(self) -> StepWork | None:
        """What a step and an evaluation compute, by which `rlft plan` estimates their time; None: that is not known."""
        return None

    def parameters(self, model: ModelSizes) -> dict[str, int]:
        """{name: number of parameters} of the base and every role."""
        return {"base (frozen)": model.parameters}

    def lengths(self) -> dict[str, Sequence[int]]:
        """{name of some data: the number of tokens of each item}"""
        return {}

    def disk_bytes(self, model: ModelSizes | None = None) -> dict[str, int]:
        """{part: the most bytes that it may take on disk}; `model` holds the sizes of the base if known already."""
        return {}

    def metrics_bytes(self, examples: int = 0) -> dict[str, int]:
        """The parts of `disk_bytes` for the lines of steps and evaluations.

        examples: bytes of the completions in an evaluation's line.
        """
        every = self.config.eval.every
        evaluations = 2 + self.num_steps // every if every else 0
        metrics = LINE * (self.num_steps + evaluations) + evaluations * examples
        return {"chain": LINE * (self.num_steps + 1), "metrics": metrics}


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
