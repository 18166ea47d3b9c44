"""A long run of the embedded model with every reward that starts something, watched from all sides while it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from load_processes import Watcher, last_step

NUM_PROMPTS = 400
REPORT_S = 600.0
"""Seconds that a report may take."""


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


@dataclass(kw_only=True)
class Reports:
    """What the reports that were made while the run went on took. pages: how often a browser has shown one."""

    number: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    page_bytes: list[int] = field(default_factory=list)
    pages: int = 0


def environment(temporary: Path) -> dict[str, str]:
    """One thread, as the model is small; temporary files in a folder that nothing else uses."""
    # torch makes an empty cache folder, one for each user, wherever it is imported.
    kept = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(temporary.with_name("torch"))}
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **kept}


def rlft(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlft.cli", *arguments]


def make_report(run: Path, environ: Mapping[str, str], reports: Reports) -> None:
    """`rlft report` in a process of its own, whose peak is what the system says when it has ended."""
    began = time.monotonic()
    process = subprocess.Popen(
        rlft("report", str(run)), env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stopper = threading.Timer(REPORT_S, process.kill)
    stopper.start()
    _, status, used = os.wait4(process.pid, 0)
    stopper.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"rlft report exited with {process.returncode}")
    reports.number += 1
    reports.seconds.append(time.monotonic() - began)
    reports.peak_bytes.append(used.ru_maxrss * 1024)
    reports.page_bytes.append((run / "report.html").stat().st_size)


@contextlib.contextmanager
def browser(wanted: bool) -> Iterator[Any]:
    """Chromium, or None where it is not wanted."""
    if not wanted:
        yield None
        return
    from chromium import open_chromium

    with tempfile.TemporaryDirectory() as profile:
        driver = open_chromium(profile, 1200, 900)
        try:
            yield driver
        finally:
            driver.quit()


def run_and_watch(out: Path, steps: int, every_s: float, report_s: float, with_browser: bool) -> dict[str, Any]:
    """The run from its first step to its last; what was measured of it. every_s, report_s: seconds between samples and
    between reports."""
    out.mkdir(parents=True, exist_ok=True)
    temporary, run, data = out / "temporary", out / "run", out / "sums.jsonl"
    temporary.mkdir()
    write_prompts(data)
    environ, reports, began = environment(temporary), Reports(), time.monotonic()
    with rater() as url, (out / "run.log").open("w") as log, browser(with_browser) as driver:
        process = subprocess.Popen(rlft(*words(data, url, steps, run)), env=environ, stdout=log, stderr=log)
        while not (run / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.5)
        with (out / "watch.log").open("w") as view:
            watching = subprocess.Popen(rlft("watch", str(run)), env=environ, stdout=view, stderr=view)
        metrics = run / "metrics.jsonl"
        with Watcher(
            process.pid,
            lambda: last_step(metrics),
            every_s,
            more={"rlft watch": watching.pid},
            file=out / "samples.jsonl",
        ) as watcher:
            next_report = time.monotonic() + report_s
            while process.poll() is None:
                time.sleep(1.0)
                if time.monotonic() > next_report and last_step(metrics):
                    make_report(run, environ, reports)
                    if driver is not None:
                        driver.get((run / "report.html").resolve().as_uri())
                        reports.pages += 1
                    next_report = time.monotonic() + report_s
        try:
            watching.wait(60)
        finally:
            watching.kill()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "code": process.returncode,
        "seconds": time.monotonic() - began,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "steps": last_step(metrics),
        "left": sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*")),
        "most_sandboxed": watcher.most_sandboxed,
        "reports": reports,
        "samples": watcher.samples,
        "run": run,
    }
