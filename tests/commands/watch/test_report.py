"""`rlft report`: what a page holds of one run or several, and the images of their prompts."""

import base64
import copy
import gzip
import json
import re
from pathlib import Path

import pytest
from audited_runs import lines_of

from rlft.commands.watch import report
from rlft.commands.watch.report import MAX_POINTS, report_of, thinned
from rlft.commands.watch.report_completions import HELD_OUT, MAX_TEXT, TRAINED, choose
from rlft.commands.watch.runs import same_settings
from rlft.config.compose import compose
from rlft.config.keys import keys_of
from rlft.config.schema import RunConfig
from rlft.runs.lines import encode


def read_page(file):
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', file.read_text())
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


# -- of a real run -----------------------------------------------------------------------------------------------------
def test_a_report_holds_what_the_run_left(trained, tmp_path, ran):
    out = tmp_path / "page.html"
    assert ran(["report", str(trained), f"out={out}"]).out.strip() == str(out)
    [run] = read_page(out)["runs"]
    lines = lines_of(trained / "metrics.jsonl")
    assert run["steps"] == [line["step"] for line in lines]
    assert run["metrics"]["reward/mean"] == pytest.approx([line["reward/mean"] for line in lines], rel=1e-4)
    assert run["config"]["algorithm._target_"] == "rlft.algorithm.grpo.GRPO"
    assert run["config"]["origin.commit"]
    assert run["status"] == "finished"
    groups = run["completions"]["groups"]
    assert {group["kind"] for group in groups} == {TRAINED, HELD_OUT}
    shown = [
        (g["step"], g["id"], row["text"], row["reward"]) for g in groups if g["kind"] == TRAINED for row in g["rows"]
    ]
    left = [
        (line["step"], line["prompt_id"], line["completion"], line["reward"])
        for file in (trained / "rollouts").iterdir()
        for line in lines_of(file)
    ]
    assert sorted(shown) == sorted(left), "a small run is shown whole"
    assert run["completions"]["completions"] == len(left)


def test_the_default_place_is_the_runs_folder_and_of_several_the_current_one(make_run, here):
    first, second = make_run("lr=1e-05,seed=0"), make_run("second")
    for word in (str(first), f"run={first}"):  # a folder that is named as sweeps name theirs is no word
        assert report.report([word]) == first / "report.html"
    assert report.report([str(first), str(second)]) == Path("report.html")
    assert len(read_page(here / "report.html")["runs"]) == 2


def test_a_run_without_metrics_and_a_place_that_cannot_be_written_are_refused(make_run, ran):
    run = make_run("run")
    for out, problem in (("page.pdf", "must be an HTML file, got page.pdf"), ("/proc/p.html", "cannot be wri")):
        assert ran(["report", str(run), f"out={out}"], ends=2).err.startswith(f"rlft: out: {problem}")
    for name in ("metrics.jsonl", "eval.jsonl"):
        (run / name).unlink()
    assert "the run has no metrics.jsonl" in ran(["report", str(run)], ends=2).err
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("command: train", "command: sample"))
    assert "a run of rlft sample writes no metrics.jsonl, which a report needs" in ran(["report", str(run)], ends=2).err


# -- curves, alarms, configs -------------------------------------------------------------------------------------------
def test_long_series_are_averaged_and_that_is_said():
    lines = [{"step": n, "a": float(n), "b": None if n % 2 else 1.0} for n in range(1, 5 * MAX_POINTS + 1)]
    found = thinned(lines)
    assert len(found) == MAX_POINTS
    assert found[0] == {"step": 5, "a": 3.0, "b": 1.0}
    assert found[-1]["step"] == 5 * MAX_POINTS
    assert thinned(lines[:MAX_POINTS]) == lines[:MAX_POINTS]


def test_alarms_are_told_with_their_words_and_marks_without_words_are_not_lost(make_run):
    run = make_run("run", steps=4, marks={2: "kl", 3: "clipped"})
    (run / "alarms.jsonl").write_bytes(encode({"step": 2, "name": "kl", "text": "too far\x1b[0m"}))
    found = report_of([run], 10**6)["runs"][0]
    assert found["alarms"] == [
        {"step": 2, "name": "kl", "text": "too far\\x1b[0m"},
        {"step": 3, "name": "clipped", "text": ""},
    ]
    assert not any(name.startswith("alarm/") for name in found["metrics"])


def test_runs_that_differ_by_their_seed_alone_are_one_band(make_run):
    runs = [make_run(f"s{i}", seed=i) for i in range(3)] + [make_run("other", lr=0.5)]
    found = report_of(runs, 10**6)
    assert found["seeds"] == [[0, 1, 2]]
    assert [row["key"] for row in found["differences"]] == ["name", "seed", "trainer.lr"]
    assert found["runs"][0]["label"] == "trainer.lr=0.01, seed=0"
    assert found["runs"][3]["setting"] == "trainer.lr=0.5"


def test_seeds_may_differ_in_what_a_resume_may_change_and_in_nothing_else():
    """Every key of the schema, one at a time: a resumed seed stays in its band, and another experiment is in none."""
    plain = compose(["+recipe=grpo_arithmetic"])
    for key, known in keys_of(RunConfig).items():
        section, _, name = key.rpartition(".")
        inside, other = (plain.get(section) if section else plain), copy.deepcopy(plain)
        if key in ("seed", "command", "steps") or not isinstance(inside, dict) or isinstance(inside.get(name), dict):
            continue
        (other[section] if section else other)[name] = "another"
        is_path = name == "path" or known.roles
        free = bool(known.free and not is_path) or known.measured is False
        assert (same_settings([plain, other]) == [[0, 1]]) == free, key
    cosine = {**plain, "trainer": {**plain["trainer"], "schedule": "cosine"}}
    longer = [{**config, "steps": 80} for config in (plain, cosine)]
    assert same_settings([plain, longer[0]]) == [[0, 1]]
    assert same_settings([cosine, longer[1]]) == [], "the schedule ends with the steps"


def test_a_folder_above_runs_stands_for_all_of_them_that_have_metrics(make_run):
    first, second, loading = (make_run(name) for name in ("a", "b", "loading"))
    for name in ("metrics.jsonl", "eval.jsonl"):
        (loading / name).unlink()
    assert report.folders_of([str(first.parent), str(second)]) == [first, second]


def test_the_table_of_a_sweep_is_told_beside_its_runs(make_run):
    run = make_run("a")
    (run.parent / "sweep.csv").write_text(
        "trial,state,trainer.lr,accuracy\n1,complete,0.000123456789,0.5\n0,<b>,0.01,\n"
    )
    assert report.report_of([run], 1000, ["nowhere", str(run)])["sweeps"] == []
    [sweep] = report.report_of([run], 1000, [str(run.parent)])["sweeps"]
    assert sweep == {
        "name": str(run.parent),
        "columns": ["trial", "state", "trainer.lr", "accuracy"],
        "rows": [["1", "complete", "0.00012346", "0.5"], ["0", "<b>", "0.01", ""]],
    }
    above = report.report_of([run], 1000, [str(run.parent.parent)])["sweeps"]
    assert above == [sweep], "of a folder above sweeps each has its table"


def test_nothing_that_a_model_writes_is_hidden_or_markup(hostile, make_run):
    run = make_run("run", steps=1, completion=hostile)
    page = (report.report([str(run)])).read_text()
    assert "owned" not in page, "all of it is packed"
    assert page.count("<script") == 4
    row = next(row for group in choose(run, 10**7)["groups"] for row in group["rows"])
    assert all(char.isprintable() or char == "\n" for char in row["text"])
    assert not set(row["text"]) & set("\u3164\u2800\ufe0f\u034f")
    assert len(row["text"]) <= 2 * MAX_TEXT
    assert row.get("cut") == (len(hostile) if len(hostile) > MAX_TEXT else None)


def test_only_the_pages_own_scripts_and_styles_may_run(make_run):
    page = report.report([str(make_run("run"))]).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert policy[1].count("sha256-") == 5
    assert not re.search(r"https?://(?!github\.com/leeoniya)", page), "nothing is fetched"
