"""The plan of a run of any command: what is known before a weight is loaded, advice, and rows of the start-up table.

Rows are printed in the order in which they become known: before torch is imported those of the config, before weights
are loaded those of the plan (`Plan.planned_rows`), and then those of the loaded model (`Plan.loaded_rows`). Advice is
about a learning rate or rank that is ten times off published values, whose sources are in
docs/explanation/algorithms.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from rlft.config.instantiate import component_name
from rlft.config.keys import ABSENT
from rlft.config.model import EMBEDDED, LoraSettings, Recompute
from rlft.config.schema import DpoConfig, RankingRoot, RmConfig, RunConfig, SftConfig
from rlft.config.trainer import OptimizerKind
from rlft.environment.protocol import read_environment
from rlft.generation.engine import NO_FACTS, EngineFacts
from rlft.runs.forecast import number_due
from rlft.system.files import asset
from rlft.system.machine import multiplies_in
from rlft.types import counted

if TYPE_CHECKING:  # not at run time: a command from outside the tree plans in the module that `rlft --help` imports
    from torch import nn
    from torch.nn import Parameter

    from rlft.data.prompts import PromptSet
    from rlft.generation.memory import Decoding, ModelSizes
    from rlft.model.kernels.selection import Decision
    from rlft.plan.demand import Demand
    from rlft.plan.roofline import StepWork
    from rlft.tokens.text import TurnEnds

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
    loggers: tuple[Any, ...] = ()  # `rlft.logger.interface.Logger`s, which follow the run's own files and the console
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
    def decodings(self) -> Sequence[Decoding]:
        """What the engine is asked to sample, the first of them for a step."""
        return ()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The published values of a key, lowest and highest; both None where there are none."""

    key: str
    value: float
    low: float | None = None
    high: float | None = None
    why: str  # the sources, or why there are no values
    least: float | None = None  # of rlft's recipes for a model that ships with it, which learns nothing far below

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

RATES, RANKS = asset("advice.yaml")["trainer.lr"], asset("advice.yaml")["lora.rank"]
"""{command: lowest and highest published value, sources}."""


def advice_for(config: Any, parameters: int) -> Iterator[Advice]:
    """The advice on trainer.lr and lora.rank of a run that trains, on a base of so many parameters."""
    trainer, lora = getattr(config, "trainer", None), getattr(config, "lora", None)
    if trainer is None or config.command not in ("train", "sft", "rm", "dpo"):
        return
    trained = config.command if lora is not None else f"{config.command} of all weights"
    rate = None if trainer.optimizer == OptimizerKind.muon else RATES.get(trained)
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


# -- rows of the start-up table ----------------------------------------------------------------------------------------
TableRow = tuple[str, str, str]  # (name, value, explanation)


def config_rows(config: Any) -> list[TableRow]:
    """The rows that the config alone decides; it is any command's."""
    lora: Any = getattr(config, "lora", ABSENT)
    learner = "trains all weights" if lora is None else "" if lora is ABSENT else f"trains {lora.kind} rank {lora.rank}"
    rows = [("model", config.model.path, learner + " and a scalar head" * isinstance(config, RmConfig))]
    if isinstance(config, RunConfig):
        rows += _rows_of_train(config)
    if isinstance(config, SftConfig):
        rows += [("a step", str(config.examples_per_step), "demonstrations in one optimizer update")]
    if isinstance(config, DpoConfig):
        section = dict(config.loss)
        name = component_name(section.pop("_target_"))
        rows += [("loss", name, ", ".join(f"{key} {str(value).lower()}" for key, value in section.items()))]
    if isinstance(config, RankingRoot):
        rows += [("a step", str(config.rankings_per_step), "rankings in one optimizer update")]
    return rows


def _rows_of_train(run: RunConfig) -> list[TableRow]:
    completions, environment = run.completions_per_step, read_environment(run.environment)
    rewards = [f"{name} x {reward['weight']:g}" for name, reward in run.reward.items()]
    rewards += ["the environment's"] * (environment is not None and environment.rewards_turns)
    groups = f"{counted(run.prompts_per_step, 'prompt')} x group of {run.group_size}"
    minibatches = f"{counted(run.epochs, 'epoch')} x {counted(run.minibatches, 'minibatch')}"
    minibatches += f" of {counted(completions // run.minibatches, 'completion')}"
    return [
        ("algorithm", run.algorithm["_target_"].rpartition(".")[2], f"rewards: {', '.join(rewards)}"),
        ("completions a step", f"{completions:,}", f"{groups}, up to {counted(run.generation.max_tokens, 'token')}"),
        ("updates a step", str(run.updates_per_step), minibatches),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a model, loaded or planned."""

    base: int  # number of the base's parameters
    trainable: int  # number of trained parameters
    dtype: str  # the compute dtype
    device: str
    forward: str  # "packed" or "padded" rows
    reason: str  # why they are packed or padded
    kernels: Decision
    # (copies of the base in trainer and engine together, what they share or why they cannot); None where the engine has
    # no base of its own.
    base_copies: tuple[int, str] | None = None
    engine: EngineFacts = NO_FACTS  # what a live engine says of itself
    # (layers with an adapter, layers without one, number of weights of the former); empty without adapters.
    layer_kinds: tuple[str, str, int] = ("", "", 0)

    def rows(self) -> list[TableRow]:
        """The sizes, the layers with adapters, the engine's rows, and how rows go through the network."""
        rows = [("parameters", f"{self.base:,}", f"of the base, {self.dtype} on {self.device}")]
        if self.trainable:
            share = f"{self.trainable / self.base:.2%} of the parameters of the base"
            rows.append(("trainable", f"{self.trainable:,}", share))
        adapted, others, number = self.layer_kinds
        if adapted:
            weights = f"with {number:,} of {self.base:,} weights"
            rows.append(("adapted layers", adapted, f"{weights}; not {others}" if others else weights))
        if self.base_copies is not None:
            rows.append(("copies of the base", str(self.base_copies[0]), self.base_copies[1]))
        rows += self.engine.rows
        kernels = "; ".join(filter(None, (self.kernels.reason, self.kernels.modules)))
        rows.append(("forward", self.forward, self.reason.removeprefix("padded rows: ")))
        return [*rows, ("kernels", str(self.kernels.choice), kernels)]

    @property
    def notes(self) -> list[str]:
        """Notes about a model that takes more time than it has to."""
        notes = [*self.engine.notes, *([] if self.forward == "packed" else [self.reason])]
        if not self.kernels.requested:
            why = self.kernels.reason
            notes.append(f"model.kernels: plain instead of auto, which takes more time and memory: {why}")
        if slow := slow_dtype(self.dtype, self.device):
            notes.append(slow)
        return notes


def slow_dtype(dtype: str, device: str) -> str | None:
    """A note if the processor has to emulate this dtype; None if it does not, or the device is no CPU."""
    if device != "cpu" or multiplies_in(dtype):
        return None
    problem = "this processor has no instructions for it, so that products take about ten times as long as in float32"
    return f"model.dtype: {problem}, got {dtype}; use model.dtype=float32, which auto is on a CPU"


def facts_of(
    model: nn.Module,
    learning: Iterable[tuple[str, Parameter]],
    backbone: Any,
    forward: Any,
    base_copies: tuple[int, str] | None = None,
    engine: EngineFacts = NO_FACTS,
) -> Facts:
    """The facts about a loaded model with these trained parameters."""
    from rlft.model.lora_config import adapted_words  # with torch, which rows of a config do without

    return Facts(
        base=sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name),
        trainable=sum(p.numel() for _, p in learning),
        dtype=str(backbone.model.dtype).removeprefix("torch."),
        device=str(backbone.device),
        forward="packed" if forward.packed else "padded",
        reason=forward.reason,
        kernels=backbone.kernels.decision,
        base_copies=base_copies,
        engine=engine,
        layer_kinds=adapted_words(model),
    )
