"""The comparison of trainers: what it runs, what it goes on with after an interruption, and what its tables say."""

import json
import os
import sys
from collections.abc import Callable

import bench_step
import pytest
from bench_step import Result, added, report, watching_card
from bench_work import Measured, MeasurementError, run_to_the_end
from run_processes import happens, is_alive

from rlft.commands.doctor.work import Workload

pytestmark = pytest.mark.slow

WORK = Workload(group=2, prompt_tokens=8, completion_tokens=4)
Benchmark = Callable[..., list[str]]


def measured(step, *, card=None, **stages):
    return Measured(seconds=[{"sample": 1.0, "train": 2.0, **stages, "step": step}], peak=10**9, card=card)


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """Runs the script with these words; gives the processes that it started. None is, and each takes a step of 4 s."""
    started: list[str] = []

    def measure(trainer: str, size: str, work: Workload, asked: object, micro_batch: int | None = None) -> Measured:
        started.append(f"{trainer} {micro_batch}" if micro_batch else trainer)
        return measured(4.0)

    monkeypatch.setattr(bench_step, "measure", measure)
    monkeypatch.setattr(bench_step, "fastest_micro_batch", lambda *_: started.append("trials") or 8)

    def run(*words: str) -> list[str]:
        command = ["bench_step.py", "--shapes", "8+4", "--groups", "2", "--only", "rlft", "trl"]
        command += ["--out", str(tmp_path), *words]
        monkeypatch.setattr(sys, "argv", command)
        started.clear()
        bench_step.main()
        return [*started]

    return run


def test_a_step_is_measured_and_told(monkeypatch, capsys, tmp_path):
    words = ["--only", "rlft", "--shapes", "tiny", "--groups", "2", "--rounds", "1", "--steps", "2"]
    words += ["--out", str(tmp_path), "--override", "model.device=cpu"]
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *words])
    bench_step.main()
    said = capsys.readouterr().out
    [result] = json.loads((tmp_path / "step.json").read_text())
    [measured] = result["runs"]["rlft"]
    assert len(measured["seconds"]) == 2, "the first step is left out"
    assert measured["peak"] > 2**27
    for step in measured["seconds"]:
        stages = [step[name] for name in ("sample", "score", "credit", "update", "publish")]
        assert min(stages) > 0
        assert 0.8 * step["step"] < sum(stages) <= step["step"], "the stages are the step"
    told = (tmp_path / "step.md").read_text()
    assert told.strip() in said
    assert "| tiny G2 | rlft |" in told
    assert "of 1 processes x 2 steps, engine transformers." in told


# -- after an interruption -------------------------------------------------------------------------------------------
def test_trainers_run_in_turn_and_what_was_measured_is_not_measured_again(benchmark, tmp_path):
    assert benchmark("--rounds", "2") == ["rlft", "trials", "trl 8", "rlft", "trl 8"]
    table = (tmp_path / "step.md").read_text()
    assert benchmark("--rounds", "2") == []
    assert (tmp_path / "step.md").read_text() == table
    assert benchmark("--rounds", "3") == ["rlft", "trl 8"]


@pytest.mark.parametrize(
    "words", ["--steps 3", "--engine vllm", "--override a=b", ""], ids=lambda words: words or "place"
)
def test_what_was_measured_otherwise_or_elsewhere_is_measured_anew(words, monkeypatch, benchmark, tmp_path):
    benchmark("--rounds", "1", "--steps", "2")
    lines = len((tmp_path / "measurements.jsonl").read_text().splitlines())
    if not words:
        monkeypatch.setattr(bench_step, "where", lambda: "another GPU")
    assert len(benchmark("--rounds", "1", "--steps", "2", *words.split())) == 3
    assert len((tmp_path / "measurements.jsonl").read_text().splitlines()) == 2 * lines, "the others stay"


def test_a_trainer_that_fails_is_told_and_tried_again_the_next_time(monkeypatch, benchmark, tmp_path):
    works = bench_step.measure

    def fails(trainer: str, *rest: object) -> Measured:
        if trainer == "trl":
            raise MeasurementError("exit 1: out of memory; see trl.log")
        return works(trainer, *rest)

    monkeypatch.setattr(bench_step, "measure", fails)
    assert benchmark("--rounds", "2").count("rlft") == 2
    told = (tmp_path / "step.md").read_text()
    assert "- 17m 8+4 G2, trl: exit 1: out of memory; see trl.log" in told
    assert "its step" not in told, "without the other there is no ratio"
    monkeypatch.setattr(bench_step, "measure", works)
    assert [process.split()[0] for process in benchmark("--rounds", "2")] == ["trl", "trl"]
    assert "Without a measurement" not in (tmp_path / "step.md").read_text()


# -- what is run -----------------------------------------------------------------------------------------------------


def test_a_process_that_fails_or_hangs_ends_with_its_last_words_and_everything_it_started(tmp_path):
    log, file = tmp_path / "log", tmp_path / "child"
    words = [sys.executable, "-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)"]
    with pytest.raises(MeasurementError, match=r"exit 3: the reason; see .*log"):
        run_to_the_end(words, log=log, seconds=60)
    code = f"import subprocess, time; p = subprocess.Popen(['sleep', '60']); open({str(file)!r}, 'w').write(str(p.pid))"
    with pytest.raises(MeasurementError, match="not done after 2 s"):
        run_to_the_end([sys.executable, "-c", f"{code}; time.sleep(60)"], log=log, seconds=2)
    assert happens(lambda: not is_alive(int(file.read_text())), 30), "what the process had started is still there"


# -- the tables ------------------------------------------------------------------------------------------------------
def test_the_tables_have_stages_shares_ratios_and_utilisation():
    ours = [measured(step, score=0.4, publish=0.6, card=card * 10**9) for step, card in ((4.0, 8), (5.0, 6))]
    theirs = [measured(12.0, card=16 * 10**9), measured(10.0, card=20 * 10**9)]
    result = Result(size="0.5b", work=WORK, runs={"rlft": ours, "trl": theirs}, failed={}, micro_batch=8)
    text = report([result], {result.name: 0.5}, "foot")
    # 16 completions of 4 tokens in a median step of 4.5 s and of 11 s
    assert "| 14 | 1.00 GB | 8.00 GB |" in text
    assert "| 6 | 1.00 GB | 20.00 GB |" in text
    assert "| 0.5b 8+4 G2 | rlft | 22% | 9% | 44% | 13% |" in text
    # Of processes that ran one after the other: 12 / 4 and 10 / 5; the most that rlft took of the GPU to theirs.
    assert "| 0.5b 8+4 G2 | trl | 2.50 (2.00 to 3.00) | 1.00 (1.00 to 1.00) | 1.00 | 0.40 | 8 |" in text
    assert "| 0.5b 8+4 G2 | rlft | 25% |" in text, "0.5 s of products in 2 s"
    assert text.endswith("foot")


# -- the memory of a GPU --------------------------------------------------------------------------------------------
def test_the_memory_of_a_card_is_the_most_that_was_added(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/words\nfor n in 500 '[N/A]' 2500 1500; do echo $n; done\n"
                       f"touch {tmp_path}/told\nsleep 60\n")  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with watching_card() as readings:
        assert happens(lambda: (tmp_path / "told").exists() and added(readings) == 2000 * 2**20, 60)
    assert added(readings) == 2000 * 2**20
    assert "memory.used" in (tmp_path / "words").read_text()
