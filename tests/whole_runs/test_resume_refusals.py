"""When a folder may not be trained in: with the reason, before a weight is loaded, and nothing in it changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_folders import check_same, checkpoints, files_of, metrics, tiny
from run_processes import Ended, Nursery

from rlft.runs import run_folder
from rlft.types import UserError


@pytest.fixture
def stopped(undisturbed: Path, tmp_path: Path) -> Path:
    """A run that was killed after step 4 with every checkpoint kept, in a folder of its own: `tmp_path / "run"`."""
    shutil.copytree(undisturbed, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000005")
    return tmp_path / "run"


def refused(done: Ended, start: str, *parts: str) -> None:
    """One line on stderr, and exit code 2."""
    assert done.code == 2, done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith(f"rlft: {start}")
    for part in parts:
        assert part in done.err


def test_a_folder_that_holds_a_run_is_not_trained_in_again(rough: Nursery, stopped: Path) -> None:
    before = files_of(stopped)
    done = rough.run(*tiny(), f"hydra.run.dir={stopped}", cwd=stopped.parent)
    refused(done, "hydra.run.dir: there is a run in that folder", f"continue it with `rlft resume {stopped.name}`")
    assert files_of(stopped) == before


def test_a_finished_run_is_not_resumed_and_is_told_how_to_train_on(
    rough: Nursery, undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    before = files_of(tmp_path / "run")
    refused(rough.run("resume", "run", cwd=tmp_path), "resume: the run is finished", "rlft resume run steps=10")
    assert files_of(tmp_path / "run") == before


def test_every_changed_key_is_named_with_both_values(rough: Nursery, stopped: Path) -> None:
    before = files_of(stopped)
    changes = ("seed=3", "trainer.lr=0.5", "group_size=8", "reward.format.weight=0.7", "lora.target_modules=[q_proj]")
    done = rough.run("resume", "run", *changes, cwd=stopped.parent)
    refused(
        done,
        "resume: the config differs from the run's (group_size: 4 -> 8; ",
        "; lora.target_modules: all-linear -> ['q_proj']; ",
        "; reward.format.weight: ",
        " -> 0.7; seed: 0 -> 3; trainer.lr: 0.001 -> 0.5)",
        "leave these keys as they were",
    )
    assert files_of(stopped) == before


# What may differ on resume: how long, how often, where to, and how it fits the machine. Nothing that a number rests on.
FREE = {
    "resume", "steps", "name", "token_budget",
    "data.path", "data.allow_unscorable", "pretrain.path", "model.path", "model.device",
    "scoring.workers", "scoring.timeout", "freshness.threshold", "freshness.every", "freshness.read_back",
    "checkpoint.every", "checkpoint.keep", "checkpoint.on_signal",
    "eval.every", "eval.num_prompts", "eval.num_samples", "eval.temperature", "eval.num_examples", "eval.kl_base",
    "stop.when", "curriculum.path",
    "generation.transformers.batch_size", "generation.transformers.graphs",
    "generation.vllm.gpu_memory_utilization", "generation.vllm.max_num_seqs",
    "generation.vllm.sleep", "generation.vllm.enforce_eager", "generation.vllm.share_base",
    "token_values.every", "token_values.groups",
    "cluster.kind", "cluster.address", "cluster.engines", "cluster.gpus_per_engine", "cluster.ranks",
    "cluster.placement", "cluster.timeout", "cluster.max_engine_restarts", "cluster.scoring", "cluster.jobs",
    "cluster.shard_base", "snapshot.teacher_gpu_memory_utilization",
    "console", "rollouts.every", "rollouts.keep",
}  # fmt: skip


def test_of_all_keys_those_that_change_no_number_are_free(undisturbed: Path) -> None:
    saved = run_folder.read(undisturbed)
    saved.pop("origin")
    keys = sorted(run_folder.flatten(saved))
    assert len(keys) > 90
    free = set()
    for key in keys:
        *sections, name = key.split(".")
        changed = json.loads(json.dumps(saved))
        place = changed
        for section in sections:
            place = place[section]
        place[name] = "another"
        if (problem := refusal(undisturbed, changed)) is None:
            free.add(key)
        else:
            assert f"({key}: " in problem, "it names the key, and no other"
            assert problem.count(" -> ") == 1
    assert free <= FREE
    assert {"steps", "eval.every", "checkpoint.every", "scoring.workers", "token_budget"} <= free


def refusal(folder: Path, config: dict[str, Any]) -> str | None:
    """Why a run may not go on with this config; None if it may."""
    try:
        run_folder.check_same_config(folder, config)
    except UserError as error:
        return error.problem
    return None


@pytest.fixture
def local_data(tmp_path: Path) -> list[str]:
    """Keys of a run on files in `tmp_path`: train.jsonl, held_out.jsonl and texts.jsonl."""
    for split, numbers in (("train", range(10, 22)), ("held_out", range(30, 34))):
        lines = [{"prompt": f"What is {n} + 7?", "answer": str(n + 7)} for n in numbers]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [{"text": f"{n}+7={n + 7}"} for n in range(40, 60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    mine = ["data=jsonl", f"data.path={tmp_path}/train.jsonl", f"data.held_out_path={tmp_path}/held_out.jsonl"]
    text = [f"pretrain.path={tmp_path}/texts.jsonl", "pretrain.sequences_per_update=2", "pretrain.held_out=2"]
    return [key for key in tiny("steps=3") if not key.startswith("data.")] + [*mine, *text]


def test_changed_data_texts_and_base_are_refused_and_put_back_they_are_taken(
    rough: Nursery, local_data: list[str], tiny_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_path, tmp_path / "base")
    keys = [*local_data, f"model.path={tmp_path}/base", "checkpoint.every=1"]
    kill = {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"}
    assert rough.run(*keys, "hydra.run.dir=run", cwd=tmp_path, events=[kill]).code == -9
    before = files_of(tmp_path / "run")
    for name, old, new, key, noun in (
        ("train.jsonl", "What is 12 + 7?", "What is 12 + 8?", "data.path", "training data"),
        ("held_out.jsonl", '"40"', '"41"', "data.path", "held-out data"),
        ("texts.jsonl", "50+7=57", "50+7=58", "pretrain.path", "pretraining text"),
        ("base/config.json", "10000.0", "10001.0", "model.path", "base changed since the run began: its config.json"),
    ):
        file = tmp_path / name
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
        done = rough.run("resume", "run", cwd=tmp_path)
        words = noun if "changed" in noun else f"{noun} changed since the run began (fingerprint"
        refused(done, f"{key}: the {words}")
        file.write_text(text)
    assert files_of(tmp_path / "run") == before
    rough.run("resume", "run", cwd=tmp_path, ends=0)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
    rough: Nursery, stopped: Path, undisturbed: Path
) -> None:
    flip_a_bit(stopped / "checkpoints" / "step_000004" / "policy" / "adapter_model.safetensors")
    os.truncate(stopped / "checkpoints" / "step_000003" / "optimizer.safetensors", 1000)
    (stopped / "checkpoints" / "step_000002" / "state.json").unlink()
    done = rough.run("resume", "run", cwd=stopped.parent, ends=0)
    said = "checkpoint step_00000{} is damaged ({}); going back to the one before"
    assert done.err.splitlines()[:3] == [
        said.format(4, "policy/adapter_model.safetensors does not match its checksum"),
        said.format(3, "optimizer.safetensors does not match its checksum"),
        said.format(2, "state.json is missing"),
    ]
    shutil.rmtree(stopped / "checkpoints" / "step_000002", ignore_errors=True)  # was never used again
    shutil.rmtree(stopped / "checkpoints" / "step_000003", ignore_errors=True)
    shutil.rmtree(stopped / "checkpoints" / "step_000004", ignore_errors=True)
    check_same(stopped, undisturbed)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_alone(rough: Nursery, stopped: Path) -> None:
    for checkpoint in checkpoints(stopped):
        flip_a_bit(checkpoint / "optimizer.safetensors")
    before = files_of(stopped)
    for more in ([], ["steps=9"]):
        done = rough.run("resume", "run", *more, cwd=stopped.parent)
        assert done.code == 2
        assert done.err.splitlines()[-1].startswith("rlft: resume: every checkpoint of this run is damaged, got run/")
        assert "checkpoint step_000004 is damaged (optimizer.safetensors does not match" in done.err
        assert files_of(stopped) == before, "not a line was cut, and it still stands as it stood"


def test_a_run_that_is_going_on_is_not_resumed_beside_itself(
    quiet: Nursery, rough: Nursery, stopped: Path, undisturbed: Path
) -> None:
    wait = {"at": "rlft.loop.session:Session.sample", "call": 1, "do": "stop"}
    going = quiet.start("resume", "run", cwd=stopped.parent, events=[wait])
    try:
        going.wait_until_stopped()
        done = rough.run("resume", "run", cwd=stopped.parent)
        refused(done, "resume: another process is running this run", "stop it")
    finally:
        going.go_on()
    assert going.wait().code == 0
    check_same(stopped, undisturbed)


@pytest.mark.slow
def test_a_finished_run_trained_on_is_the_longer_run(rough: Nursery, undisturbed: Path, tmp_path: Path) -> None:
    # Evaluated and saved at 4 in both: the last step of a run is, whatever the dates.
    rough.run(*tiny("steps=4"), "checkpoint.every=2", "hydra.run.dir=run", cwd=tmp_path, ends=0)
    rough.run("resume", "run", "steps=5", "scoring.workers=1", cwd=tmp_path, ends=0)
    check_same(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_changed_adapter_folder_is_refused(rough: Nursery, undisturbed: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints(undisturbed)[0]
    shutil.copytree(checkpoint / "policy", tmp_path / "sft")
    kill = {"at": "rlft.loop.session:Session.sample", "call": 2, "do": "kill"}
    keys = tiny("snapshot.reference=sft", "algorithm.kl_coef=0.01", "checkpoint.every=1", "hydra.run.dir=run")
    assert rough.run(*keys, cwd=tmp_path, events=[kill]).code == -9
    weights = tmp_path / "sft" / "adapter_model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes((checkpoints(undisturbed)[-1] / "policy" / "adapter_model.safetensors").read_bytes())
    done = rough.run("resume", "run", cwd=tmp_path)
    refused(done, "snapshot.reference: the adapter in that folder changed since the run began (fingerprint ")
    weights.write_bytes(before)
    assert rough.run("resume", "run", cwd=tmp_path).code == 0


SHORT = ("model.device=cpu", "lora.rank=2", "console=null", "eval.every=0", "trainer.warmup=1")
SCHEDULED = {
    "sft linear": ("sft", "+recipe=sft_arithmetic", "examples_per_step=4", "steps=2"),
    "sft cosine": ("sft", "+recipe=sft_arithmetic", "examples_per_step=4", "steps=2"),
    "rm cosine": ("rm", "+recipe=rm_arithmetic", "rankings_per_step=4", "steps=2"),
    "train cosine": (
        "train", "+recipe=grpo_arithmetic", "steps=2", "prompts_per_step=2", "group_size=2", "generation.max_tokens=8",
        "data.size=16", "data.held_out_size=4", "scoring.workers=0",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULED)
def test_a_schedule_that_ends_goes_on_as_the_refusal_says(case: str, rough: Nursery, tmp_path: Path) -> None:
    """With more steps the learning rates of the steps that are done would have been others: a new run begins."""
    words = (*SCHEDULED[case], *SHORT, f"trainer.schedule={case.partition(' ')[2]}")
    assert rough.run(*words, "hydra.run.dir=run", cwd=tmp_path).code == 0
    before = files_of(tmp_path / "run")
    for changed, last in ((["steps=3"], 3), ([], 4)):
        done = rough.run("resume", "run", *changed, cwd=tmp_path)
        refused(done, "resume: ", "start a new run from its newest checkpoint")
        remedy = done.err.partition("rlft resume run/checkpoints/")[2].partition(")")[0].strip()
        again = rough.run("resume", *f"run/checkpoints/{remedy}".split(), f"hydra.run.dir={last}", cwd=tmp_path)
        assert again.code == 0, again.err
        assert [line["step"] for line in metrics(tmp_path / str(last))] == list(range(1, last + 1))
    assert files_of(tmp_path / "run") == before


def test_more_steps_of_a_schedule_that_ends_are_refused_with_the_command_that_goes_on(
    rough: Nursery, stopped: Path
) -> None:
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace("schedule: constant", "schedule: cosine"))
    done = rough.run("resume", "run", "steps=9", cwd=stopped.parent)
    command = "or start a new run from its newest checkpoint: rlft resume run/checkpoints/step_000004 steps=9"
    refused(done, "resume: the config differs from the run's (steps: 5 -> 9), got run; ", command)
    done = rough.run("resume", "run", "steps=9", "trainer.lr=0.5", cwd=stopped.parent)
    refused(done, "resume: the config differs from the run's (steps: 5 -> 9; trainer.lr: ", "or start a new run\n")
