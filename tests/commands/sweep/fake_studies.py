"""Studies whose runs are a function of values, step and seed: they leave evaluations and nothing else."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlft.commands.sweep.checks import Checked
from rlft.commands.sweep.driver import Driver, InThisProcess, PrunedError, Run
from rlft.commands.sweep.space import Choice, Interval, Space, StudyConfig
from rlft.commands.sweep.study import Study, Trial, TrialRun, Trials
from rlft.config.overrides import parse
from rlft.runs.lines import silent

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
        before: Callable[[TrialRun, int], None] = lambda run, step: None,
        steps: int = STEPS,
    ) -> None:
        self.value, self.before, self.steps = value, before, steps
        self.ran: list[tuple[int, int]] = []

    def __call__(self, run: TrialRun, is_pruned: Callable[[], bool]) -> None:
        self.ran.append((run.trial.number, run.seed))
        write(run.folder, [])
        lines = [line(0, 0.05)]
        for step in range(EVERY, self.steps + 1, EVERY):
            self.before(run, step)
            lines.append(line(step, self.value(run.trial.params, step, run.seed)))
            write(run.folder, lines)
            if is_pruned():
                raise PrunedError


DoRun = Callable[[TrialRun, Callable[[], bool]], None]
"""Does a run to its end, or raises PrunedError or what stops it."""


class Here(InThisProcess):
    """Does made-up runs in this process."""

    def __init__(self, do: DoRun) -> None:
        super().__init__("train", None, None, silent, prunes=True)
        self._made_up: Any = do

    def _do(self, run: Run, is_pruned: Callable[[], bool]) -> None:
        self._made_up(run, is_pruned)


def do_all(study: Study, do: DoRun, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Does all trials of a study, one run after the other."""
    Driver(study, Here(do), 1, interrupted).run()


def line(step: int, value: float) -> dict[str, Any]:
    """eval/reward/format is 1 - accuracy, so that another metric has another best trial."""
    finite = math.isfinite(value)
    others = {"eval/loss": -value, "eval/reward/format": 1.0 - value} if finite else {}
    return {"step": step, "accuracy": value if finite else None, **others}


def write(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))


def make_trials(folder: Path, config: StudyConfig, space: Space, *, lower: bool = False, steps: int = STEPS) -> Trials:
    folder.mkdir(exist_ok=True)
    return Trials(folder, config, space, lower=lower, steps=steps, first_evaluation=EVERY, parallel=False)


def make_study(
    folder: Path, config: StudyConfig, *varied: Choice | Interval, lower: bool = False, steps: int = STEPS
) -> Study:
    space = Space(fixed=(), varied=varied or (RATE, RANK, ALGORITHM))
    plan: Any = SimpleNamespace(num_steps=steps)
    config_of_corner: Any = SimpleNamespace(plain={"seed": 0})
    checked = Checked(
        command="train",
        parsed=parse(["-m"]),
        space=space,
        configs=[config_of_corner],
        cluster=None,
        on_gpus=False,
        plans={0: plan},
    )
    config = replace(config, metric="eval/loss" if lower else config.metric)
    return Study(make_trials(folder, config, space, lower=lower, steps=steps), folder, checked, config)


def make_and_do(folder: Path, config: StudyConfig, *varied: Choice | Interval, runs: DoRun | None = None) -> Study:
    """The study in this folder, with all its trials done."""
    study = make_study(folder, config, *varied)
    do_all(study, FakeRuns() if runs is None else runs)
    return study


def by_number(study: Study) -> list[Trial]:
    return sorted(study.trials.rows(), key=lambda row: row.number)


def states(study: Study) -> list[str]:
    """What became of the trials, in the order in which they were drawn."""
    return [row.state for row in by_number(study)]
