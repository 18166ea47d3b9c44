"""Ctrl-C once: the step is finished, or given up, and saved; exit code 130. Twice: stopped at once.

Resumed it is the same run. `signal_matrix.py` has every signal in every stage of a step; here is what it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_folders import RM, check_resumed, check_same, check_so_far, checkpoints, metrics, tiny
from run_processes import Ended, Nursery, start_fresh

from rlft.runs import run_status

HEARD = "interrupted: finishing this step, then saving; once more stops at once"
HEARD_BEFORE = "interrupted: ending before a step is begun; once more stops at once"
GIVEN_UP = "interrupted: saving the last finished step; once more stops at once"
ALLOWED = "interrupted: finishing this step, if it takes at most {} s, then saving; once more stops at once"
AT_ONCE = "stopped at once; step 2 is saved; resume with: rlft resume run"
AT_ONCE_BEFORE = "stopped at once; no step is saved; resume with: rlft resume run"

LOADING = "rlft.loop.parts:load_for_training"
SAMPLING = "rlft.loop.session:Session.sample"
SCORING = "rlft.loop.session:Session.score"
UPDATE = "rlft.trainer.optimizer:Optimizer.update"
RECORD = "rlft.loop.session:Session.record"
EVALUATED = "rlft.loop.metrics:summarise"
SAVED = "rlft.runs.checkpoint:save"

Event = dict[str, Any]


def press(place: str, call: int, do: str = "interrupt", when: str = "before", seconds: float = 0.0) -> list[Event]:
    """A signal at that place; with `seconds`, the step then takes so much longer."""
    at = {"at": place, "call": call, "when": when}
    # What is planted last happens first.
    return [*([{**at, "do": "wait", "seconds": seconds}] if seconds else []), {**at, "do": do}]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A process that ends after `step`, which its checkpoint holds; keys: what it is told in addition."""

    events: list[Event]
    step: int
    heard: str
    keys: tuple[str, ...] = ()


def check_stopped(done: Ended, folder: Path, step: int, heard: str) -> None:
    saved = f"stopped after step {step}, which is saved" if step else "stopped before the first step"
    assert (done.code, done.err.splitlines()) == (130, [heard, f"{saved}; resume with: rlft resume run"])
    assert run_status.read(folder)[0] is run_status.Status.interrupted
    assert [c.name for c in checkpoints(folder)][-1:] == [f"step_{step:06d}"] * (step > 0)
    if heard != GIVEN_UP:  # the lines of a step that is given up may be there, and are dropped when it is resumed
        assert [line["step"] for line in metrics(folder)] == list(range(1, step + 1))


NOW = "checkpoint.on_signal=now"
# In the order in which a run comes to them, each time from the step that the one before has saved: nothing else saves.
CHAINS: dict[str, tuple[tuple[str, ...], Sequence[Stop]]] = {
    "the step is finished": (tiny(), [
        Stop(events=press(LOADING, 1), step=0, heard=HEARD_BEFORE),  # in a slow start: no step is begun
        Stop(events=press(EVALUATED, 1), step=1, heard=HEARD),  # before the first step: that one is still made
        Stop(events=press(RECORD, 3), step=4, heard=HEARD),
    ]),
    "the step is given up": (tiny(), [
        Stop(events=press(SAMPLING, 1, "terminate"), step=0, heard=GIVEN_UP, keys=(NOW,)),
        Stop(events=press(SCORING, 2, "terminate"), step=1, heard=GIVEN_UP),
        Stop(events=press(UPDATE, 2, "terminate", "after"), step=2, heard=GIVEN_UP),  # with moved weights
        Stop(events=press(RECORD, 2, "terminate", "after"), step=3, heard=GIVEN_UP),
        Stop(events=press(EVALUATED, 1, "terminate"), step=3, heard=GIVEN_UP),
    ]),
    "the step gets the seconds it is allowed and no more": (tiny(), [
        Stop(events=press(SCORING, 2, "terminate", seconds=0.2), step=2, heard=ALLOWED.format("60"),
             keys=("checkpoint.on_signal=60",)),
        Stop(events=press(SCORING, 2, "terminate", seconds=60), step=3, heard=ALLOWED.format("0.3"),
             keys=("checkpoint.on_signal=0.3",)),
    ]),
    "a supervised step is given up": ((*RM, "steps=6"), [
        Stop(events=press(UPDATE, 2, "terminate"), step=1, heard=GIVEN_UP, keys=(NOW,)),
        Stop(events=press("rlft.loop.supervised:SupervisedRun.evaluate_if_due", 3, "terminate"), step=3,
             heard=GIVEN_UP),
    ]),
}  # fmt: skip
# While the last step is scored, or saved: it is finished, and with it the run.
AT_THE_END = {"the step is finished": press(SCORING, 1), "the step is given up": press(SAVED, 1, "terminate")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_interrupted_and_resumed_it_is_the_same_run(
    name: str, rough: Nursery, undisturbed_of: Callable[..., Path], tmp_path: Path
) -> None:
    run, stops = CHAINS[name]
    folder, undisturbed = tmp_path / "run", undisturbed_of(*run)
    words = [*run, "checkpoint.every=0", "hydra.run.dir=run"]
    for stop in stops:
        done = rough.run(*words, *stop.keys, cwd=tmp_path, events=stop.events)
        check_stopped(done, folder, stop.step, stop.heard)
        check_so_far(folder, undisturbed)
        words = ["resume", "run"]
    done = rough.run("resume", "run", cwd=tmp_path, events=AT_THE_END.get(name, []), ends=0)
    assert done.err.splitlines() == [HEARD] * (name in AT_THE_END)
    check_same(folder, undisturbed)


def test_a_second_ctrl_c_stops_at_once_and_resumed_it_is_the_same_run(
    rough: Nursery, undisturbed: Path, tmp_path: Path
) -> None:
    twice = [*press(SAMPLING, 3), *press(UPDATE, 3)]
    done = rough.run(*tiny(), "checkpoint.every=1", "hydra.run.dir=run", cwd=tmp_path, events=twice)
    assert (done.code, done.err.splitlines()) == (130, [HEARD, AT_ONCE])
    assert len(metrics(tmp_path / "run")) == 2
    assert checkpoints(tmp_path / "run")[-1].name == "step_000002"
    check_so_far(tmp_path / "run", undisturbed)
    check_resumed(rough, tmp_path, undisturbed)


@pytest.mark.slow
def test_ctrl_c_before_there_is_a_session_ends_the_run_with_130_and_a_line(
    rough: Nursery, undisturbed: Path, tmp_path: Path
) -> None:
    event = press("rlft.runs.run_folder:go_on", 1)
    done = rough.run(*tiny(), "hydra.run.dir=run", cwd=tmp_path, events=event)
    assert (done.code, done.err.splitlines()) == (130, [AT_ONCE_BEFORE])
    check_resumed(rough, tmp_path, undisturbed)


@pytest.mark.slow
def test_ctrl_c_from_outside_at_any_time_is_heard_once_more_ends_it_and_resumed_it_is_the_same_run(
    rough: Nursery, undisturbed: Path, tmp_path: Path
) -> None:
    pause = {"at": "rlft.loop.session:Session.begin", "call": 1, "do": "stop", "when": "after"}
    keys = (*tiny(), "hydra.run.dir=run", "checkpoint.every=0")
    started = start_fresh(*keys, cwd=tmp_path, events=[pause], variables={"OMP_NUM_THREADS": "1"})
    started.wait_until_stopped()
    started.go_on()
    started.press_until_heard(HEARD)
    # Heard in the first step, or (the first press was lost) a later one: whichever, it is saved.
    done = started.wait()
    check_stopped(done, tmp_path / "run", len(metrics(tmp_path / "run")), HEARD)
    check_so_far(tmp_path / "run", undisturbed)
    check_resumed(rough, tmp_path, undisturbed)
