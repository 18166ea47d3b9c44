"""What a run may write, counted beside what it wrote, and told where the disk has less."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
from plans import planned
from slow_cases import slow

from rlft import cli
from rlft.plan.sizes import note_of_disk
from rlft.system.disk import size_text

SMALL = ["steps=3", "prompts_per_step=2", "group_size=4", "generation=transformers", "generation.max_tokens=12",
         "model.device=cpu", "lora.rank=2", "data.size=16", "data.held_out_size=4", "eval.every=2",
         "eval.num_prompts=2", "eval.num_samples=2", "scoring.workers=0", "console=null",
         "checkpoint.every=1"]  # fmt: skip


def on_disk(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "words",
    [[], slow(["snapshot.reference=ema", "snapshot.ema_decay=0.9", "algorithm.kl_coef=0.1", "snapshot.old=copy"])],
)
def test_a_run_writes_no_more_than_was_said_and_checkpoints_nearly_as_much(words, tmp_path):
    folder = tmp_path / "run"
    said = planned(*SMALL, *words, "token_budget=512").disk_bytes()
    assert cli.run(["train", *SMALL, *words, "checkpoint.keep=9", f"hydra.run.dir={folder}"]) == 0
    kept = on_disk(folder / "checkpoints")  # three; checkpoint.keep=2 and one that is being written are as many
    assert 0.75 * said["checkpoints"] < kept < said["checkpoints"]
    # A completion's line has at least its keys, 250 bytes with their punctuation, and a number of 3 bytes and a token
    # of 1 for each of 1 to 12 tokens; it is counted with 2048 + 12 x (4 + 8 + 24) + 64 x 4 = 2736.
    assert 250 / 2736 * said["rollouts"] < on_disk(folder / "rollouts") < said["rollouts"]
    # A line of metrics has at least 30 names of 15 bytes with a number of 3, of the 2048 that are counted; that of an
    # evaluation is counted with three examples of 2048 + 12 x 4 + 64 x 4 besides.
    metrics = sum((folder / name).stat().st_size for name in ("metrics.jsonl", "eval.jsonl"))
    assert 3 * 30 * 18 < metrics < said["metrics"]
    # A line of the chain has at least 14 digests of 64 digits in steps, of the 2048 that are counted.
    assert 3 * 14 * 64 < (folder / "chain.jsonl").stat().st_size < said["chain"]


def test_the_plan_lists_what_each_part_takes_and_what_lowers_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [word for word in SMALL if not word.startswith("steps=")]
    words += ["steps=400", "checkpoint.keep=5", "token_budget=512"]
    said = planned(*words).disk_bytes()
    assert cli.run(["plan", *words, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["disk"]
    assert {part["part"]: part["bytes"] for part in listed} == said
    assert listed[0]["lowered_by"] == "lower checkpoint.keep"
    assert cli.run(["plan", *words]) == 0
    page = [line.split()[:3] for line in capsys.readouterr().out.partition("Disk, at most")[2].splitlines()]
    for name, size in {**said, "together": sum(said.values())}.items():
        assert [name, *size_text(size).split()] in page


def test_only_checkpoints_and_rollouts_that_stay_are_counted():
    def size(part, *words):
        return planned(*SMALL, "token_budget=512", *words).disk_bytes()[part]

    one = size("checkpoints", "checkpoint.every=0")
    # every=1 of 30 steps: keep=4 and the next one
    assert size("checkpoints", "steps=30", "checkpoint.keep=4") == 5 * one
    rollouts = size("rollouts") // 3
    for words, kept in (("", 30), ("rollouts.every=7", 4), ("rollouts.keep=2", 3), ("rollouts.every=0", 0)):
        assert size("rollouts", "steps=30", *words.split()) == kept * rollouts


def test_what_is_there_already_is_not_needed_again(tmp_path, monkeypatch):
    space = SimpleNamespace(f_bavail=1, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    assert note_of_disk({"checkpoints": 4096, "metrics": 0}, tmp_path) is None
    assert note_of_disk({"checkpoints": 9000, "metrics": 0}, tmp_path) == (
        f"the run may write up to 9 kB (checkpoints 9 kB), and 5 kB are free on the disk of {tmp_path}: free some,"
        " lower checkpoint.keep, or choose another folder (hydra.run.dir)"
    )
    (tmp_path / "there").write_bytes(bytes(5000))  # two blocks
    assert note_of_disk({"checkpoints": 9000, "metrics": 0}, tmp_path) is None


@pytest.mark.parametrize("command", ["train", slow("plan")])
def test_run_and_plan_say_it_before_weights_are_loaded(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    space = SimpleNamespace(f_bavail=9, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    monkeypatch.setattr("rlft.loop.parts.load_for_training", lambda *args: 1 / 0)
    cli.run([command, *SMALL, "hydra.run.dir=run"])
    told = " ".join("".join(capsys.readouterr()).split())
    assert "the run may write up to " in told
    assert "and 37 kB are free on the disk of run: free some, lower checkpoint.keep" in told
