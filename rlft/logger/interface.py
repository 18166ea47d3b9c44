"""What watches a run, and what it is told of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlft.runs.lines import StepRecord
from rlft.types import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What the loggers get at the start of a run."""

    folder: Path
    name: str  # the config's name
    config: Mapping[str, Any]  # the plain config
    step: int  # 0, or that of the checkpoint from which a run is resumed
    steps: int  # those of the whole run
    # Rows of the start-up table that are known since the model is loaded, (what, value, explanation).
    sizes: Sequence[tuple[str, str, str]]
    watched: tuple[str, str] = ("reward", "reward/mean")  # (word, metric) of the number whose curve is shown


class Logger(Protocol):
    """Where a run's numbers go. Calls come in order: start, then stage/step/evaluation, then finish exactly once.
    One that inherits from this class ignores what it does not define.
    """

    def start(self, run: RunInfo) -> None:
        """The run begins, or goes on."""

    def stage(self, name: str) -> None:
        """The loop enters a stage: sample, score, credit, update, publish, log, evaluate, seal, checkpoint."""

    def step(self, record: StepRecord) -> None:
        """A step is finished."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """The policy has been evaluated."""

    def note(self, text: str) -> None:
        """A plain-word hint or warning for the person watching."""

    def finish(self, status: str) -> None:
        """`finished`, `interrupted`, or the reason why the run stopped."""
