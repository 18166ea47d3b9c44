"""`rlft sft`, `rm`, `dpo` and `sample`, killed and resumed, leave bit for bit what they would have left."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_folders import KILLED, check_resumed, check_so_far, checkpoints, killed_at_each, metrics, whole_lines
from run_processes import Nursery
from slow_cases import slow

UPDATE = "rlft.trainer.optimizer:Optimizer.update"
SAVED = "rlft.runs.checkpoint:save"
SFT = (
    "sft", "+recipe=sft_arithmetic", "examples_per_step=4", "generation=transformers",
    "generation.max_tokens=24", "eval.every=2", "eval.num_prompts=4", "eval.num_samples=2", "data.size=64",
    "data.held_out_size=8", "scoring.workers=0", "model.device=cpu", "logger=[jsonl]",
)  # fmt: skip
RM = (
    "rm", "+recipe=rm_arithmetic", "rankings_per_step=4", "replay.path=embedded:arithmetic-preferences",
    "replay.fraction=0.5", "lora.rank=2", "lora.dropout=0.1", "eval.every=2", "eval.num_rankings=8", "model.device=cpu",
    "logger=[jsonl]",
)  # fmt: skip
DPO = (
    "dpo",
    "+recipe=dpo_arithmetic",
    "preferences.held_out_fraction=0.993",  # five are left: an update has new ones and known ones
    "rankings_per_step=4",
    "lora.rank=2",
    "lora.dropout=0.1",
    "eval.every=2",
    "eval.num_rankings=8",
    "model.device=cpu",
    "logger=[jsonl]",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run; role: what of it learns. files: those of a checkpoint that are others at every step."""

    words: tuple[str, ...]
    role: str
    files: tuple[str, ...]


CASES = {
    "sft of an adapter with dropout": Case(
        words=(*SFT, "lora.rank=2", "lora.dropout=0.1"), role="policy", files=("policy/adapter_model.safetensors",)
    ),
    "sft of all weights, and a schedule": Case(
        words=(*SFT, "lora=null", "trainer.lr=1e-4", "trainer.schedule=cosine", "trainer.warmup=2"),
        role="model",
        files=("model/model.safetensors",),
    ),
    "a reward model, with replay and dropout": Case(
        words=RM, role="reward", files=("reward/adapter_model.safetensors", "reward/head.safetensors")
    ),
    "preference optimisation, over the pairs again, with dropout": Case(
        words=DPO, role="policy", files=("policy/adapter_model.safetensors",)
    ),
}


def killed_at_random(nursery: Nursery, words: tuple[str, ...], place: Path, pause: str, within_s: float) -> None:
    """The run stops where `pause` is first called, and is killed a moment after it has gone on."""
    event = {"at": pause, "call": 1, "do": "stop"}
    started = nursery.start(*words, cwd=place, events=[event])
    started.wait_until_stopped()
    started.go_on()
    time.sleep(random.uniform(0, within_s))
    started.kill()
    assert started.wait().code == KILLED, started.wait().err


# With the gradients of step 2 at work; with step 2 done and not saved; within its checkpoint's files; resuming.
IN_A_CHECKPOINT = {"half": "optimizer.safetensors", "call": 1}
KILLS: list[dict[str, Any]] = [
    {"at": UPDATE, "call": 2, "do": "kill", "when": "after"},
    {"at": SAVED, "call": 1, "do": "kill"},
    IN_A_CHECKPOINT,
    {"half": "metrics.jsonl", "call": 3},
    {"half": "eval.jsonl", "call": 1},
]
IN_THE_SECOND = [{**IN_A_CHECKPOINT, "call": 2}]


QUICK = "sft of all weights, and a schedule"


@pytest.mark.parametrize(
    ("steps", "every", "kills"), [(3, 1, IN_THE_SECOND), slow(5, 2, KILLS)], ids=["once", "everywhere"]
)
@pytest.mark.parametrize(
    "case", [case if name == QUICK else slow(case) for name, case in CASES.items()], ids=list(CASES)
)
def test_killed_and_resumed_it_is_the_same_run(
    case: Case, steps: int, every: int, kills: list[dict[str, Any]], quiet: Nursery, rough: Nursery, tmp_path: Path
) -> None:
    undisturbed, run = tmp_path / "undisturbed", (*case.words, f"steps={steps}")
    quiet.run(*run, "checkpoint.every=1", "checkpoint.keep=99", "hydra.run.dir=undisturbed", cwd=tmp_path, ends=0)
    check_something_was_learned(undisturbed, case, steps)
    words = (*run, f"checkpoint.every={every}", "checkpoint.keep=2")
    folder = killed_at_each(rough, tmp_path, words, kills, undisturbed)
    if kills is KILLS:
        seconds = sum(json.loads(line)["time/step"] for line in whole_lines(undisturbed / "metrics.jsonl"))
        killed_at_random(
            rough, ("resume", "run"), tmp_path, "rlft.loop.supervised:SupervisedRun.update", seconds / steps
        )
        check_so_far(folder, undisturbed)
    check_resumed(rough, tmp_path, undisturbed)


def check_something_was_learned(undisturbed: Path, case: Case, steps: int) -> None:
    assert [line["step"] for line in metrics(undisturbed)] == [*range(1, steps + 1)]
    assert all(line[f"{case.role}/grad_norm"] > 0 for line in metrics(undisturbed))
    assert len(whole_lines(undisturbed / "eval.jsonl")) == 2 + steps // 2  # before the first step, every 2, the last
    for file in (*case.files, "optimizer.safetensors"):
        contents = {(checkpoint / file).read_bytes() for checkpoint in checkpoints(undisturbed)}
        assert len(contents) == steps, file


SAMPLE = (
    "sample", "num_prompts=10", "prompts_per_step=2", "n=4", "max_per_prompt=3", "generation=transformers",
    "generation.max_tokens=24", "data.size=16", "data.held_out_size=8", "scoring.workers=0", "model.device=cpu",
)  # fmt: skip


# Each in the first or second step that it does: none, 1, 1, 2, 3 of five steps are then behind it.
KILLS_OF_SAMPLING: list[dict[str, Any]] = [
    {"at": "rlft.generation.transformers:_decode", "call": 1, "do": "kill", "when": "after"},
    {"half": "samples.jsonl", "call": 2},
    {"half": ".progress.json.writing", "call": 1},
    {"at": "rlft.commands.sample:Samples.add", "call": 1, "do": "kill", "when": "after"},
    {"at": "rlft.commands.sample:write_atomically", "call": 2, "do": "kill"},
]
FEW_OF_SAMPLING = [KILLS_OF_SAMPLING[1], KILLS_OF_SAMPLING[3]]


@pytest.mark.parametrize(
    ("events", "steps"), [(FEW_OF_SAMPLING, 2), slow(KILLS_OF_SAMPLING, 3)], ids=["twice", "everywhere"]
)
def test_killed_and_resumed_sampling_leaves_the_same_file(
    events: list[dict[str, Any]], steps: int, quiet: Nursery, rough: Nursery, tmp_path: Path
) -> None:
    begun = time.monotonic()
    quiet.run(*SAMPLE, "hydra.run.dir=undisturbed", cwd=tmp_path, ends=0)
    seconds = time.monotonic() - begun
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "run"
    expected = (undisturbed / "samples.jsonl").read_bytes()
    assert len(expected.splitlines()) > 10
    words = (*SAMPLE, "hydra.run.dir=run")
    for event in events:
        rough.run(*words, cwd=tmp_path, events=[event], ends=KILLED)
        check_recorded(folder, expected)
        words = ("resume", "run")
    assert json.loads((folder / "progress.json").read_text())["step"] == steps
    if events is KILLS_OF_SAMPLING:
        killed_at_random(rough, words, tmp_path, "rlft.commands.sample:sample", seconds / 50)
        check_recorded(folder, expected)
    rough.run("resume", "run", cwd=tmp_path, ends=0)
    for name in ("samples.jsonl", "progress.json"):
        assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()


def check_recorded(folder: Path, expected: bytes) -> None:
    """What progress.json says is there is the beginning of the undisturbed file."""
    record = folder / "progress.json"
    if record.exists():
        size = json.loads(record.read_text())["bytes"]
        assert (folder / "samples.jsonl").read_bytes()[:size] == expected[:size]
        assert size > 0
