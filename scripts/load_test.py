"""Loads that a run must bear: what they take of memory, open files, temporary files and time, beside what is allowed.

    python scripts/load_test.py long-run                 # 2,000 steps of every reward that starts something
    python scripts/load_test.py scoring                  # 10,000 prompts x 64 completions by two workers
    python scripts/load_test.py large-completions        # 64 prompts x 8 completions of 1 MB
    python scripts/load_test.py large-data --gigabytes 2 # --tokenised: as a run reads it, some 1 MB a second and core

Each part prints a table and exits with 1 where something is over its bound. What it writes goes to --out, which is to
be empty; a run of 2,000 steps takes about half an hour of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench_work import table
from load_processes import MB, SANDBOX, Sample, Watcher, last_step, trends

SLOPE_MB = 1.0
"""What a process may grow by, in MB a 100 steps."""

MB_BESIDE = 120
"""For what a library allocates on its first use."""

MB_OF_WORKER = 60
LONGEST_S = 6 * 3600.0
NUM_PROMPTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A measured value in words, what is allowed, and whether it is kept to; None: it is only told."""

    what: str
    value: str
    allowed: str = ""
    holds: bool | None = None


def main() -> None:
    asked = arguments()
    with tempfile.TemporaryDirectory(prefix="rlft-load-") as temporary:
        findings = PARTS[asked.part](asked, asked.out or Path(temporary))
    verdicts = {None: "", True: "holds", False: "DOES NOT HOLD"}
    rows = [[finding.what, finding.value, finding.allowed, verdicts[finding.holds]] for finding in findings]
    print(table(["what", "measured", "allowed", ""], rows))
    sys.exit(any(finding.holds is False for finding in findings))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int, default=2000, help="of the long run")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the large data")
    parser.add_argument("--tokenised", action="store_true", help="read the large data as a run does")
    parser.add_argument("--out", type=Path, default=None, help="an empty folder; by default a temporary one")
    return parser.parse_args()


# -- a long run --------------------------------------------------------------------------------------------------------
class Rater(BaseHTTPRequestHandler):
    """A reward server: a completion's score is its number of letters modulo 7, as a share of 6."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"scores": [len(text) % 7 / 6 for text in body["completions"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def rater() -> Iterator[str]:
    """Serves in a thread; gives the address to post to."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rater)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
    finally:
        server.shutdown()
        server.server_close()


def write_prompts(file: Path, number: int = NUM_PROMPTS) -> None:
    """Sums with tests: what a completion is as a program has to print nothing, or the sum."""
    with file.open("w") as lines:
        for i in range(number):
            a, b = 10 + i % 83, 10 + i // 7 % 71
            tests = [{"input": "", "output": "" if i % 2 else str(a + b)}]
            row = {"prompt": f"What is {a} + {b}? ({i})", "answer": str(a + b), "tests": tests}
            lines.write(json.dumps(row) + "\n")


def words(data: Path, url: str, steps: int, run: Path) -> list[str]:
    """What is said to `rlft train`: steps as small as they come, and everything that a run can do beside them."""
    return [
        *("train", "name=load", f"steps={steps}", "prompts_per_step=2", "group_size=2", "generation=transformers"),
        *("generation.max_tokens=12", "model.device=cpu", "lora.rank=2", "lora.alpha=2", "trainer.lr=1e-5"),
        *("data=jsonl", f"data.path={data}", "data.metadata_fields=[tests]", "prompts.max_tokens=64"),
        *("reward=[exact_match,code,http]", "reward.code.tests_field=tests", "reward.code.program_in=text"),
        *(f"reward.http.url={url}", "scoring.timeout=60", "scoring.on_error=0"),
        *("reward.code.seconds=20", "reward.code.cpu_seconds=5"),
        *("eval.every=25", "eval.num_prompts=2", "eval.num_samples=1", "checkpoint.every=25", "checkpoint.keep=2"),
        *("snapshot.reference=ema", "snapshot.ema_decay=0.95", "algorithm.kl_coef=0.01", f"hydra.run.dir={run}"),
    ]


def long_run(asked: argparse.Namespace, out: Path) -> list[Finding]:
    """The run from its first step to its last, with `rlft watch` beside it."""
    temporary, run, data = out / "temporary", out / "run", out / "sums.jsonl"
    temporary.mkdir(parents=True)
    write_prompts(data)
    # One thread, as the model is small; torch makes an empty cache folder wherever it is imported.
    kept = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(out / "torch")}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **kept}
    rlft, began, metrics = [sys.executable, "-m", "rlft.cli"], time.monotonic(), run / "metrics.jsonl"
    with rater() as url, (out / "run.log").open("w") as log:
        process = subprocess.Popen([*rlft, *words(data, url, asked.steps, run)], env=environ, stdout=log, stderr=log)
        while not metrics.exists() and process.poll() is None:
            time.sleep(0.2)
        watching = subprocess.Popen([*rlft, "watch", str(run)], env=environ, stdout=log, stderr=log)
        more, file = {"rlft watch": watching.pid}, out / "samples.jsonl"
        with Watcher(process.pid, lambda: last_step(metrics), 1.0, more=more, file=file) as watcher:
            code = process.wait()
        try:
            watching.wait(60)
        finally:
            watching.kill()
    steps, left = last_step(metrics), sorted(path.name for path in temporary.iterdir())
    return [
        Finding(what="steps", value=f"{steps}", allowed=f"{asked.steps}", holds=code == 0 and steps == asked.steps),
        Finding(what="seconds", value=f"{time.monotonic() - began:.0f}"),
        *process_findings(watcher.samples, asked.steps // 5, asked.steps // 2),
        Finding(what="processes of sandboxes at once, at most", value=f"{watcher.most_sandboxed}"),
        Finding(
            what="left in the temporary folder", value=", ".join(left) or "nothing", allowed="nothing", holds=not left
        ),
    ]


def process_findings(samples: Sequence[Sample], warm_up: int, min_steps: int) -> list[Finding]:
    """A row for each process that was there for long, and the most that a sandbox's process held."""
    findings = []
    for trend in trends(samples, warm_up, min_steps):
        handles = f"{trend.handles_before:.0f} then {trend.handles_after:.0f} open files"
        findings.append(
            Finding(
                what=f"{trend.role} {trend.pid}",
                value=f"peak {trend.rss_peak:.0f} MB, {trend.rss_slope:+.3f} MB a 100 steps (without files' pages "
                f"{trend.anonymous_slope:+.3f}), {handles}",
                allowed=f"{SLOPE_MB:g} MB a 100 steps, no more files",
                holds=trend.is_flat(SLOPE_MB),
            )
        )
    boxed = [sample.rss for sample in samples if sample.role == SANDBOX]
    if boxed:
        findings.append(Finding(what="a sandbox's process", value=f"peak {max(boxed) / MB:.0f} MB"))
    return findings


# -- parts in processes of their own ---------------------------------------------------------------------------------
def measured(part: str, **arguments: Any) -> dict[str, Any]:
    """What a part of load_parts.py says in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("load_parts.py")), part, json.dumps(arguments)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, timeout=LONGEST_S)
    return json.loads(done.stdout)


def of_scoring(prompts: int, group: int, characters: int) -> list[Finding]:
    found = measured(
        "scoring", prompts=prompts, group=group, workers=2, rewards=["exact_match", "format"], characters=characters
    )
    more = found["peak"] - found["before"]
    # A step's texts are there already; a score is 24 bytes and a reference in each of a few lists and tensors.
    allowed = MB_BESIDE + prompts * group * 250 / MB
    worker = MB_OF_WORKER + 8 * group * characters / MB  # a group as bytes and as texts, sent and read
    return [
        Finding(what="completions", value=f"{prompts:,} x {group}, {characters:,} characters each"),
        Finding(what="seconds", value=f"{found['seconds']:.1f} ({found['main_seconds']:.1f} of main's processor)"),
        Finding(what="main beside them", value=f"{more:.0f} MB", allowed=f"{allowed:.0f} MB", holds=more < allowed),
        Finding(
            what="a reward worker",
            value=f"peak {found['worker_peak']:.0f} MB",
            allowed=f"{worker:.0f} MB",
            holds=found["worker_peak"] < worker,
        ),
    ]


def large_data(asked: argparse.Namespace, out: Path) -> list[Finding]:
    file = str(out / "large.jsonl")
    written = measured("write_data", file=file, gigabytes=asked.gigabytes, characters=1000)
    found = measured("data", file=file, max_tokens=2000, tokenised=asked.tokenised)
    more, size = found["peak"] - found["before"], written["bytes"] / MB
    # Places of 16 bytes a row, with 1/8 of room ahead, and what counts the questions; tokenised: 8 bytes more, and one
    # call's tokens.
    allowed = MB_BESIDE + written["rows"] * (16 * 9 / 8 + 40 + 8 * asked.tokenised) / MB
    return [
        Finding(what="the file", value=f"{size:,.0f} MB, {written['rows']:,} rows"),
        Finding(
            what="read, tokenised" if asked.tokenised else "read",
            value=f"{found['seconds']:.0f} s ({found['processor_seconds']:.0f} of processor)",
        ),
        Finding(what="held of it", value=f"{more:.0f} MB", allowed=f"{allowed:.0f} MB", holds=more < allowed),
        Finding(what="16 prompts of a step", value=f"{found['step_milliseconds']:.1f} ms"),
    ]


PARTS: dict[str, Callable[[argparse.Namespace, Path], list[Finding]]] = {
    "long-run": long_run,
    "scoring": lambda asked, out: of_scoring(10_000, 64, 120),
    "large-completions": lambda asked, out: of_scoring(64, 8, 10**6),
    "large-data": large_data,
}


if __name__ == "__main__":
    main()
