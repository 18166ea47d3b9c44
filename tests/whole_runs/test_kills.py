"""A run that is killed at any moment and resumed leaves bit for bit what it would have left."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import (
    KILLED,
    check_resumed,
    check_so_far,
    checkpoints,
    killed_at_each,
    learned,
    metrics,
    rollouts,
    whole_lines,
)
from run_processes import Nursery, start_fresh
from slow_cases import slow


def killed_at(place: str, call: int, when: str = "before") -> dict[str, Any]:
    return {"at": place, "call": call, "when": when, "do": "kill"}


# In the order in which a run, going on from its newest checkpoint (every 2 steps), comes to them.
STAGES = [
    killed_at("rlft.runs.run_folder:start", 1),
    killed_at("rlft.runs.run_folder:start", 1, "after"),
    killed_at("rlft.loop.metrics:summarise", 1),  # in the evaluation before the first step
    killed_at("rlft.generation.transformers:_decode", 2, "after"),  # sample, after the evaluation's
    killed_at("rlft.reward.workers.scorer:Scorer.__call__", 3),  # score: the evaluation, step 1, step 2
    killed_at("rlft.algorithm.grpo:GRPO.credit", 2, "after"),
    killed_at("rlft.trainer.optimizer:Optimizer.update", 2),  # update, gradients are there
    killed_at("rlft.trainer.optimizer:Optimizer.update", 2, "after"),  # update, weights have moved
    killed_at("rlft.model.roles:Roles.load_sampler", 3, "after"),  # publish: at the start, after steps 1 and 2
    killed_at("rlft.loop.session:Session.record", 2),
    killed_at("rlft.loop.session:Session.record", 2, "after"),
    killed_at("rlft.loop.metrics:summarise", 2, "after"),  # in the evaluation after step 2
    killed_at("rlft.runs.checkpoint:save", 1),  # after it, before the checkpoint
    killed_at("rlft.runs.checkpoint:save", 1, "after"),
    killed_at("rlft.model.roles:Roles.restore", 1, "after"),  # while it resumes
    killed_at("rlft.loop.session:Session.sample", 2),  # between steps 3 and 4
    killed_at("rlft.runs.checkpoint:save", 1, "after"),
    killed_at("rlft.loop.session:Session.evaluate_if_due", 1),  # after the last step
    killed_at("rlft.runs.checkpoint:save", 1),
]
FEW = [STAGES[place] for place in (1, 7, 13, 14)]
WRITES = [
    {"half": ".config.yaml.writing", "call": 1},
    {"half": "eval.jsonl", "call": 1},
    {"half": "step_000001.jsonl.tmp", "call": 1},
    killed_at("pathlib:Path.replace", 2, "before"),  # config.yaml's, then the first rollouts'
    killed_at("pathlib:Path.replace", 2, "after"),
    {"half": "metrics.jsonl", "call": 1},
    {"half": "metrics.jsonl", "call": 2},
    {"half": "eval.jsonl", "call": 2},
    {"half": "adapter_model.safetensors", "call": 1},
    {"half": "adapter_config.json", "call": 1},
    {"half": "optimizer.safetensors", "call": 1},
    {"half": "state.json", "call": 1},
    {"half": "MANIFEST", "call": 1},
    killed_at("pathlib:Path.rename", 1, "after"),  # of the probe that tries whether the folder can be written to
    killed_at("pathlib:Path.rename", 2),  # the checkpoint is whole but has not its name
    killed_at("pathlib:Path.rename", 2, "after"),
    {"half": "metrics.jsonl", "call": 2},
    {"half": "shutil:rmtree", "call": 1},  # the checkpoint of step 2 is being removed: only the newest is kept
    {"half": "step_000005.jsonl.tmp", "call": 1},
    {"half": "state.json", "call": 1},
]


@pytest.mark.parametrize("stages", [FEW, slow(STAGES)], ids=["of a step", "every"])
def test_killed_in_every_stage_and_resumed_it_is_the_same_run(
    stages: list[dict[str, Any]], rough: Nursery, undisturbed: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = ("train", *tiny, "checkpoint.every=2", "checkpoint.keep=2")
    killed_at_each(rough, tmp_path, arguments, stages, undisturbed)
    check_resumed(rough, tmp_path, undisturbed)


@pytest.mark.slow
def test_killed_inside_every_kind_of_write_and_resumed_it_is_the_same_run(
    rough: Nursery, undisturbed: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = ("train", *tiny, "checkpoint.every=2", "checkpoint.keep=1")
    killed_at_each(rough, tmp_path, arguments, WRITES, undisturbed)
    check_resumed(rough, tmp_path, undisturbed)


def test_the_undisturbed_run_has_something_to_lose(undisturbed: Path) -> None:
    assert learned(undisturbed)
    assert [line["step"] for line in metrics(undisturbed)] == [1, 2, 3, 4, 5]
    assert len(whole_lines(undisturbed / "eval.jsonl")) == 4  # before the first step, after 2, 4 and the last
    assert list(rollouts(undisturbed)) == [f"step_00000{step}.jsonl" for step in range(1, 6)]
    assert [c.name for c in checkpoints(undisturbed)] == [f"step_00000{step}" for step in range(1, 6)]


@pytest.fixture
def threaded() -> Iterator[Nursery]:
    nursery = Nursery(hash_seed=4, threads=0)
    yield nursery
    nursery.close()


@pytest.mark.slow
def test_killed_from_outside_at_random_moments_and_resumed_it_is_the_same_run(
    threaded: Nursery, tiny: tuple[str, ...], all_checkpoints: tuple[str, ...], tmp_path: Path
) -> None:
    """With as many threads as torch takes, and hashes that are not those of the run in a fresh interpreter."""
    done = start_fresh("train", *tiny, *all_checkpoints, "hydra.run.dir=undisturbed", cwd=tmp_path).wait()
    assert done.code == 0, done.err
    steps = tmp_path / "undisturbed" / "metrics.jsonl"
    seconds = [json.loads(line)["time/step"] for line in whole_lines(steps)]
    run = tmp_path / "run"
    pause = {"at": "rlft.loop.session:Session.begin", "call": 1, "do": "stop"}  # until it is set up
    words = ["train", *tiny, "hydra.run.dir=run", "checkpoint.every=1"]
    for _ in range(2):
        started = threaded.start(*words, cwd=tmp_path, events=[pause])
        started.wait_until_stopped()
        started.go_on()
        time.sleep(random.uniform(0, sum(seconds[len(whole_lines(run / "metrics.jsonl")) :]) / 2))
        started.kill()
        assert started.wait().code == KILLED, started.wait().err
        check_so_far(run, tmp_path / "undisturbed")
        words = ["resume", "run"]
    check_resumed(threaded, tmp_path, tmp_path / "undisturbed")
