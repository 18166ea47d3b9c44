"""Loads that a run must bear: what they take of memory, open files, temporary files and time, beside what is allowed.

    python scripts/load_test.py long-run                 # 2,000 steps, with reports and a browser beside
    python scripts/load_test.py long-run --steps 300 --no-browser
    python scripts/load_test.py scoring                  # 10,000 prompts x 64 completions by two workers
    python scripts/load_test.py large-completions        # 64 prompts x 8 completions of 1 MB
    python scripts/load_test.py loud-reward              # a reward that prints 100 MB
    python scripts/load_test.py large-data --gigabytes 2 # --tokenised: as a run reads it, some 1 MB a second and core
    python scripts/load_test.py many-runs                # `rlft runs` of 1,000

Each part prints a table and exits with 1 where something is over its bound. What it writes goes to --out, which is to
be empty; a run of 2,000 steps takes about half an hour of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_long_run import run_and_watch
from load_processes import MAIN, MB, SANDBOX, WORKER, Sample, trends

SLOPE_MB = 1.0
"""What a process may grow by, in MB a 100 steps."""

MB_BESIDE = 120
"""For what a library allocates on its first use."""

MB_OF_WORKER = 60
SECONDS_OF_RUNS = 2.0
LONGEST_S = 6 * 3600.0


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
        out = Path(temporary) if asked.out is None else asked.out
        findings = PARTS[asked.part](asked, out)
    print(table(findings))
    sys.exit(any(finding.holds is False for finding in findings))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("long-run")
    part.add_argument("--steps", type=int, default=2000)
    part.add_argument("--warm-up", type=int, default=None, help="steps that no slope counts (a fifth of all)")
    part.add_argument("--sample-every", type=float, default=2.0, help="seconds")
    part.add_argument("--report-every", type=float, default=60.0, help="seconds")
    part.add_argument("--no-browser", action="store_true")
    data = parts.add_parser("large-data")
    data.add_argument("--gigabytes", type=float, default=2.0)
    data.add_argument("--tokenised", action="store_true")
    others = [parts.add_parser(name) for name in ("scoring", "large-completions", "loud-reward", "many-runs")]
    for each in (part, data, *others):
        each.add_argument("--out", type=Path, default=None, help="an empty folder; by default a temporary one")
    return parser.parse_args()


def table(findings: Sequence[Finding]) -> str:
    """As Markdown."""
    rows = [("what", "measured", "allowed", "")]
    for finding in findings:
        verdict = "" if finding.holds is None else "holds" if finding.holds else "DOES NOT HOLD"
        rows.append((finding.what, finding.value, finding.allowed, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "-" * widths[3]))
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def long_run(asked: argparse.Namespace, out: Path) -> list[Finding]:
    seen = run_and_watch(out, asked.steps, asked.sample_every, asked.report_every, not asked.no_browser)
    warm_up = asked.steps // 5 if asked.warm_up is None else asked.warm_up
    findings = [
        Finding(what="steps", value=f"{seen['steps']}", allowed=f"{asked.steps}", holds=seen["code"] == 0),
        Finding(what="seconds", value=f"{seen['seconds']:.0f} ({seen['processor_seconds']:.0f} of processors)"),
        *process_findings(seen["samples"], warm_up, asked.steps // 2),
        Finding(what="processes of sandboxes at once, at most", value=f"{seen['most_sandboxed']}"),
        Finding(
            what="left in the temporary folder",
            value=", ".join(seen["left"]) or "nothing",
            allowed="nothing",
            holds=not seen["left"],
        ),
    ]
    reports: Any = seen["reports"]
    if reports.number:
        seconds, peaks, pages = reports.seconds, reports.peak_bytes, reports.page_bytes
        findings += [
            Finding(what="reports made, shown by a browser", value=f"{reports.number}, {reports.pages}"),
            Finding(what="seconds of a report, first and last", value=f"{seconds[0]:.1f}, {seconds[-1]:.1f}"),
            Finding(what="peak of a report, first and last", value=f"{peaks[0] / MB:.0f}, {peaks[-1] / MB:.0f} MB"),
            Finding(what="report.html, first and last", value=f"{pages[0] / MB:.2f}, {pages[-1] / MB:.2f} MB"),
        ]
    return findings


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


def measured(part: str, **arguments: Any) -> dict[str, Any]:
    """What a part of load_parts.py says in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("load_parts.py")), part, json.dumps(arguments)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return json.loads(
        subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, timeout=LONGEST_S).stdout
    )


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


def scoring(asked: argparse.Namespace, out: Path) -> list[Finding]:
    return of_scoring(10_000, 64, 120)


def large_completions(asked: argparse.Namespace, out: Path) -> list[Finding]:
    return of_scoring(64, 8, 10**6)


def loud_reward(asked: argparse.Namespace, out: Path) -> list[Finding]:
    found = measured("loud", megabytes=100, out=str(out / "loud"))
    peaks = found["peaks"]
    return [
        Finding(what="the run", value=f"exit code {found['code']}, {found['seconds']:.1f} s", holds=found["code"] == 0),
        Finding(what="printed", value=f"{found['log']:.0f} MB", allowed="100 MB or more", holds=found["log"] >= 100),
        Finding(what="main", value=f"peak {peaks[MAIN]:.0f} MB"),
        Finding(
            what="the reward worker",
            value=f"peak {peaks[WORKER]:.0f} MB",
            allowed=f"{MB_OF_WORKER} MB",
            holds=peaks[WORKER] < MB_OF_WORKER,
        ),
    ]


def large_data(asked: argparse.Namespace, out: Path) -> list[Finding]:
    file = str(out / "large.jsonl")
    written = measured("write_data", file=file, gigabytes=asked.gigabytes, characters=1000)
    found = measured("data", file=file, max_tokens=2000, tokenised=asked.tokenised)
    more, size = found["peak"] - found["before"], written["bytes"] / MB
    # Two indices of 26 bytes a row, with 1/8 of room ahead; tokenised: 8 bytes more, and one call's tokens.
    allowed = MB_BESIDE + written["rows"] * (26 * 2 * 9 / 8 + 8 * asked.tokenised) / MB
    return [
        Finding(what="the file", value=f"{size:,.0f} MB, {written['rows']:,} rows"),
        Finding(
            what="read, tokenised" if asked.tokenised else "read",
            value=f"{found['seconds']:.0f} s ({found['processor_seconds']:.0f} of processor)",
        ),
        Finding(what="held of it", value=f"{more:.0f} MB", allowed=f"{allowed:.0f} MB", holds=more < allowed),
        Finding(what="16 prompts of a step", value=f"{found['step_milliseconds']:.1f} ms"),
    ]


def many_runs(asked: argparse.Namespace, out: Path) -> list[Finding]:
    source = out / "source"
    run_and_watch(source, 100, 5.0, 1e9, False)
    findings = []
    for number in (50, 1000):
        found = measured("many_runs", source=str(source / "run"), out=str(out / str(number)), number=number, steps=100)
        seconds = found["processor_seconds"]
        holds = seconds < SECONDS_OF_RUNS and found["runs"] == number
        value = f"{found['seconds']:.1f} s, {seconds:.2f} of processor, peak {found['peak']:.0f} MB"
        allowed = f"{SECONDS_OF_RUNS} s of processor"
        findings.append(Finding(what=f"rlft runs of {number}", value=value, allowed=allowed, holds=holds))
    return findings


PARTS = {
    "long-run": long_run,
    "scoring": scoring,
    "large-completions": large_completions,
    "loud-reward": loud_reward,
    "large-data": large_data,
    "many-runs": many_runs,
}


if __name__ == "__main__":
    main()
