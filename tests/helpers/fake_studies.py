"""Studies whose runs are a function of values, step and seed: they leave evaluations and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlft.commands.sweep.config import StudyConfig
from rlft.commands.sweep.runs import PrunedError, Run, Study
from rlft.commands.sweep.space import Choice, Interval, Space
from rlft.commands.sweep.trials import Trials

STEPS, EVERY = 9, 1
RATE = Interval(key="trainer.lr", low=1e-5, high=1e-2, whole=False, log=True)
RANK = Choice(key="lora.rank", values=("4", "16"))
ALGORITHM = Choice(key="algorithm", values=("grpo", "gspo"))


def keys(**changed: Any) -> StudyConfig:
    usual: dict[str, Any] = {"trials": 12, "sampler": "tpe", "seeds": 1, "metric": "accuracy", "pruner": "none"}
    usual["direction"] = "auto"
    return StudyConfig(**{**usual, "startup": 3, "seed": 0, **changed})


def accuracy(params: Mapping[str, Any], step: int, seed: int) -> float:
    """Best at a rate of 1e-3 with rank 16 and gspo; rises with the steps, and differs a little between seeds."""
    off = abs(math.log10(params.get("trainer.lr", 1e-3)) + 3.0)
    bonus = 0.1 * (params.get("lora.rank") == "16") + 0.2 * (params.get("algorithm") == "gspo")
    return (0.7 - 0.2 * off + bonus) * step / STEPS + 0.001 * seed


class FakeRuns:
    """Does runs by writing their evaluations; `before` is called before each with (run, step). ran: (trial, seed)."""

    def __init__(
        self,
        value: Callable[[Mapping[str, Any], int, int], float] = accuracy,
        before: Callable[[Run, int], None] = lambda run, step: None,
        steps: int = STEPS,
    ) -> None:
        self.value, self.before, self.steps = value, before, steps
        self.ran: list[tuple[int, int]] = []

    def __call__(self, run: Run, report_new: Callable[[], bool]) -> None:
        self.ran.append((run.trial.number, run.seed))
        write(run.folder, [])
        lines = [line(0, 0.05)]
        for step in range(EVERY, self.steps + 1, EVERY):
            self.before(run, step)
            lines.append(line(step, self.value(run.trial.params, step, run.seed)))
            write(run.folder, lines)
            if report_new():
                raise PrunedError


def line(step: int, value: float) -> dict[str, Any]:
    """eval/reward/format is 1 - accuracy, so that another metric has another best trial."""
    finite = math.isfinite(value)
    others = {"eval/loss": -value, "eval/reward/format": 1.0 - value} if finite else {}
    return {"step": step, "accuracy": value if finite else None, **others}


def write(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))


def make_trials(folder: Path, config: StudyConfig, space: Space, *, lower: bool = False, steps: int = STEPS) -> Trials:
    return Trials(folder, config, space, lower=lower, steps=steps, first_evaluation=EVERY, parallel=False)


def make_study(
    folder: Path,
    config: StudyConfig,
    *varied: Choice | Interval,
    said: list[str] | None = None,
    lower: bool = False,
    steps: int = STEPS,
) -> Study:
    space = Space(fixed=(), varied=varied or (RATE, RANK, ALGORITHM))
    trials = make_trials(folder, config, space, lower=lower, steps=steps)
    return Study(
        trials,
        folder,
        seeds=range(config.seeds),
        steps=steps,
        metric="eval/loss" if lower else config.metric,
        total=config.trials if isinstance(config.trials, int) else space.size or 0,
        name=lambda trial: " ".join(space.chosen(trial.params)),
        say=(said if said is not None else []).append,
    )
