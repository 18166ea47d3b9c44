"""A study from its words to its trials, whose runs are made up: what resuming it refuses, and from where."""

import csv
import errno
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from slow_cases import slow

from rlft.commands.sweep import checks, command, page, space
from rlft.commands.sweep.study import Trials
from rlft.commands.watch.report import sweep_of
from rlft.config.overrides import parse
from rlft.system.disk import DiskError
from rlft.types import UserError
from tests.commands.sweep.fake_studies import STEPS, FakeRuns, accuracy, do_all

SMALL = (
    "generation=transformers", "model.device=cpu", "scoring.workers=0", f"steps={STEPS}", "eval.every=1",
    "eval.num_prompts=4", "prompts_per_step=4", "minibatches=1", "console=null", "sweep=optuna",
    "hydra.sweep.dir=sweep",
)  # fmt: skip
RATES = ("trainer.lr=interval(1e-5,1e-2)", "sweep.trials=2")
DATA = ("data=jsonl", "data.path=data.jsonl", "data.held_out_path=held_out.jsonl")


@dataclass(frozen=True)
class Begin:
    """Does a study of made-up runs in the folder `place`; `again` resumes the one in this folder."""

    runs: FakeRuns

    def __call__(self, *more, again=None):
        self.runs.ran.clear()
        if again is None:
            words = {word.partition("=")[0]: word for word in (*SMALL, *more)}  # of two words of a key the later one
            command.sweep("train", parse(["-m", *words.values()], "train"))
        else:
            command.resume(Path(again), more)
        return self.runs


@pytest.fixture
def begin(tmp_path, monkeypatch):
    runs = FakeRuns()

    def made_up(study, *others):
        do_all(study, runs)

    monkeypatch.setattr(command, "drive", made_up)
    monkeypatch.setattr(Trials, "picture", lambda *_: b"")
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path / "place")
    for name in ("data", "held_out", "more"):
        rows = ({"prompt": f"What is {i} + {len(name)}?", "answer": str(i + len(name))} for i in range(16))
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, beta in (("one", 0.85), ("two", 0.8)):
        file = Path("mine", "recipe", f"{name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n# A recipe.\ntrainer:\n  beta1: {beta}\n")
    return Begin(runs)


def refusal(do):
    with pytest.raises(UserError) as refused:
        do()
    return str(refused.value)


def table(folder="sweep"):
    with Path(folder, "sweep.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_seeds_metric_and_direction_are_those_of_the_words(begin):
    runs = begin(*RATES, "sweep.trials=4", "seed=5", "sweep.seeds=2", "sweep.metric=eval/reward/format",
                 "sweep.direction=min")  # fmt: skip
    assert runs.ran == [(trial, seed) for trial in range(4) for seed in (5, 6)]
    # the made-up runs have 1 - accuracy as that metric
    values = {row["trial"]: [1.0 - accuracy({"trainer.lr": float(row["trainer.lr"])}, STEPS, seed) for seed in (5, 6)]
              for row in table()}  # fmt: skip
    best = min(values, key=lambda trial: sum(values[trial]))
    first = table()[0]
    assert first["trial"] == best
    assert float(first["eval/reward/format"]) == pytest.approx(sum(values[best]) / 2, abs=1e-12)
    assert [float(value) for value in first["by_seed"].split()] == pytest.approx(values[best], abs=1e-12)
    assert [row["trial"] for row in table()] == sorted(values, key=lambda trial: sum(values[trial]))


def test_too_few_gpus_are_refused_before_the_sweep_has_a_folder(begin, monkeypatch):
    monkeypatch.setattr(checks, "are_on_gpus", lambda plains: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    said = refusal(lambda: begin(*RATES, "cluster.jobs=2"))
    told = "cluster.jobs: each job that runs at a time has a GPU of its own, and there are 1 here, got 2"
    assert said.startswith(told)
    assert not Path("sweep").exists()


class Killed(BaseException):
    """Stands for a kill: nothing in the study handles it."""


def test_the_report_of_a_killed_sweep_has_the_trials_so_far(begin, monkeypatch):
    def before(run, step):
        if (run.trial.number, step) == (2, 5):
            raise Killed

    monkeypatch.setattr(page.Page, "show", lambda self: None)  # a kill lets no process show anything
    begin.runs.before = before
    with pytest.raises(Killed):
        begin(*RATES, "sweep.trials=4")
    sweep = sweep_of(Path("sweep"))
    assert sweep["columns"][:4] == ["trial", "state", "trainer.lr", "accuracy"]
    assert [row[1] for row in sweep["rows"]] == ["complete", "complete", "unfinished"]


def test_what_goes_wrong_with_the_picture_does_not_hide_why_the_sweep_ended(begin, monkeypatch, capsys):
    def broken(*_, **__):
        raise ValueError("no font")

    def before(run, step):
        raise OSError(errno.ENOSPC, "the disk is full")  # of a trial's own errors a sweep does not end

    monkeypatch.setattr(Trials, "picture", broken)
    begin.runs.before = before
    with pytest.raises(DiskError, match="the disk is full"):
        begin(*RATES)
    assert "note: the results so far could not be shown: no font" in capsys.readouterr().err


@pytest.mark.slow
def test_a_median_that_waits_for_more_trials_than_there_are_is_noted(begin, capsys):
    said = "note: of 3 trials median prunes none: it waits for sweep.startup=3 complete ones; lower sweep.startup"
    begin(*RATES, "sweep.trials=3", "sweep.pruner=median", "sweep.startup=2", "hydra.sweep.dir=acts")
    assert "median prunes none" not in capsys.readouterr().err
    begin(*RATES, "sweep.trials=3", "sweep.pruner=median", "sweep.startup=3")
    assert f"{said}, or raise sweep.trials\n" in capsys.readouterr().err
    begin("lora.rank=2,4,8", "sweep.trials=9", "sweep.pruner=median", "sweep.startup=3", "hydra.sweep.dir=each")
    assert f"{said}\n" in capsys.readouterr().err


@pytest.mark.slow
def test_combinations_that_are_done_cannot_be_made_more(begin):
    assert begin("sweep.trials=20", "lora.rank=4,8").ran == [(0, 0), (1, 0)]
    said = refusal(lambda: begin("sweep.trials=40", again="sweep"))
    assert said == "sweep.trials: all 2 combinations are done, got 40; begin another sweep, with other values"


def test_a_sweep_that_is_done_goes_on_with_more_trials_and_else_says_how_and_changes_nothing(begin):
    begin(*RATES)
    before = Path("sweep", space.RECORD).read_text()
    assert refusal(lambda: begin(again="sweep")).endswith("raise it: rlft resume sweep sweep.trials=4")
    assert refusal(lambda: begin("sweep.trials=1", again="sweep")).startswith("sweep.trials: the sweep has all its")
    assert Path("sweep", space.RECORD).read_text() == before
    assert begin("sweep.trials=4", "cluster.timeout=900", again="sweep").ran == [(2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("path", "changed"),
    [slow("data.jsonl,more.jsonl", "more.jsonl"), ("data.jsonl", "held_out.jsonl")],
    ids=["the data of some trials", "the held-out data"],
)
def test_data_that_change_between_two_parts_of_a_sweep_are_refused(path, changed, begin):
    begin(*RATES, DATA[0], f"data.path={path}", DATA[2])
    lines = Path(changed).read_text().splitlines(keepends=True)
    Path(changed).write_text("".join([*lines[:-1], lines[-1].replace("What", "And what")]))
    said = refusal(lambda: begin("sweep.trials=4", again="sweep"))
    assert said.startswith("data.path: the ")
    assert "changed since the sweep began" in said
    assert said.endswith("put the data back as they were, or begin another sweep")
    Path(changed).write_text("".join(lines))
    assert len(begin("sweep.trials=4", again="sweep").ran) == 2


@pytest.mark.slow
def test_a_recipe_that_changes_between_two_parts_of_a_sweep_is_refused(begin):
    begin(*RATES, "--config-dir", "mine", "+recipe=two,one")
    file = Path("mine", "recipe", "one.yaml")
    text = file.read_text()
    file.write_text(text.replace("0.85", "0.95"))
    said = refusal(lambda: begin("sweep.trials=4", again="sweep"))
    assert said == (
        "trainer.beta1: was 0.85 when the sweep in sweep began, and its trials would differ, got 0.95; "
        "put the YAML back as it was, or begin another sweep"
    )
    file.write_text(f"{text}console:\n  live: false\nname: other\n")
    assert len(begin("sweep.trials=4", again="sweep").ran) == 2, "neither loggers nor names change a trial"


@pytest.mark.slow
def test_the_same_command_with_another_folder_of_yaml_is_another_sweep(begin):
    begin(*RATES, "--config-dir=mine")
    shutil.copytree("mine", "yours")
    for words, got in ((("--config-dir", "yours"), "yours"), ((), "n")):
        said = refusal(lambda words=words: begin(*RATES, *words))
        assert said.startswith(f"--config-dir: differs from that of the sweep in sweep, mine, got {got}")
    begin(*RATES, "--config-dir", str(Path("mine").resolve()))


REFUSED = {
    "cluster.lanes=2": "cluster.lanes: cannot change when a sweep is resumed",
    "cluster.ranks=2": "cluster.ranks: cannot change when a sweep is resumed",
    "cluster=lanes": "cluster.lanes: was auto when the sweep in sweep began",
    "hydra.sweep.dir=other": "hydra.sweep.dir: a sweep is resumed in its own folder, got other; leave it out",
}


def test_what_would_change_a_sweeps_runs_cannot_change_when_it_goes_on(begin):
    Path("mine", "cluster").mkdir()
    Path("mine", "cluster", "lanes.yaml").write_text("# Two lanes.\ndefaults:\n  - local\n  - _self_\n\nlanes: 2\n")
    begin(*RATES, "--config-dir", "mine")
    for change, problem in REFUSED.items():
        said = refusal(lambda change=change: begin("sweep.trials=4", change, again="sweep"))
        assert said.startswith(problem)
        if "cannot change" in said:
            assert all(key in said for key in space.MAY_CHANGE if key != "hydra.sweep.dir")


def test_a_sweep_with_relative_paths_goes_on_from_any_directory(begin, tmp_path, monkeypatch, capsys):
    begin(*RATES, *DATA, "--config-dir", "mine", "+recipe=one")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert begin("sweep.trials=3", again="../place/sweep").ran == [(2, 0)]
    said = capsys.readouterr().err
    assert f"relative paths are read from {tmp_path}/place, where the sweep was begun" in said
    assert f"resume it with: rlft resume {tmp_path}/place/sweep\n" in said, "which works where the user is"
    assert (tmp_path / "place" / "sweep" / "2" / "seed_0").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def keep(folder, config):
    """Begins or goes on with a study of this config."""
    configs = [{"trainer.lr": 1e-4, **config}]
    now = space.StudyRecord(command="train", options=(), words=(), start=".", configs=configs, fingerprints=())
    space.check_same_study(folder, now)
    space.write_record(folder, now)


def test_how_often_a_run_saves_is_no_change_and_another_checkpoint_of_a_run_is(tmp_path):
    old = {"lora.path": "runs/sft/checkpoints/step_4/policy", "checkpoint.every": 1}
    keep(tmp_path, old)
    keep(tmp_path, {**old, "checkpoint.every": 2})
    said = refusal(lambda: keep(tmp_path, {**old, "lora.path": "runs/sft/checkpoints/step_8/policy"}))
    assert said.startswith(f"lora.path: was {old['lora.path']} when the sweep")
    assert "name a checkpoint's folder in it" in said


def test_a_study_whose_record_is_damaged_does_not_go_on(begin):
    begin(*RATES)
    Path("sweep", space.RECORD).write_text("[torn")
    assert refusal(lambda: begin(again="sweep")).startswith("resume: sweep.yaml in that folder cannot be read")
