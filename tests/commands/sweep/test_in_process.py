"""A run of a study in this process: its words, and how it is pruned at an evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_studies import RATE

from rlft.commands.sweep.in_process import _do_run, words_of
from rlft.commands.sweep.measure import curve
from rlft.commands.sweep.runs import FailedError, PrunedError, Run
from rlft.commands.sweep.space import Space
from rlft.commands.sweep.trials import Trial
from rlft.logger.jsonl import METRICS, read_lines
from rlft.loop.driver import BrokenRunError
from rlft.loop.engines import Engines
from rlft.runs import run_status
from rlft.runs.run_folder import read
from rlft.types import UserError

SMALL = (
    "steps=3", "prompts_per_step=2", "group_size=2", "lora.rank=2", "eval.every=1", "eval.num_prompts=2",
    "eval.num_samples=1", "generation=transformers", "generation.max_tokens=4", "model.device=cpu", "data.size=16",
    "data.held_out_size=4", "scoring.workers=0", "logger=jsonl", "seed=7",
)  # fmt: skip


def run_of(folder: Path, rate: float = 1e-3) -> Run:
    return Run(trial=Trial(number=0, params={"trainer.lr": rate}), index=1, seed=8, folder=folder)


def test_a_run_whose_trial_is_pruned_ends_at_that_evaluation_and_says_why(tmp_path: Path) -> None:
    space, run = Space(fixed=SMALL, varied=(RATE,)), run_of(tmp_path / "run")
    assert words_of(run, space) == [*SMALL[:-1], "trainer.lr=0.001", "seed=8"]
    with Engines() as engines, pytest.raises(PrunedError):
        _do_run(
            run,
            lambda: 1 in curve(run.folder, "accuracy"),  # not before the first step
            space=space,
            verb="train",
            config_dir=None,
            engines=engines,
        )
    assert read(run.folder)["seed"] == 8
    assert [line["step"] for line in read_lines(run.folder / METRICS)] == [1]
    reason = "pruned by its sweep after step 1: its trial lags behind"
    assert run_status.read(run.folder) == (run_status.Status.stopped, reason)
    assert run_status.error(run.folder) == "PrunedError"


def test_values_that_the_config_refuses_are_the_trials_own_failure(tmp_path: Path) -> None:
    space = Space(fixed=SMALL, varied=(RATE,))
    with pytest.raises(FailedError, match=r"^trainer.lr: must be "):
        _do_run(run_of(tmp_path, -1.0), lambda: False, space=space, verb="train", config_dir=None, engines=None)
    (tmp_path / "file").write_text("")
    run = run_of(tmp_path / "file" / "run")
    with Engines() as engines, pytest.raises(UserError, match=r"^hydra.run.dir: "):
        _do_run(run, lambda: False, space=space, verb="train", config_dir=None, engines=engines)


class Broken:
    """Raises an error where engines would be started or used."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def test_an_engine_that_does_not_start_ends_the_study_and_a_broken_run_its_trial_alone(tmp_path: Path) -> None:
    space = Space(fixed=SMALL, varied=(RATE,))
    taken = UserError("generation.engine", "vLLM could not start: no memory", got="vllm", remedy="free the GPU")
    for error, raised in ((taken, UserError), (BrokenRunError("the loss is not finite"), FailedError)):
        run = run_of(tmp_path / raised.__name__)
        with pytest.raises(raised, match=f"^{re.escape(str(error))}$"):
            _do_run(run, lambda: False, space=space, verb="train", config_dir=None, engines=Broken(error))
