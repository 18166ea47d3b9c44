"""Ctrl-C once: the step is finished and saved, exit code 130, resumed it is the same run. Twice: stopped at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_folders import check_resumed, check_same, check_so_far, checkpoints, metrics
from run_processes import Ended, Nursery, start_fresh

HEARD = "interrupted: finishing this step, then saving; once more stops at once"
HEARD_BEFORE = "interrupted: ending before a step is begun; once more stops at once"
AT_ONCE = "stopped at once; step 2 is saved; resume with: rlft resume run"
AT_ONCE_BEFORE = "stopped at once; no step is saved; resume with: rlft resume run"


def interrupted_at(place: str, call: int, signal: str = "interrupt", when: str = "before") -> dict[str, Any]:
    return {"at": place, "call": call, "do": signal, "when": when}


def words_at(folder: Path, keys: tuple[str, ...]) -> tuple[str, ...]:
    begun = (folder / "config.yaml").exists()
    return ("resume", "run") if begun else ("train", *keys, "checkpoint.every=0", "hydra.run.dir=run")


def check_stopped_after(done: Ended, folder: Path, step: int) -> None:
    assert done.code == 130, done.err
    saved = f"stopped after step {step}, which is saved" if step else "stopped before the first step"
    assert done.err.splitlines() == [HEARD if step else HEARD_BEFORE, f"{saved}; resume with: rlft resume run"]
    assert [line["step"] for line in metrics(folder)] == list(range(1, step + 1))
    assert [c.name for c in checkpoints(folder)][-1:] == [f"step_{step:06d}"] * (step > 0)


@pytest.mark.slow
def test_interrupted_in_every_stage_and_resumed_it_is_the_same_run(
    rough: Nursery, undisturbed: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    # Nothing but interrupts saves here. Each run goes on from the step that the one before has saved.
    stages = [
        (interrupted_at("rlft.loop.parts:load_for_training", 1), 0),  # in a slow start: no step is begun
        (interrupted_at("rlft.loop.metrics:summarise", 1), 1),  # before the first step: that one is still made
        (interrupted_at("rlft.loop.session:Session.sample", 1, "terminate"), 2),  # as kill and schedulers do
        (interrupted_at("rlft.trainer.optimizer:Optimizer.update", 1, when="after"), 3),
        (interrupted_at("rlft.loop.session:Session.record", 1), 4),
    ]
    for event, step in stages:
        done = rough.run(*words_at(tmp_path / "run", tiny), cwd=tmp_path, events=[event])
        check_stopped_after(done, tmp_path / "run", step)
        check_so_far(tmp_path / "run", undisturbed)
    last = interrupted_at("rlft.loop.session:Session.score", 1)
    done = rough.run("resume", "run", cwd=tmp_path, events=[last])
    assert (done.code, done.err.splitlines()) == (0, [HEARD]), "the last step was the last anyway: the run is finished"
    check_same(tmp_path / "run", undisturbed)


def test_a_second_ctrl_c_stops_at_once_and_resumed_it_is_the_same_run(
    rough: Nursery, undisturbed: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    twice = [
        interrupted_at("rlft.loop.session:Session.sample", 3),
        interrupted_at("rlft.trainer.optimizer:Optimizer.update", 3),
    ]
    done = rough.run("train", *tiny, "checkpoint.every=1", "hydra.run.dir=run", cwd=tmp_path, events=twice)
    assert (done.code, done.err.splitlines()) == (130, [HEARD, AT_ONCE])
    assert len(metrics(tmp_path / "run")) == 2
    assert checkpoints(tmp_path / "run")[-1].name == "step_000002"
    check_so_far(tmp_path / "run", undisturbed)
    check_resumed(rough, tmp_path, undisturbed)


@pytest.mark.slow
def test_ctrl_c_before_there_is_a_session_ends_the_run_with_130_and_a_line(
    rough: Nursery, undisturbed: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    event = interrupted_at("rlft.runs.run_folder:go_on", 1)
    done = rough.run("train", *tiny, "hydra.run.dir=run", cwd=tmp_path, events=[event])
    assert (done.code, done.err.splitlines()) == (130, [AT_ONCE_BEFORE])
    check_resumed(rough, tmp_path, undisturbed)


@pytest.mark.slow
def test_ctrl_c_from_outside_at_any_time_is_heard_once_more_ends_it_and_resumed_it_is_the_same_run(
    rough: Nursery, undisturbed: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    pause = {"at": "rlft.loop.session:Session.begin", "call": 1, "do": "stop", "when": "after"}
    keys = ("train", *tiny, "hydra.run.dir=run", "checkpoint.every=0")
    started = start_fresh(*keys, cwd=tmp_path, events=[pause], variables={"OMP_NUM_THREADS": "1"})
    started.wait_until_stopped()
    started.go_on()
    started.press_until_heard(HEARD)
    done = started.wait()
    assert done.code == 130, done.err
    # Heard in the first step, or (the first press was lost) a later one: whichever, it is saved.
    check_stopped_after(done, tmp_path / "run", len(metrics(tmp_path / "run")))
    check_so_far(tmp_path / "run", undisturbed)
    check_resumed(rough, tmp_path, undisturbed)
