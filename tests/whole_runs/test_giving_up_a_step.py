"""checkpoint.on_signal: a step that is given up leaves the state of the step before it, from which a resume goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_folders import check_resumed, check_same, check_so_far, checkpoints, metrics
from run_processes import Nursery
from test_kills_of_supervised_runs import RM

from rlft.runs import run_status

GIVEN_UP = "interrupted: saving the last finished step; once more stops at once"
ALLOWED = "interrupted: finishing this step, if it takes at most {} s, then saving; once more stops at once"


def events(place: str, call: int, when: str = "before", seconds: float = 0.0) -> list[dict[str, Any]]:
    """SIGTERM at that place; with `seconds`, the step then takes so much longer."""
    at = {"at": place, "call": call, "when": when}
    # What is planted last happens first.
    return [*([{**at, "do": "wait", "seconds": seconds}] if seconds else []), {**at, "do": "terminate"}]


def check_stopped(folder: Path, heard: str, done: Any, step: int) -> None:
    saved = f"stopped after step {step}, which is saved" if step else "stopped before the first step"
    assert (done.code, done.err.splitlines()) == (130, [heard, f"{saved}; resume with: rlft resume run"])
    assert run_status.read(folder)[0] is run_status.Status.interrupted
    assert [c.name for c in checkpoints(folder)][-1:] == [f"step_{step:06d}"] * (step > 0)


# In the order in which the run comes to them, each time from the step that the one before has saved (nothing else
# saves): while step 1 is sampled, step 2 scored, step 3 updated with moved weights, step 4 evaluated.
TRAIN = [
    (events("rlft.loop.session:Session.sample", 1), 0),
    (events("rlft.loop.session:Session.score", 2), 1),
    (events("rlft.trainer.optimizer:Optimizer.update", 2, "after"), 2),
    (events("rlft.loop.session:Session.record", 2, "after"), 3),
    (events("rlft.loop.metrics:summarise", 1), 3),
    (events("rlft.runs.checkpoint:save", 1), 5),
]


@pytest.mark.slow
def test_a_training_step_that_is_given_up_anywhere_leaves_the_step_before_and_resumed_it_is_the_same_run(
    rough: Nursery, undisturbed: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    words = ["train", *tiny, "checkpoint.every=0", "checkpoint.on_signal=now", "hydra.run.dir=run"]
    folder = tmp_path / "run"
    for planted, step in TRAIN[:-1]:
        done = rough.run(*words, cwd=tmp_path, events=planted)
        check_stopped(folder, GIVEN_UP, done, step)
        check_so_far(folder, undisturbed)
        words = ["resume", "run"]
    # The last step is being saved: it is not given up any more.
    rough.run("resume", "run", cwd=tmp_path, events=TRAIN[-1][0], ends=0)
    check_same(folder, undisturbed)


@pytest.mark.slow
def test_a_step_gets_the_seconds_it_is_allowed_and_no_more(
    rough: Nursery, undisturbed: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    folder, words = tmp_path / "run", ["train", *tiny, "checkpoint.every=0", "hydra.run.dir=run"]
    scoring = "rlft.loop.session:Session.score"
    done = rough.run(*words, "checkpoint.on_signal=60", cwd=tmp_path, events=events(scoring, 2, seconds=0.2))
    check_stopped(folder, ALLOWED.format("60"), done, 2)
    words = ["resume", "run", "checkpoint.on_signal=0.3"]
    done = rough.run(*words, cwd=tmp_path, events=events(scoring, 2, seconds=60))
    check_stopped(folder, ALLOWED.format("0.3"), done, 3)
    check_so_far(folder, undisturbed)
    check_resumed(rough, tmp_path, undisturbed)
    assert len(metrics(folder)) == 5


@pytest.mark.slow
def test_a_supervised_step_that_is_given_up_leaves_the_step_before_it(
    quiet: Nursery, rough: Nursery, tmp_path: Path
) -> None:
    every = ("checkpoint.every=1", "checkpoint.keep=99", "hydra.run.dir=undisturbed")
    run = (*RM, "steps=6")
    assert quiet.run(*run, *every, cwd=tmp_path).code == 0
    folder, words = tmp_path / "run", [*run, "checkpoint.every=0", "checkpoint.on_signal=now", "hydra.run.dir=run"]
    updating, evaluating = (
        "rlft.trainer.optimizer:Optimizer.update",
        "rlft.loop.supervised:SupervisedRun.evaluate_if_due",
    )
    for place, call, step in ((updating, 2, 1), (evaluating, 3, 3)):
        done = rough.run(*words, cwd=tmp_path, events=events(place, call))
        check_stopped(folder, GIVEN_UP, done, step)
        check_so_far(folder, tmp_path / "undisturbed")
        words = ["resume", "run"]
    check_resumed(rough, tmp_path, tmp_path / "undisturbed")
