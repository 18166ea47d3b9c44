"""Runs a pipeline with several seeds, numbers of threads and kinds of instructions: mean, spread and range by stage.

    python scripts/repeat_pipeline.py scripts/rlhf_arithmetic.sh                          # seeds 0 to 4, one thread
    python scripts/repeat_pipeline.py scripts/rlhf_arithmetic.sh --seeds 0 --threads 1 2 3 --instructions default avx2
    python scripts/repeat_pipeline.py scripts/r1_arithmetic.sh --seeds 0 1 2 --parallel 2

A seed decides LoRA initialisation, data order and sampling. Threads and instructions (ATEN_CPU_CAPABILITY) change the
last bits of sums and nothing else: a result that depends on them is no result. Every combination is a run of the script
in a folder of its own below --out. Stopped or killed, the same command goes on: what is finished is not repeated, a
begun pipeline goes on where it was. In --out it leaves repetitions.md (the tables) and repetitions.json (all numbers).

Exit codes: 0 done, 1 a pipeline failed, 2 a mistake the user can fix, 130 stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from stage_table import HEADINGS

from rlft.system.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
STAGES, RECORD, LOG = "stages.json", "repetition.json", "pipeline.log"
TABLE, NUMBERS = "repetitions.md", "repetitions.json"
AUTOMATIC = "automatic"
SOURCES = ("scripts/*.sh", "recipes/*.yaml", "configs/**/*.yaml")
"""What a finished pipeline must have been made from to count."""
SHOWN = tuple(key for key in HEADINGS if key != "seconds")


class PipelineError(Exception):
    """A pipeline ended with an exit code other than 0."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Repetition:
    """One run of the script. instructions: a value of ATEN_CPU_CAPABILITY; automatic leaves the choice to torch."""

    seed: int
    threads: int
    instructions: str

    @property
    def name(self) -> str:
        kind = "" if self.instructions == AUTOMATIC else f"-{self.instructions}"
        return f"seed_{self.seed}-threads_{self.threads}{kind}"

    def environment(self) -> dict[str, str]:
        """The variables that the script and its stages run with."""
        variables = {**os.environ, "SEED": str(self.seed), "OMP_NUM_THREADS": str(self.threads)}
        variables.pop("ATEN_CPU_CAPABILITY", None)
        if self.instructions != AUTOMATIC:
            variables["ATEN_CPU_CAPABILITY"] = self.instructions
        return variables


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background, where a shell has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    options = parse(arguments)
    if not options.script.is_file():
        print(f"repeat_pipeline: there is no such script, got {options.script}", file=sys.stderr)
        return 2
    out = options.out or Path("runs") / f"{options.script.stem}_repeated"
    repetitions = sorted(map(make_repetition, set(product(options.seeds, options.threads, options.instructions))))
    try:
        run_all(options.script, out, repetitions, options.parallel)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    except PipelineError as error:
        print(f"repeat_pipeline: {error}", file=sys.stderr)
        return 1
    publish(out, repetitions)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="repeat_pipeline.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path, help="a script that takes a folder and SEED and leaves stages.json there")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="K", help="default: 0 to 4")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], metavar="N", help="OMP_NUM_THREADS; default: 1")
    parser.add_argument(
        "--instructions",
        nargs="+",
        default=[AUTOMATIC],
        choices=[AUTOMATIC, "default", "avx2", "avx512"],
        help=f"ATEN_CPU_CAPABILITY; default: {AUTOMATIC}, torch's own choice",
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="pipelines at a time; default: 1")
    parser.add_argument("--out", type=Path, help="folder of all that is made; default: runs/<script>_repeated")
    return parser.parse_args(arguments)


def make_repetition(parts: tuple[int, int, str]) -> Repetition:
    seed, threads, instructions = parts
    return Repetition(seed=seed, threads=threads, instructions=instructions)


# -- running -----------------------------------------------------------------------------------------------------------
def run_all(script: Path, out: Path, repetitions: Sequence[Repetition], parallel: int) -> None:
    """Runs every repetition that is not finished, `parallel` at a time.

    Raises:
        PipelineError: one of them failed; those that had begun are ended, and go on when the command is repeated.
    """
    stop, pool = threading.Event(), ThreadPoolExecutor(parallel)
    try:
        futures = [pool.submit(run_one, script, out / each.name, each, stop) for each in repetitions]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:  # also of an interruption, whenever it comes
        stop.set()
        pool.shutdown(cancel_futures=True)


def run_one(script: Path, folder: Path, repetition: Repetition, stop: threading.Event) -> None:
    """Runs the script in this folder until it ends, unless the folder holds a finished run of the same sources."""
    made_from = sources(script)
    if read_record(folder).get("made_from") == made_from or stop.is_set():
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{repetition.name}: begins", flush=True)
    start = time.monotonic()
    with (folder / LOG).open("a") as log:
        process = subprocess.Popen(
            ["bash", str(script), str(folder)],
            env=repetition.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the script and the stage that it runs are stopped together, and once
        )
        code, seconds = ended(process, stop)
    seconds += read_record(folder).get("processor_seconds", 0.0)  # of earlier parts of an interrupted pipeline
    finished = code == 0 and not stop.is_set()
    record = {**asdict(repetition), "processor_seconds": seconds, "made_from": made_from if finished else None}
    write_atomically(folder / RECORD, json.dumps(record) + "\n")
    if stop.is_set():
        return
    if code:
        raise PipelineError(f"{repetition.name} ended with exit code {code}; see {folder / LOG}")
    print(f"{repetition.name}: done in {time.monotonic() - start:.0f} s", flush=True)


def ended(process: subprocess.Popen[bytes], stop: threading.Event) -> tuple[int, float]:
    """Waits for the process, which is ended if `stop` is set: (exit code, processor seconds of it and its stages)."""
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    while not pid:
        stopping = stop.wait(0.2)
        if stopping:
            os.killpg(process.pid, signal.SIGTERM)
        pid, status, usage = os.wait4(process.pid, 0 if stopping else os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)  # nobody else waits for it
    return process.returncode, usage.ru_utime + usage.ru_stime


def sources(script: Path) -> str:
    """A digest of the script, the recipes and the defaults: what a pipeline's numbers follow from, the seed aside."""
    digest = hashlib.sha256(script.read_bytes())
    for file in sorted(file for pattern in SOURCES for file in ROOT.glob(pattern)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_record(folder: Path) -> dict[str, Any]:
    """What an earlier run of this repetition left; {} where there was none. made_from is null if it did not finish."""
    return json.loads((folder / RECORD).read_text()) if (folder / RECORD).is_file() else {}


# -- tables ------------------------------------------------------------------------------------------------------------
def publish(out: Path, repetitions: Sequence[Repetition]) -> None:
    """Writes and prints the tables, and writes the numbers."""
    runs = [(each, json.loads((out / each.name / STAGES).read_text())) for each in repetitions]
    minutes = [read_record(out / each.name)["processor_seconds"] / 60 for each in repetitions]
    parts = [summary(runs), every_run(runs), f"Processor minutes of a pipeline: {spread(minutes, 1)}"]
    text = "\n\n".join(parts) + "\n"
    write_atomically(out / TABLE, text)
    numbers = [{**asdict(each), "stages": stages} for each, stages in runs]
    write_atomically(out / NUMBERS, json.dumps(numbers, indent=2) + "\n")
    print(text)


def summary(runs: Sequence[tuple[Repetition, Sequence[Mapping[str, Any]]]]) -> str:
    """A Markdown table: of each stage and each of its numbers mean ± standard deviation (least to greatest)."""
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for _, stages in runs:
        for stage in stages:
            by_stage.setdefault(stage["stage"], []).append(stage)
    shown = [key for key in SHOWN if any(key in stage for stages in by_stage.values() for stage in stages)]
    lines = [row("stage", *(HEADINGS[key] for key in shown)), row(*["---"] * (len(shown) + 1))]
    for name, stages in by_stage.items():
        cells = (spread([s[key] for s in stages if key in s], 0 if key == "kept" else 3) for key in shown)
        lines.append(row(name, *cells))
    return "\n".join(lines)


def every_run(runs: Sequence[tuple[Repetition, Sequence[Mapping[str, Any]]]]) -> str:
    """A Markdown table: a line a run, its accuracy or held-out pairs after each stage."""
    names = list(dict.fromkeys(s["stage"] for _, stages in runs for s in stages if result(s) is not None))
    lines = [row("seed", "threads", "instructions", *names), row(*["---"] * (len(names) + 3))]
    for each, stages in runs:
        results = {stage["stage"]: result(stage) for stage in stages}
        cells = ("" if (value := results.get(name)) is None else f"{value:.3f}" for name in names)
        lines.append(row(str(each.seed), str(each.threads), each.instructions, *cells))
    return "\n".join(lines)


def result(stage: Mapping[str, Any]) -> float | None:
    """The accuracy of a stage that trains; None of one that samples."""
    return stage.get("accuracy", stage.get("pairs"))


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation (least to greatest) of these values; empty without any.

    >>> spread([0.5, 0.75], 2)
    '0.62 ± 0.18 (0.50 to 0.75)'
    >>> spread([0.5], 2)
    '0.50'
    """
    if not values:
        return ""
    mean = f"{statistics.mean(values):,.{digits}f}"
    if len(values) == 1:
        return mean
    least, greatest = (f"{end(values):,.{digits}f}" for end in (min, max))
    return f"{mean} ± {statistics.stdev(values):,.{digits}f} ({least} to {greatest})"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
