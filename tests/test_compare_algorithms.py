"""The comparison of the algorithms: what it trains, its table and picture from made-up runs, and a real run."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compare_algorithms as compare
import pytest
import yaml

from rlft.types import UserError

pytestmark = pytest.mark.slow

SCRIPT = Path(compare.__file__)
Asked = Callable[..., argparse.Namespace]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    """Options of a command line that trains into tmp_path."""
    return lambda *words: compare.parse(["--out", str(tmp_path), *words])


def write_lines(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_up(
    job: Any,
    accuracy: Sequence[float],
    *,
    sampled: Sequence[int] | None = None,
    seconds: float = 2.0,
    processor: float | None = 7.0,
    peak: int = 10**9,
    kl: float | None = 0.25,
    key: str = "eval/exact_match",
) -> None:
    """The folder of a finished run of `job`: an evaluation before and after every step."""
    job.folder.mkdir(parents=True)
    origin = {"origin": {"torch": "2.13.0", "commit": "abc123", "whole": True}}
    (job.folder / "config.yaml").write_text(yaml.safe_dump({**job.config, **origin}))
    metrics = [
        {"step": step, "reward/mean": 0.5, "time/step": seconds, "memory/peak_bytes": peak}
        | ({"sampled/completions": sampled[step - 1]} if sampled else {})
        for step in range(1, len(accuracy))
    ]
    write_lines(job.folder / "metrics.jsonl", metrics)
    evaluations = [
        {"step": step, key: value, "eval/kl_base": kl, "eval/reward/format": 0.5 + step / 8}
        for step, value in enumerate(accuracy)
    ]
    write_lines(job.folder / "eval.jsonl", evaluations)
    record = {"machine": "2 CPU cores (made up)", "date": "2026-01-02", "processor_seconds": processor}
    (job.folder / "comparison.json").write_text(json.dumps(record))


def jobs_of(asked: Asked, *words: str) -> list[Any]:
    """Jobs of GRPO of two steps that are evaluated after each."""
    return compare.make_jobs(asked("--only", "grpo", *words, "--override", "steps=2", "eval.every=1"))


def made_up_run(name: str, seed: int, accuracy: list[float]) -> Any:
    return compare.Run(
        name=name,
        seed=seed,
        completions=[256, 512],
        seconds=[1.0, 1.0],
        evaluated_at=[0, 256, 512],
        accuracy=accuracy,
        in_format=[0.5, 0.6, 0.7],
        kl_base=[None, None, None],
        processor_seconds=None,
        peak_bytes=10**9,
        machine="2 CPU cores (made up)",
        torch="2.13.0",
        commit="abc123",
        date="2026-01-02",
    )


def made_up(*runs: Any, task: str = "arithmetic") -> Any:
    return compare.Comparison(task=task, runs=list(runs), failures={})


# -- what is trained ---------------------------------------------------------------------------------------------------
def test_by_default_every_algorithm_without_a_teacher_is_compared_and_no_other_command_or_stage(asked: Asked) -> None:
    names = {job.name for job in compare.make_jobs(asked("--seeds", "0"))}
    algorithms = {file.stem for file in (SCRIPT.parents[1] / "configs" / "algorithm").glob("*.yaml")}
    assert names == algorithms - {"opd"} | {"iterative_grpo"}
    assert compare.chosen_names(["opd"], compare.known_names(None)) == ["opd"], "if it is named, it is"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "grpo", "grop"], "--only: there is no such recipe, got grop; choose of "),
        (["--seeds", "1", "1"], "--seeds: one is given twice"),
        (["--only", "grpo", "--override", "eval.every=0"], "eval.every: grpo is never evaluated"),
        (["--only", "grpo", "--override", "trainer.lr=-1"], "trainer.lr: "),
        (["--jobs", "0"], "--jobs: must be 1 or more, got 0"),
        (["--redraw"], "--redraw: there are no raw numbers"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert compare.run([*words, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"compare_algorithms: {told}")
    assert not (tmp_path / "out").exists()


def test_finished_runs_are_not_repeated_and_a_failed_one_does_not_stop_the_others(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = jobs_of(asked, "--seeds", "0", "1", "2")
    make_up(jobs[0], [0.4, 0.5, 0.6])
    make_up(jobs[2], [0.4, 0.5, 0.8])
    made = jobs[2].folder.rename(tmp_path / "made")
    fails = "print('step 1'); print('rlft: stopped: the loss is nan'); print('bye'); raise SystemExit(1)"
    moves = f"import os, shutil; assert os.environ['OMP_NUM_THREADS'] == '3'; shutil.move({str(made)!r}, '{{}}')"
    said = {jobs[1].key: fails, jobs[2].key: moves.format(jobs[2].folder)}
    monkeypatch.setattr(compare, "command", lambda job, _: [sys.executable, "-c", said[job.key]])
    monkeypatch.setattr(compare, "num_cores", lambda: 7)  # for two runs at a time: 3 each
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    failures = compare.train_all(jobs, asked("--jobs", "2"))
    log = tmp_path / "grpo" / "seed_1.log"
    why = f"exit code 1: rlft: stopped: the loss is nan ({log})"
    assert failures == {"grpo/seed_1": why}
    record = json.loads((jobs[2].folder / "comparison.json").read_text())
    assert record["machine"].endswith(", 2 runs at a time")
    assert 0 < record["processor_seconds"] < 60
    runs = [compare.read_run(job) for job in jobs if compare.is_finished(job)]
    assert [run.seed for run in runs] == [0, 2]
    assert compare.publish(compare.Comparison(task="arithmetic", runs=runs, failures=failures), tmp_path) == 1
    assert why in (tmp_path / "comparison.md").read_text()


# -- the table ---------------------------------------------------------------------------------------------------------
def test_the_table_has_means_spreads_and_sums_over_the_seeds(asked: Asked) -> None:
    jobs = jobs_of(asked)
    before, after, kl = [0.40, 0.42, 0.44], [0.90, 0.94, 0.98], [0.1, 0.2, 0.3]
    for job, first, last, divergence in zip(jobs, before, after, kl, strict=True):
        seconds = (2.0, 3.0, 10.0)[job.seed]  # a step
        processor = (None, 5.0, 8.0)[job.seed]  # the first was resumed
        peak = (1 + job.seed) * 10**8
        make_up(job, [first, 0.7, last], seconds=seconds, processor=processor, peak=peak, kl=divergence)
    comparison = made_up(*map(compare.read_run, jobs))
    # Deviations of three evenly spaced values are -d, 0, d: the sample standard deviation is d, the interval 4.302653 x
    # d / sqrt(3) = 2.484138 d to either side. Evaluations at 0, 256, 512: 0.5 is at 256 (0.5 - first) / (0.7 - first):
    # 85.33, 73.14, 59.08: mean 72.5, deviation 13.14, half an interval 32.6. Two steps of 2, 3 or 10 s: the median of
    # 4, 6, 20. Two steps of 256 completions. Of 5 and 8 processor seconds the median is 6.5, which rounds to even.
    assert compare.cells("grpo", comparison.runs) == [
        "`grpo`", "0.420 ± 0.050", "0.940 ± 0.099", "73 ± 33", "0.750 ± 0.000", "0.200 ± 0.248", "512", "6", "6",
        "0.30 GB",
    ]  # fmt: skip
    text = compare.table(compare.make_rows(comparison.runs), comparison)
    assert text.splitlines()[0].count("|") == text.splitlines()[2].count("|") == 11
    assert "2 CPU cores (made up), torch 2.13.0, commit abc123, 2026-01-02." in text


def test_the_price_of_an_accuracy_is_on_the_line_to_the_first_evaluation_that_has_it() -> None:
    at = [0, 256, 512, 768]
    # 0.5 is a quarter of the way from 0.4 to 0.8: 256 + 64. Later values do not count.
    assert compare.completions_to(0.5, at, [0.1, 0.4, 0.8, 0.3]) == pytest.approx(320.0, abs=1e-9)
    assert compare.completions_to(0.5, at, [0.6, 0.2, 0.1, 0.7]) == 0.0
    assert compare.completions_to(0.5, at, [0.1, 0.2, 0.3, 0.4]) is None
    # 0.5 halfway from 0.4 to 0.6 and a quarter from 0.4 to 0.8, the evaluations 256 completions apart: 384 and 320.
    accuracies = [[0.4, 0.4, 0.6], [0.1, 0.4, 0.4], [0.2, 0.4, 0.8]]
    runs = [made_up_run("grpo", seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    assert compare.price(runs) == "352 (2 of 3)"
    assert compare.price(runs[1:2]) == "not reached"


def test_what_dynamic_sampling_threw_away_counts_and_accuracy_is_exact_match_also_where_another_reward_decides(
    asked: Asked,
) -> None:
    decides, told, absent = jobs_of(asked)
    make_up(decides, [0.4, 0.5, 0.6], sampled=[256, 384])
    make_up(told, [0.4, 0.5, 0.7], key="eval/reward/exact_match")
    make_up(absent, [0.4, 0.5, 0.7], key="eval/format")
    # 256, then 256 + 384; the evaluation before the first step is at 0.
    run = compare.read_run(decides)
    assert (run.completions, run.evaluated_at, run.accuracy) == ([256, 640], [0, 256, 640], [0.4, 0.5, 0.6])
    assert compare.read_run(told).accuracy == [0.4, 0.5, 0.7]
    with pytest.raises(UserError, match="was evaluated without exact_match"):
        compare.read_run(absent)


# -- picture and raw numbers -------------------------------------------------------------------------------------------


def test_the_page_has_the_numbers_that_were_measured() -> None:
    recipes = SCRIPT.parents[1] / "recipes"
    page = (recipes.parent / "docs" / "benchmarks" / "methods.md").read_text()
    page = page.replace("| TRL's GRPO |", "| `trl_grpo` |")
    page = re.sub(r" (group|[ab]) \| (?=completions to|not reached|[\d,]+ ±)", " ", page)  # a column of that time
    comparison = compare.read_comparison(recipes / "chains.json")
    rows = compare.make_rows(comparison.runs)
    assert {len(runs) for runs in rows.values()} == {5}
    lines = [line for line in compare.table(rows, comparison).splitlines() if line.startswith("| ")]
    lines = [line for line in lines if not line.startswith("| ---")]
    assert len(lines) == 1 + 20 + 1 + 19, "two heads, the methods, and those against grpo"
    for line in lines:
        assert line in page


# -- the real thing ----------------------------------------------------------------------------------------------------
def test_a_real_run_is_stopped_resumed_and_then_not_repeated(tmp_path: Path) -> None:
    tiny = ["prompts_per_step=4", "group_size=2", "eval.num_prompts=4", "eval.num_samples=1", "eval.every=6"]
    words = ["--only", "grpo", "--seeds", "0", "--out", "out", "--override", "steps=12", *tiny]
    command = [sys.executable, str(SCRIPT), *words]
    metrics = tmp_path / "out" / "grpo" / "seed_0" / "metrics.jsonl"
    with (tmp_path / "first.log").open("wb") as log:
        first = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size) and first.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(timeout=120) == 130, (tmp_path / "first.log").read_text()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert 1 <= len(steps) < 12, "stopped on its way, after a whole step"

    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert second.returncode == 0, second.stderr
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [*range(1, 13)]
    (run,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"]
    assert run["evaluated_at"] == [0, 6 * 8, 12 * 8]
    assert run["peak_bytes"] > 10**8
    assert run["kl_base"][0] == 0.0, "a fresh adapter is the base"
    assert run["kl_base"][-1] != 0.0
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 5_000

    before = metrics.stat().st_mtime_ns
    third = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert third.returncode == 0
    assert "runs: 1, 1 finished already" in third.stdout
    assert metrics.stat().st_mtime_ns == before
