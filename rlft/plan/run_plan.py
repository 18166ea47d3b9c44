"""The plan of a run of any command: everything that is known about it before a weight is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rlft.config.model import LoraSettings, Recompute
from rlft.logger.forecast import number_due
from rlft.logger.interface import Logger
from rlft.plan.advice import advice_for

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
