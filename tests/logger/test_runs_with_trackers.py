"""A run's files, and what is made of them, are the same with every tracker and without."""

import csv
import hashlib
import json
from pathlib import Path

import pytest
from slow_cases import slow_but
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlft import cli
from rlft.runs.chain import metrics_part

WORDS = (
    "+recipe=grpo_arithmetic", "steps=2", "prompts_per_step=2", "group_size=4", "generation=transformers",
    "generation.max_tokens=16", "model.device=cpu", "lora.rank=2", "data.size=16", "data.held_out_size=8",
    "eval.every=1", "eval.num_prompts=4", "eval.num_samples=2", "scoring.workers=0", "checkpoint.every=1",
    "alarms.patience=1", "alarms.equal_groups=0.01", "alarms.constant_reward=1", "console=null",
)  # fmt: skip
WANDB = ("logger=wandb", "logger.wandb.mode=offline")
TRACKERS = {
    "together": ("--config-dir", "mine", "logger=[wandb,tensorboard,raising]", "logger.wandb.mode=offline"),
    "mlflow": ("logger=mlflow",),
    "trackio": ("logger=trackio",),
}
RAISING = "class Raising:\n" + "".join(
    f"    def {method}(self, argument):\n        raise OSError('{method}')\n"
    for method in ("start", "stage", "step", "evaluation", "note", "finish")
)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains with these words, in a folder that is the working directory from then on; returns the run's folder."""
    place = tmp_path_factory.mktemp("tracked")
    (place / "mine" / "logger").mkdir(parents=True)
    (place / "raises.py").write_text(RAISING)
    (place / "mine" / "logger" / "raising.yaml").write_text("raising:\n  _target_: raises.Raising\n")

    def train(name, *words):
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(place)
            assert cli.run(["train", *WORDS, *words, f"hydra.run.dir=runs/{name}"]) == 0
        return place / "runs" / name

    return train


@pytest.fixture(scope="module")
def alone(train):
    return train("alone")


def content(folder, names):
    """What is in these files, without times and digests of them."""
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    for name in ("metrics.jsonl", "chain.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        files[name] = [{**line["sha256"], "config": None} if "sha256" in line else metrics_part(line) for line in lines]
    return files


@pytest.mark.parametrize("name", slow_but("together", TRACKERS))
def test_trackers_change_no_file_of_a_run_not_even_by_their_errors(name, train, alone, capfd):
    folder = train(name, *TRACKERS[name])
    names = [str(file.relative_to(alone)) for file in alone.rglob("*") if file.is_file() and file.name != "config.yaml"]
    assert {"metrics.jsonl", "eval.jsonl", "alarms.jsonl", "rollouts/step_000001.jsonl"} <= {*names}
    assert content(folder, names) == content(alone, names)
    told = "logger.raising: start failed (OSError: start); the run continues without it"
    assert capfd.readouterr().err.splitlines().count(told) == (name == "together")
    if name == "together":
        assert list(folder.glob("wandb/offline-run-*/run-*.wandb")), "it is tracked meanwhile"
        assert list(folder.glob("tensorboard/*tfevents*"))


@pytest.mark.slow
def test_what_reads_a_run_needs_no_logger(train, alone, capfd, monkeypatch):
    tracked = train("read", *WANDB)
    monkeypatch.chdir(alone.parents[1])

    def said(*words):
        assert cli.run(list(words)) == 0, (words, capfd.readouterr().err)
        return capfd.readouterr().out

    assert "\nruns/read\t\ttrain\tfinished\t2/2\t" in said("runs", "runs")
    for words in ("watch", "diff runs/alone", "audit recompute=0 replay=1", "report"):
        said(*words.split(), "runs/read")
    assert (tracked / "report.html").is_file()
    said("resume", "runs/read", "steps=3", "logger=null")
    said("resume", "runs/alone", "steps=3", "logger=tensorboard")
    for folder in (alone, tracked):
        assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    words = [word for word in WORDS if word != "eval.every=1"]
    said("train", *words, "eval.every=2", "logger=tensorboard", "hydra.run.dir=runs/again")
    said("resume", "runs/again", "steps=3")
    for name, steps, evaluated, files in (("alone", [3], [3], 1), ("again", [1, 2, 3], [0, 2, 3], 2)):
        folder = Path("runs", name)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        reader = EventAccumulator(str(folder / "tensorboard"))
        reader.Reload()
        points = [(event.step, event.value) for event in reader.Scalars("reward/mean")]
        assert points == [(step, pytest.approx(lines[step - 1]["reward/mean"])) for step in steps]
        assert [event.step for event in reader.Scalars("eval/accuracy")] == evaluated
        assert len(list((folder / "tensorboard").iterdir())) == files


@pytest.mark.slow
def test_a_sweep_with_a_tracker_has_its_table(alone, capfd, monkeypatch):
    monkeypatch.chdir(alone.parents[1])
    words = ["trainer.lr=0.01,0.001", *WANDB, "hydra.sweep.dir=sweep"]
    assert cli.run(["train", "-m", *WORDS, *words]) == 0
    assert "sweep of 2 jobs, best held-out accuracy first" in capfd.readouterr().out
    rows = list(csv.DictReader(Path("sweep", "sweep.csv").read_text().splitlines()))
    assert [(row["steps"], bool(row["accuracy"])) for row in rows] == [("2", True)] * 2
