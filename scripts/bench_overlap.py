"""Seconds of a step with sampling beside the update (overlap.lag=1) and after it, in turn: A B A B.

    python scripts/bench_overlap.py                    # two cores, some minutes
    python scripts/bench_overlap.py --rounds 5 --override epochs=2

The run's own process and its one engine (cluster.engines=1) are pinned to a core each. A step with a lag should take
max(sample, score + credit + update) + publish of the step without one. Leaves overlap.md in <out>.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from bench_work import table, where_and_when

WORDS = (
    "train", "model.device=cpu", "generation=transformers", "prompts_per_step=64", "group_size=8", "data.size=4096",
    "generation.max_tokens=48", "generation.temperature=1.4", "prompts.max_tokens=64", "lora.rank=16", "lora.alpha=16",
    "trainer.lr=1e-9", "eval.every=0", "checkpoint.every=0", "token_values.every=0", "rollouts.every=0",
    "algorithm.mismatch=token_truncate", "scoring.workers=1", "logger=[jsonl]", "name=overlap", "cluster.engines=1",
)  # fmt: skip
STAGES = ("sample", "score", "credit", "update", "publish", "step")
ENGINE = "rlft-engine-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each run; the first two and the last are left out")
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("bench"))
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[int, dict[str, list[float]]] = {lag: {stage: [] for stage in STAGES} for lag in (0, 1)}
    for number in range(options.rounds):
        for lag in (0, 1):
            lines = run(out / "run", lag, options.steps, options.override)
            for line in lines[2:-1]:
                for stage in STAGES:
                    seconds[lag][stage].append(line[f"time/{stage}"])
            print(f"round {number + 1}, lag {lag}: {statistics.median(seconds[lag]['step']):.3f} s a step", flush=True)
    text = report(seconds, options)
    (out / "overlap.md").write_text(text + "\n")
    print(text)


def run(folder: Path, lag: int, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of each step of a run whose engine has a core of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    given = {word.partition("=")[0] for word in overrides}
    usual = [word for word in WORDS if word.partition("=")[0] not in given]
    words = [*usual, f"overlap.lag={lag}", f"steps={steps}", f"hydra.run.dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen([sys.executable, "-m", "rlft.cli", *words], env=environment, stdout=subprocess.DEVNULL)
    pinned: set[int] = set()
    try:
        while process.poll() is None:
            pin(psutil.Process(process.pid), pinned)
            time.sleep(0.1)
    finally:
        process.kill()
    if process.returncode:
        sys.exit(f"rlft {' '.join(words)} ended with {process.returncode}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def pin(main_process: psutil.Process, pinned: set[int]) -> None:
    """Gives the run's own process the first core and each engine the second one, once."""
    try:
        for process in (main_process, *main_process.children(recursive=True)):
            is_engine = any(ENGINE in word for word in process.cmdline())
            if process.pid not in pinned and (is_engine or process == main_process):
                for thread in process.threads():  # later ones inherit it
                    os.sched_setaffinity(thread.id, {1} if is_engine else {0})
                pinned.add(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return


def report(seconds: dict[int, dict[str, list[float]]], options: argparse.Namespace) -> str:
    middle = {lag: {stage: statistics.median(values) for stage, values in own.items()} for lag, own in seconds.items()}
    serial = middle[0]
    bound = max(serial["sample"], serial["score"] + serial["credit"] + serial["update"]) + serial["publish"]
    rows = [
        [
            str(lag),
            *(f"{middle[lag][stage]:.3f} ({min(own):.3f} to {max(own):.3f})" for stage, own in seconds[lag].items()),
        ]
        for lag in (0, 1)
    ]
    faster = serial["step"] / middle[1]["step"]
    return (
        f"{table(['overlap.lag', *(f'{stage}, s' for stage in STAGES)], rows)}\n\n"
        f"max(sample, score + credit + update) + publish of the step without a lag: {bound:.3f} s; a step with it takes"
        f" {middle[1]['step'] / bound:.2f} times that, and the step without a lag {faster:.2f} times as long as with"
        " it.\n\n"
        f"Medians (smallest to largest) of {options.rounds} runs of each kind in turn, {options.steps - 3} steps each. "
        f"{where_and_when()}."
    )


if __name__ == "__main__":
    main()
