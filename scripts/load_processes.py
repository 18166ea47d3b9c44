"""Memory and open files of every process of a run over its steps, and how fast they grow.

Memory is told twice: RSS, all pages of a process that are in memory, and of them those that no file stands behind,
which are what a leak is made of. (PSS is no measure of growth: a share of a library grows when other processes end.)
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

MB = 10**6
MAIN, WORKER, SANDBOX = "main", "reward worker", "sandbox"
TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one moment. rss, anonymous: bytes. handles: open file descriptors. step: finished steps."""

    step: int
    role: str
    pid: int
    rss: int
    anonymous: int
    handles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A process over the steps after the warm-up.

    rss_peak, anonymous_peak: MB, the warm-up included. rss_slope, anonymous_slope: MB a 100 steps, of the line of least
    squares. handles_before, handles_after: medians of the first and the last quarter.
    """

    role: str
    pid: int
    samples: int
    rss_peak: float
    anonymous_peak: float
    rss_slope: float
    anonymous_slope: float
    handles_before: float
    handles_after: float

    def is_flat(self, slope: float) -> bool:
        """Whether memory grows by less than `slope` MB a 100 steps, by both measures, and no file stays open."""
        return self.rss_slope < slope and self.anonymous_slope < slope and self.handles_after <= self.handles_before


class Watcher:
    """Samples a process and all that it starts, in a thread, until it ends or `close` is called.

    pid: of the run's first process. step: says how many steps are finished. seconds: between two samples. more: other
    processes to sample, by their roles. file: where samples are kept as they come, a line of JSON each, or None.
    """

    def __init__(
        self,
        pid: int,
        step: Callable[[], int],
        seconds: float,
        more: Mapping[str, int] | None = None,
        file: Path | None = None,
    ) -> None:
        self.samples: list[Sample] = []
        self.most_sandboxed = 0
        self._pid, self._step, self._seconds, self._more, self._file = pid, step, seconds, dict(more or {}), file
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds):
            now = self._sampled()
            self.samples += now
            self.most_sandboxed = max(self.most_sandboxed, sum(sample.role == SANDBOX for sample in now))
            if self._file is not None:
                with self._file.open("a") as file:
                    file.writelines(json.dumps(asdict(sample)) + "\n" for sample in now)

    def _sampled(self) -> list[Sample]:
        step, found = self._step(), []
        for role, process in [*tree(self._pid), *((role, process_of(pid)) for role, pid in self._more.items())]:
            if process is not None and (sample := sampled(process, role, step)) is not None:
                found.append(sample)
        return found


def process_of(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def tree(pid: int) -> list[tuple[str, psutil.Process]]:
    """(role, process) of the process and of all that it has started; what a reward worker starts is a sandbox."""
    main = process_of(pid)
    if main is None:
        return []
    found = [(MAIN, main)]
    try:
        for child in main.children():
            command = " ".join(child.cmdline())
            role = WORKER if "rlft-reward-worker" in command else SANDBOX
            found += [(role, child), *((SANDBOX, below) for below in child.children(recursive=True))]
    except psutil.Error:  # one that has just ended
        pass
    return found


def sampled(process: psutil.Process, role: str, step: int) -> Sample | None:
    """None of a process that has ended meanwhile, or has memory no more."""
    try:
        with process.oneshot():
            rss, handles = process.memory_info().rss, process.num_fds()
        anonymous = rss if role == SANDBOX else anonymous_of(process.pid)
    except (psutil.Error, OSError):
        return None
    return Sample(step=step, role=role, pid=process.pid, rss=rss, anonymous=anonymous, handles=handles) if rss else None


def anonymous_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def last_step(metrics: Path) -> int:
    """The step of the last whole line of a run's metrics.jsonl, of which only the end is read; 0 before the first."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]
        return int(json.loads(whole.rpartition(b"\n")[2])["step"])
    except (OSError, ValueError, KeyError):
        return 0


def trends(samples: Iterable[Sample], warm_up: int, min_steps: int) -> list[Trend]:
    """Of each process that was there for so many steps after the warm-up (the others are too short to have a trend)."""
    series: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        series.setdefault((sample.role, sample.pid), []).append(sample)
    found = []
    last = max((sample.step for own in series.values() for sample in own), default=0)
    for (role, pid), own in series.items():
        # After the last step a process gives back what it held: what it held before would not be seen.
        later = [sample for sample in own if warm_up <= sample.step < last]
        if len(later) < 8 or later[-1].step - later[0].step < min_steps:
            continue
        steps, quarter = [sample.step for sample in later], len(later) // 4
        found.append(
            Trend(
                role=role,
                pid=pid,
                samples=len(later),
                rss_peak=max(sample.rss for sample in own) / MB,
                anonymous_peak=max(sample.anonymous for sample in own) / MB,
                rss_slope=100 * slope(steps, [sample.rss / MB for sample in later]),
                anonymous_slope=100 * slope(steps, [sample.anonymous / MB for sample in later]),
                handles_before=statistics.median(sample.handles for sample in later[:quarter]),
                handles_after=statistics.median(sample.handles for sample in later[-quarter:]),
            )
        )
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the line of least squares; 0 where x does not vary.

    >>> slope([0, 1, 2], [5.0, 7.0, 9.0])
    2.0
    """
    if len(set(x)) < 2:
        return 0.0
    return statistics.linear_regression(x, y).slope
