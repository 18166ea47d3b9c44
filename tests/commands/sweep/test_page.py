"""The table, sweep.csv and sweep.png of a study; the table of a plain sweep, whole at the width of a usual terminal."""

import csv
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from audited_runs import write
from in_one_test import each

from rlft.commands.sweep import page
from rlft.commands.sweep.checks import Checked
from rlft.commands.sweep.command import Grid
from rlft.commands.sweep.page import rows, write_csv
from rlft.commands.sweep.space import read_space
from rlft.commands.sweep.study import Trial
from rlft.config.overrides import parse
from rlft.runs import run_status
from tests.commands.sweep.fake_studies import keys, make_and_do, make_study


def test_a_studys_results_are_a_table_a_file_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    study = make_and_do(tmp_path, keys(trials=10, seeds=2, pruner="median", startup=3))
    study.show()
    rows = study.trials.rows()
    with (tmp_path / "sweep.csv").open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert [int(entry["trial"]) for entry in found] == [row.number for row in rows]
    best = found[0]
    assert float(best["accuracy"]) == rows[0].value
    assert float(best["trainer.lr"]) == rows[0].params["trainer.lr"]
    low, high = map(float, best["by_seed"].split())
    assert float(best["standard_error"]) == pytest.approx((high - low) / 2)  # of two values: half their distance
    assert best["folder"] == str(tmp_path / best["trial"])
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "sweep of 10 trials, best accuracy first" in out
    assert "pruned: median at step" in out
    assert f"written to {tmp_path / 'sweep.csv'}" in out.replace("\n", "")


def test_a_study_without_trials_leaves_nothing(tmp_path):
    study = make_study(tmp_path, keys(trials=1))
    study.show()
    assert not (tmp_path / "sweep.csv").exists()


def test_a_studys_title_names_no_best_trial_where_none_has_a_value(tmp_path, capsys, monkeypatch):
    study = make_and_do(tmp_path, keys(trials=1))
    alone = [Trial(number=0, params=study.trials.rows()[0].params, state="failed", value=None, why="broken")]
    monkeypatch.setattr(type(study.trials), "rows", lambda self: alone)
    study.show()
    assert capsys.readouterr().out.splitlines()[0] == "sweep of 1 trial"


def test_what_the_table_says_of_a_trial():
    row = Trial(number=3, params={}, state="pruned", value=0.2, why="median at step 4")
    assert page.state_of(row) == "pruned: median at step 4"
    assert page.state_of(Trial(number=0, params={}, state="complete", value=0.5)) == ""


HEADERS = ["job", "keys", "before", "accuracy", "reward", "seconds"]


def space_of(*words):
    return read_space(["+recipe=grpo_arithmetic", "steps=4", *words, "hydra.sweep.dir=swept"], "train", is_study=False)


@pytest.fixture
def finished(tmp_path):
    """Writes what a job leaves in its folder: an evaluation before and after, and the last step's metrics."""

    def finish(number, accuracy, sweep=tmp_path):
        folder = sweep / str(number)
        folder.mkdir()
        evaluations = [{"step": step, "accuracy": accuracy * step / 4, "accuracy_se": 0.0625} for step in (0, 4)]
        write(folder / "eval.jsonl", evaluations)
        run_status.write(folder, 4, run_status.Status.finished)
        write(folder / "metrics.jsonl", [{"step": 4, "reward/mean": 0.5, "time/step": 1234.56}])

    return finish


def printed(tmp_path, space, capsys):
    configs = [SimpleNamespace(plain={}) for _ in space.combinations()]
    checked = Checked(
        command="train", parsed=parse(["-m"]), space=space, configs=configs, cluster=None, on_gpus=False, plans={}
    )
    Grid(checked, tmp_path).show()
    return capsys.readouterr().out.splitlines()


def test_headers_and_numbers_are_whole_at_80_columns(tmp_path, finished, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    space = space_of("trainer.lr=0.0001,0.0003", "lora.target_modules=[q_proj,k_proj,v_proj],all-linear")
    for number in range(4):
        finished(number, accuracy=0.1 * number)
    lines = printed(tmp_path, space, capsys)
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("written to"))]
    assert max(map(len, table)) <= 80
    assert lines[1].split() == HEADERS
    assert re.split("  +", lines[2].strip())[::2] == ["3", "0.000", "0.500"]
    text = "".join(re.split("  +", re.sub(r"^ +\d? +", "", line))[0] for line in table[2:])
    assert text.count("trainer.lr=0.0001,lora.target_modules=[q_proj,k_proj,v_proj]") == 1, "no value is lost"


def test_a_swept_key_named_as_a_result_keeps_its_values(tmp_path, finished):
    for number in range(2):
        finished(number, accuracy=0.5)
    table = rows(tmp_path, space_of("reward=exact_match,math"), {})
    with write_csv(tmp_path, list(table[0]), [list(row.values()) for row in table]).open(newline="") as stream:
        found = [(row["reward="], row["reward"]) for row in csv.DictReader(stream)]
    assert found == [("exact_match", "0.5"), ("math", "0.5")]


@each(("evaluation", "title"), [
    ({"accuracy": 0.5}, "best held-out accuracy first"),
    ({"eval/loss": 0.5}, "lowest held-out loss first"),
    (None, "highest reward first"),
])  # fmt: skip
def test_the_title_names_only_what_was_measured(evaluation, title, tmp_path, capsys):
    for job in "01":
        (tmp_path / job).mkdir(exist_ok=True)
        write(tmp_path / job / "metrics.jsonl", [{"step": 4, "reward/mean": 0.5}])
        run_status.write(tmp_path / job, 4, run_status.Status.finished)
    write(tmp_path / "1" / "eval.jsonl", [{"step": 4, **evaluation}] if evaluation else [])  # one job is enough
    lines = printed(tmp_path, space_of("seed=0,1"), capsys)
    assert lines[0] == f"sweep of 2 jobs, {title}"
    order = [row["job"] for row in rows(tmp_path, space_of("seed=0,1"), {})]
    assert order == ([0, 1] if evaluation is None else [1, 0])


def test_only_finished_jobs_are_ranked_and_the_others_say_why_they_are_not(tmp_path, finished, capsys, monkeypatch):
    """Six jobs of random fates, 30 times: the accuracy of one that has failed is the highest, and ranks nothing."""
    monkeypatch.setenv("COLUMNS", "200")
    space, random_numbers = space_of("trainer.lr=1e-3,2e-3,3e-3", "seed=0,1"), random.Random(3)
    for case in range(30):
        folder = tmp_path / str(case)
        folder.mkdir()
        fates = [random_numbers.choice(("finished", "stopped", "refused", "killed", "not begun")) for _ in range(6)]
        accuracies = random_numbers.sample([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 6)
        failed = {}
        for number, (fate, measured) in enumerate(zip(fates, accuracies, strict=True)):
            if fate == "refused":
                failed[number] = "trainer.lr: must be above 0"
            if fate in ("refused", "not begun"):
                continue
            finished(number, measured + (fate != "finished"), folder)
            if fate == "stopped":
                run_status.write(folder / str(number), 4, run_status.Status.stopped, "loss is nan", "BrokenRunError")
            if fate == "killed":
                run_status.write(folder / str(number), 4, run_status.Status.running)
                (folder / str(number) / run_status.LOCK).touch()
        table = rows(folder, space, failed)
        ranked = sorted((n for n in range(6) if fates[n] == "finished"), key=lambda n: -accuracies[n])
        lost = [n for n in range(6) if fates[n] in ("stopped", "refused")]
        rest = [n for n in range(6) if fates[n] in ("killed", "not begun")]
        assert [row["job"] for row in table] == [*ranked, *lost, *rest]
        whys = {"stopped": "loss is nan", "refused": "trainer.lr: must be above 0"}
        for row in table:
            fate = fates[row["job"]]
            state = {"finished": "finished", **dict.fromkeys(whys, "failed")}.get(fate, "unfinished")
            assert (row["state"], row["why"]) == (state, whys.get(fate, ""))
        page.show_jobs(folder, space, failed)
        printed_text = capsys.readouterr().out
        assert ("best held-out accuracy first" in printed_text) == bool(ranked)
        assert [line for line in printed_text.splitlines() if " failed: " in line] == [
            f"job {number} failed: {whys[fates[number]]}" for number in lost
        ]
        assert printed_text.count("unfinished") == len(rest)
        settings = {n // 2: [accuracies[m] for m in ranked if m // 2 == n // 2] for n in ranked}
        order = sorted(settings, key=lambda n: -sum(settings[n]) / len(settings[n]))
        shown = re.findall(r"  (trainer\.lr=\S+) +(\d+) +\S+ +(\d\S+)", printed_text)[: len(order)]
        values = {f"trainer.lr=0.00{n + 1}": settings[n] for n in order}
        assert shown == [(n, str(len(of)), f"{sum(of) / len(of):.3f}") for n, of in values.items()]
        best = [line for line in printed_text.splitlines() if line.startswith("best: ")]
        assert len(best) == bool(order)
        if order:
            best_run = max((accuracies[n], n) for n in ranked if n // 2 == order[0])[1]
            assert best[0].endswith(f" in {folder / str(best_run)}"), "its best seed, not the newest run"


def test_a_difference_below_two_standard_errors_is_called_noise():
    def told(*values):
        results = [page.Result(name="", values=v, folder=Path(), evaluation_error=0.1) for v in values]
        return page.noise(results)

    # errors of the means: 0.05 each, of the difference 0.0707: 0.10 is noise, and 0.20 is not
    high, close, far = [0.85, 0.95], [0.75, 0.85], [0.65, 0.75]
    said = "within noise of the best (2 standard errors): "
    assert told(high, close) == f"{said}1 of 1 other setting\n"
    assert told(high, close, far) == f"{said}1 of 2 other settings\n"
    assert told(high, far) == f"{said}0 of 1 other setting\n"
    assert "1 of 1" in told([0.9], [0.7])
    assert told([0.9], [0.7]).endswith("; seeds may differ by more: run several\n")
    assert told(high) == ""
