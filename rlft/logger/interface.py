"""What watches a run, and what it is told of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlft.types import Evaluation, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of each token of a completion, log-probs and entropies in nats; None where the policy did not sample it.

    Attributes:
        text: the text that the token adds.
        old: its log-prob by the policy that sampled it, as the trainer computes it.
        after: its log-prob by the policy after the update.
        reference: its log-prob by the reference, or by the bare base if there is no reference; None for all tokens if
            neither is held.
        entropy: the entropy of the policy's distribution at this token after the update.
        advantage: the advantage that it was trained with.
    """

    text: Sequence[str]
    old: Sequence[float | None]
    after: Sequence[float | None]
    reference: Sequence[float | None]
    entropy: Sequence[float | None]
    advantage: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What the loggers get of a finished step.

    Attributes:
        step: the number of finished steps, from 1.
        groups: the completions that were trained on.
        rewards: {reward: its unweighted scores, `[P, G]`}.
        total_rewards: the weighted totals, `[P, G]`.
        advantages: the mean advantage over each completion's tokens, `[P, G]`.
        tokens: {row of the step's completions: the values of its tokens}, of a few completions.
        alarms: {name: text}.
    """

    step: int
    metrics: Mapping[str, float]
    groups: Sequence[Group]
    rewards: Mapping[str, Sequence[Sequence[float]]]
    total_rewards: Sequence[Sequence[float]]
    advantages: Sequence[Sequence[float]]
    tokens: Mapping[int, TokenValues] = field(default_factory=dict)
    alarms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What the loggers get at the start of a run.

    Attributes:
        name, config: the config's name, and the plain config.
        step: 0, or the step of the checkpoint that a resumed run continues from.
        steps: steps of the whole run.
        sizes: rows of the start-up table, (what, value, explanation).
        watched: (word, metric) of the number whose curve is shown.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    step: int
    steps: int
    sizes: Sequence[tuple[str, str, str]]
    watched: tuple[str, str] = ("reward", "reward/mean")


class Logger(Protocol):
    """Where a run's numbers go. Calls come in order: start, then stage/step/evaluation, then finish exactly once.
    One that inherits from this class ignores what it does not define.

    A class may say what it is by an attribute: `writes_metrics = True`: it leaves metrics.jsonl and eval.jsonl in the
    run's folder, which `rlft watch` and `rlft report` read; `has_page = True`: it draws on the terminal, where the page
    of the run is printed at its end. What a YAML or a section is called decides nothing.
    """

    def start(self, run: RunInfo) -> None:
        """The run begins, or goes on."""

    def stage(self, name: str) -> None:
        """The loop enters a stage: sample, score, credit, update, publish, evaluate, checkpoint."""

    def step(self, record: StepRecord) -> None:
        """A step is finished."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """The policy has been evaluated."""

    def note(self, text: str) -> None:
        """A plain-word hint or warning for the person watching."""

    def finish(self, status: str) -> None:
        """`finished`, `interrupted`, or the reason why the run stopped."""
