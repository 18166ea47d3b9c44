"""Trains every `<name>_arithmetic` recipe with several seeds and compares them: a table, a picture, all raw numbers.

    python scripts/compare_algorithms.py                          # every algorithm's recipe as it is, seeds 0 1 2
    python scripts/compare_algorithms.py --only grpo ppo --seeds 0 1 --completions 10240
    python scripts/compare_algorithms.py --redraw                 # table and picture again, from the raw numbers

Each run is an ordinary `rlft train` in a process of its own (so that its peak memory is its own), one after the other,
in <out>/<name>/seed_<k>. Stopped by Ctrl-C or killed, the same command goes on: finished runs are not repeated, a begun
one is resumed. In <out> it leaves comparison.md (for recipes/README.md), comparison.png and comparison.json.

Exit codes: 0 done and all checks hold, 1 a check or a run failed, 2 a mistake the user can fix, 130 stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlft.config import compose as config
from rlft.config import overrides as command_line
from rlft.keys import catalog
from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines
from rlft.logger.text import duration
from rlft.run import run_folder
from rlft.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIX = "_arithmetic"
TABLE, PICTURE, NUMBERS = "comparison.md", "comparison.png", "comparison.json"
RECORD = "comparison.json"  # in a run's folder: where and how long it ran, written when it is finished

MIN_GAIN = 0.15
MIN_ACCURACY = 0.90
MUST_REACH = ("grpo", "gspo", "ppo", "rloo")

# What may differ between a run that is there and the one that is asked for: it changes no number.
FREE = ("resume", "logger", "checkpoint")
TELL_SECONDS = 60.0  # between two lines of progress where there is no terminal
LIVE_WIDTH = 79  # of the line that is told in place where there is one

# The algorithms' names in their papers; others are shown by the name of their recipe.
LABELS = {
    "a2c": "A2C",
    "cispo": "CISPO",
    "dapo": "DAPO",
    "dr_grpo": "Dr. GRPO",
    "gdpo": "GDPO",
    "gmpo": "GMPO",
    "grpo": "GRPO",
    "grpo_process": "GRPO, process rewards",
    "gspo": "GSPO",
    "gspo_token": "GSPO-token",
    "iterative_grpo": "iterative GRPO",
    "kimi": "Kimi k1.5",
    "ppo": "PPO-clip",
    "ppo_penalty": "PPO-penalty",
    "ppo_ptx": "PPO-ptx",
    "reinforce": "REINFORCE",
    "reinforce_pp": "REINFORCE++",
    "rloo": "RLOO",
    "sapo": "SAPO",
}
# Class of the algorithm, in the order of table and picture: its words in the legend, its colour. Okabe and Ito's
# colours, which people with any colour vision tell apart; classes that are not listed take those that are left.
FAMILIES = {
    "GRPO": ("group-relative (GRPO)", "#0072B2"),
    "Reinforce": ("REINFORCE, no critic", "#009E73"),
    "PPO": ("actor and critic (PPO)", "#D55E00"),
    "Kimi": ("mirror descent (Kimi)", "#CC79A7"),
}
OTHER_COLOURS = ("#56B4E9", "#E69F00", "#000000")
# How matplotlib draws a panel's own line, the others behind it, and the accuracy that is asked for.
OWN: dict[str, Any] = {"linewidth": 1.5, "marker": "o", "markersize": 3}
OTHERS: dict[str, Any] = {"linewidth": 0.8, "color": "#D4D4D4"}
ASKED: dict[str, Any] = {"linewidth": 0.8, "color": "#666666", "linestyle": (0, (4, 3))}


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    options = parse(arguments)
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError("matplotlib", "is not installed, and draws the picture", remedy="pip install 'rlft[dev]'")
        if options.redraw:
            comparison = read_comparison(options.out / NUMBERS)
        else:
            jobs = make_jobs(options)
            comparison = train_all(jobs, options.out, options.config_dir, again=options.again)
        return publish(comparison, options.out)
    except UserError as error:
        print(f"compare_algorithms: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare_algorithms.py",
        description=(__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="K", help="default: 0 1 2")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare"), help="folder of all that is made (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"these recipes, with or without {SUFFIX}")
    parser.add_argument("--completions", type=int, metavar="N", help="of each run, by its steps; else as recipes say")
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="KEY=VALUE", help="for every run, as for rlft train"
    )
    parser.add_argument("--config-dir", type=Path, help="folder with more recipes, as for rlft train")
    parser.add_argument("--again", action="store_true", help="delete and repeat runs whose recipe has changed since")
    parser.add_argument("--redraw", action="store_true", help=f"train nothing: table and picture from {NUMBERS}")
    return parser.parse_args(arguments)


# -- what is to be trained ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: a recipe with a seed. config: plain and composed, what the run's config.yaml will hold."""

    name: str
    seed: int
    folder: Path
    overrides: tuple[str, ...]
    config: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.name}/seed_{self.seed}"

    @property
    def family(self) -> str:
        """The class of the algorithm."""
        return self.config["algorithm"]["_target_"].rpartition(".")[2]

    @property
    def completions_per_step(self) -> int:
        return self.config["prompts_per_step"] * self.config["group_size"]


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """A job for each recipe and seed, those of a family together, the seeds of a recipe in a row.

    Raises:
        UserError: no such recipe, a number of completions that whole steps cannot give, a config that is refused.
    """
    if len(set(options.seeds)) < len(options.seeds):
        raise UserError("--seeds", "a seed is given twice", got=options.seeds, remedy="give each once")
    names = chosen_names(options.only, known_names(options.config_dir))
    jobs = []
    for name in names:
        overrides = [f"+recipe={name}{SUFFIX}", "rollouts.every=0", "checkpoint.keep=1"]
        overrides += ["eval.kl_base=true", *options.override]
        composed = config.compose(overrides, options.config_dir)
        if options.completions is not None:
            overrides.append(f"steps={steps_for(options.completions, name, composed)}")
        if not composed["eval"]["every"]:
            raise UserError("eval.every", f"{name} is never evaluated", got=0, remedy="--override eval.every=10")
        for seed in options.seeds:
            folder = options.out / name / f"seed_{seed}"
            words = (*overrides, f"seed={seed}", f"hydra.run.dir={folder}")
            command_line.parse(words)  # refuses a key that is given twice
            plain = config.compose(words, options.config_dir)
            config.build(plain)
            jobs.append(Job(name=name, seed=seed, folder=folder, overrides=words, config=plain))
    return sorted(jobs, key=lambda job: order(job.family, job.name))  # stable: seeds stay as given


def known_names(config_dir: Path | None) -> list[str]:
    """Names of the recipes on the embedded task, without the suffix."""
    recipes = set(catalog.choices("recipe"))
    if config_dir is not None:
        recipes |= {file.stem for file in (config_dir / "recipe").glob("*.yaml")}
    return sorted(recipe.removesuffix(SUFFIX) for recipe in recipes if recipe.endswith(SUFFIX))


def chosen_names(only: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Of the known names those that are asked for, each once; by default those of an algorithm, or a user's own.

    Raises:
        UserError: one that is not known.
    """
    if only is None:
        return [name for name in known if is_algorithm(name)]
    names = list(dict.fromkeys(name.removesuffix(SUFFIX) for name in only))
    for name in names:
        if name not in known:
            raise UserError("--only", "there is no such recipe", got=name, remedy=f"choose of {', '.join(known)}")
    return names


def is_algorithm(name: str) -> bool:
    """Whether the recipe shows an algorithm; those of rlft itself that do not are other verbs' or pipelines' stages."""
    of_rlft = name + SUFFIX in catalog.choices("recipe")
    return not of_rlft or name.removeprefix("iterative_") in catalog.choices("algorithm")


def steps_for(completions: int, name: str, composed: Mapping[str, Any]) -> int:
    """The steps that keep this many completions; dynamic sampling may throw others away, which the table counts.

    Raises:
        UserError: no whole number of steps does.
    """
    a_step = composed["prompts_per_step"] * composed["group_size"]
    steps = completions // a_step
    if steps < 1 or steps * a_step != completions:
        near = " or ".join(str(n * a_step) for n in (steps, steps + 1) if n)
        problem = f"{name} has {a_step} a step, which do not add up to it"
        raise UserError("--completions", problem, got=completions, remedy=f"use {near}")
    return steps


def order(family: str, name: str) -> tuple[int, str, str]:
    """Where an algorithm stands in table and picture."""
    known = list(FAMILIES)
    return (known.index(family) if family in known else len(known)), family, name


# -- training ----------------------------------------------------------------------------------------------------------
def train_all(jobs: Sequence[Job], out: Path, config_dir: Path | None, *, again: bool) -> Comparison:
    """Trains what is not finished, one run after the other; a run that fails is told and the others go on.

    Raises:
        UserError: a run that is there differs from the one asked for, and `again` is not set.
        KeyboardInterrupt: asked to stop; the run in progress has saved its state.
    """
    clear_changed(jobs, again=again)
    todo = [job for job in jobs if not is_finished(job)]
    budget = {job.config["steps"] * job.completions_per_step for job in jobs}
    each = " or ".join(f"{number:,}" for number in sorted(budget))
    print(f"runs: {len(jobs)} of {each} completions, {len(jobs) - len(todo)} finished already, in {out}", flush=True)
    failures: dict[str, str] = {}
    pace = Pace([measured for job in jobs if (measured := measured_pace(job))])
    with stopped_by_signals():
        for number, job in enumerate(todo):
            write_comparison(collect(jobs, failures), out / NUMBERS)
            place = f"[{len(jobs) - len(todo) + number + 1}/{len(jobs)}] {job.name} seed {job.seed}"
            why = train_one(job, config_dir, Progress(place, todo[number:], pace))
            if why is not None:
                failures[job.key] = why
                print(f"{place} failed: {why}", flush=True)
                continue
            pace.add(measured_pace(job))
            accuracy = read_run(job).accuracy
            after = todo[number + 1 :]
            left = f"; {len(after)} to go{pace.told(after)}" if after else ""
            print(f"{place}: {accuracy[0]:.3f} -> {accuracy[-1]:.3f}{left}", flush=True)
    return collect(jobs, failures)


def clear_changed(jobs: Sequence[Job], *, again: bool) -> None:
    """Deletes the runs of another config than is asked for now, or refuses them: old numbers under a new name."""
    changed = [(job, keys) for job in jobs if (keys := changed_keys(job))]
    if changed and not again:
        job, keys = changed[0]
        others = f", and {len(changed) - 1} runs more" if len(changed) > 1 else ""
        problem = f"runs there are of another config ({job.key}: {'; '.join(keys)}{others})"
        raise UserError("--out", problem, got=job.folder, remedy="--again repeats them; or choose another folder")
    for job, _ in changed:
        shutil.rmtree(job.folder)


def changed_keys(job: Job) -> list[str]:
    """`key: old -> new` of what differs between the job and the run in its folder; nothing where there is no run."""
    if not run_folder.config_file(job.folder).exists():
        return []
    saved = run_folder.read(job.folder)
    saved.pop(run_folder.ORIGIN, None)
    before, now = run_folder.flatten(saved), run_folder.flatten(job.config)
    absent = object()
    return [
        f"{key}: {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, absent) != now.get(key, absent) and key.partition(".")[0] not in FREE
    ]


def is_finished(job: Job) -> bool:
    """Whether the run has measured all: its last step, and the evaluation after it."""
    files = [read_lines(job.folder / name) for name in (METRICS, EVALUATIONS)]
    return all(lines and lines[-1]["step"] == job.config["steps"] for lines in files)


def command(job: Job, config_dir: Path | None) -> list[str]:
    """The command line that starts the run, or that goes on with one that was begun."""
    begun = run_folder.config_file(job.folder).exists()
    words = ["resume", str(job.folder)] if begun else ["train", *job.overrides]
    return [sys.executable, "-m", "rlft.cli", *words, *(["--config-dir", str(config_dir)] if config_dir else [])]


def train_one(job: Job, config_dir: Path | None, progress: Progress) -> str | None:
    """Trains a run to its end, its output in <folder>.log; returns why it failed, None if it did not.

    Raises:
        KeyboardInterrupt: the run, or this process, was asked to stop.
    """
    words, fresh = command(job, config_dir), not (job.folder / METRICS).exists()
    log = job.folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("ab" if not fresh else "wb") as stream:
        code = call(words, stream, lambda: progress.tell(steps_done(job)))
    progress.end()
    if code == 130:
        raise KeyboardInterrupt
    if code or not is_finished(job):
        return f"exit code {code}: {last_words(log)} ({log})"
    record = {
        "machine": machine(job.config["model"]["device"]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "wall_seconds": time.monotonic() - start if fresh else None,  # of a resumed run it would be a part only
    }
    (job.folder / RECORD).write_text(json.dumps(record) + "\n")
    return None


def call(words: Sequence[str], log: IO[bytes], tell: Callable[[], None]) -> int:
    """The exit code of a command that runs in a session of its own: it hears of a Ctrl-C from here, and only once."""
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    while True:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(timeout=1.0)
                tell()
        except KeyboardInterrupt:  # a second one, while it finishes its step, stops it at once
            print("\nstopping: the run finishes its step and saves", file=sys.stderr, flush=True)
            child.send_signal(signal.SIGINT)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside, a request to end the process is a KeyboardInterrupt, so that the run in progress is not left behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_words(log: Path) -> str:
    """What a run that failed said: its last line in rlft's own voice, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("rlft: ")]
    return (ours or lines or ["said nothing"])[-1]


def steps_done(job: Job) -> int:
    lines = read_lines(job.folder / METRICS)
    return lines[-1]["step"] if lines else 0


def machine(device: str) -> str:
    """The processors a run had, and the GPU if it used one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} CPU cores ({processor()})"
    if device.startswith("cpu") or shutil.which("nvidia-smi") is None:
        return text
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    return f"{found}, {text}" if found else text


def processor() -> str:
    """The processor's model, as the system names it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


# -- time left ---------------------------------------------------------------------------------------------------------
Measured = tuple[str, int, float]
"""(recipe, completions, seconds of the whole process)"""


@dataclass(slots=True)
class Pace:
    """How long runs take: seconds a completion of the same recipe where one is known, of all that are known else."""

    measured: list[Measured]

    def add(self, measured: Measured | None) -> None:
        self.measured += [measured] if measured else []

    def seconds_a_completion(self, name: str, also: Sequence[Measured] = ()) -> float | None:
        known = [*self.measured, *also]
        same = [entry for entry in known if entry[0] == name] or known
        completions = sum(entry[1] for entry in same)
        return sum(entry[2] for entry in same) / completions if completions else None

    def seconds(self, todo: Sequence[tuple[str, int]], also: Sequence[Measured] = ()) -> float | None:
        """Of (recipe, completions) that are still to be sampled; None while nothing is known."""
        paces = [self.seconds_a_completion(name, also) for name, _ in todo]
        known = [pace * completions for pace, (_, completions) in zip(paces, todo, strict=True) if pace is not None]
        return sum(known) if len(known) == len(todo) else None

    def told(self, jobs: Sequence[Job]) -> str:
        left = self.seconds([(job.name, job.config["steps"] * job.completions_per_step) for job in jobs])
        return "" if left is None else f", about {duration(left)}"


def measured_pace(job: Job) -> Measured | None:
    """How long a finished run took; None where it is not known."""
    record = read_record(job) if is_finished(job) else {}
    seconds = record.get("wall_seconds")
    return (job.name, job.config["steps"] * job.completions_per_step, seconds) if seconds else None


class Progress:
    """Tells how far the run in progress is, and how long it and those after it will take.

    In place on a terminal, else a line every minute.
    """

    def __init__(self, place: str, todo: Sequence[Job], pace: Pace) -> None:
        self.place, self.todo, self.pace = place, todo, pace
        self.first, self.start = steps_done(todo[0]), time.monotonic()
        self.live, self.told = sys.stdout.isatty(), 0.0
        steps = todo[0].config["steps"]
        how = f"from step {self.first} of {steps}" if self.first else f"{steps} steps"
        print(f"{place}: {how} of {todo[0].completions_per_step} completions{pace.told(todo)}", flush=True)

    def tell(self, step: int) -> None:
        now = time.monotonic()
        if not self.live and now - max(self.told, self.start) < TELL_SECONDS:
            return
        self.told = now
        job, sizes = self.todo[0], [job.completions_per_step for job in self.todo]
        also = [(job.name, (step - self.first) * sizes[0], now - self.start)] if step > self.first else []
        left = [(job.name, job.config["steps"] * size) for job, size in zip(self.todo, sizes, strict=True)]
        left[0] = (job.name, (job.config["steps"] - step) * sizes[0])
        seconds = self.pace.seconds(left, also)
        ending = "" if seconds is None else f", about {duration(seconds)} for all"
        text = f"{self.place}: step {step} of {job.config['steps']}{ending}"
        if self.live:
            print(f"\r{text:<{LIVE_WIDTH}}", end="", flush=True)
        else:
            print(text, flush=True)

    def end(self) -> None:
        """Wipes the line that was told in place."""
        if self.live:
            print(f"\r{'':<{LIVE_WIDTH}}\r", end="", flush=True)


# -- what was measured -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a finished run measured.

    completions, reward, seconds: an entry a step; the completions are those sampled up to and with the step, also
    those that dynamic sampling threw away. evaluated_at (completions sampled by then), accuracy, kl_base (nats a token;
    None where it was not measured): an entry an evaluation.
    """

    name: str
    family: str
    seed: int
    completions: list[int]
    reward: list[float | None]
    seconds: list[float]
    evaluated_at: list[int]
    accuracy: list[float]
    kl_base: list[float | None]
    peak_bytes: int
    machine: str
    torch: str
    commit: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    name: str
    family: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that table and picture are made of. failures: `<name>/seed_<k>` to the reason."""

    planned: list[Planned]
    runs: list[Run]
    failures: dict[str, str]


def collect(jobs: Sequence[Job], failures: Mapping[str, str]) -> Comparison:
    """The numbers of all finished runs, from their folders."""
    return Comparison(
        planned=[Planned(name=job.name, family=job.family, seed=job.seed) for job in jobs],
        runs=[read_run(job) for job in jobs if is_finished(job)],
        failures=dict(failures),
    )


def read_run(job: Job) -> Run:
    """The numbers of a finished run.

    Raises:
        UserError: it did not evaluate exact_match.
    """
    metrics, evaluations = read_lines(job.folder / METRICS), read_lines(job.folder / EVALUATIONS)
    completions, sampled = [], 0
    for line in metrics:
        sampled += round(line.get("sampled/completions") or job.completions_per_step)
        completions.append(sampled)
    origin, record = run_folder.read(job.folder).get(run_folder.ORIGIN, {}), read_record(job)
    return Run(
        name=job.name,
        family=job.family,
        seed=job.seed,
        completions=completions,
        reward=[line.get("reward/mean") for line in metrics],
        seconds=[line.get("time/step") or 0.0 for line in metrics],
        evaluated_at=[completions[line["step"] - 1] if line["step"] else 0 for line in evaluations],
        accuracy=[accuracy_of(line, job) for line in evaluations],
        kl_base=[line.get("eval/kl_base") for line in evaluations],
        peak_bytes=max(line.get("memory/peak_bytes") or 0 for line in metrics),
        machine=record.get("machine", "unknown machine"),
        torch=origin.get("torch", "unknown"),
        commit=origin.get("commit", "unknown"),
        date=record.get("date", "unknown date"),
    )


def accuracy_of(line: Mapping[str, Any], job: Job) -> float:
    """Share of right answers: exact_match, which is 0 or 1, also where it is not the reward that decides."""
    for key in ("eval/exact_match", "eval/reward/exact_match"):
        if line.get(key) is not None:
            return line[key]
    problem = f"{job.key} was evaluated without exact_match"
    raise UserError("reward", problem, got=job.folder, remedy="put exact_match among the recipe's rewards")


def read_record(job: Job) -> dict[str, Any]:
    file = job.folder / RECORD
    return json.loads(file.read_text()) if file.exists() else {}


def write_comparison(comparison: Comparison, file: Path) -> None:
    """JSON with a line a run, so that two of them can be compared by eye."""
    parts = []
    for name, value in asdict(comparison).items():
        if isinstance(value, list):
            parts.append(f'"{name}": [\n' + ",\n".join(json.dumps(entry) for entry in value) + "\n]")
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    temporary.replace(file)


def read_comparison(file: Path) -> Comparison:
    """What `write_comparison` wrote.

    Raises:
        UserError: there is no such file.
    """
    if not file.exists():
        raise UserError("--redraw", "there are no raw numbers", got=file, remedy="train first: leave --redraw out")
    saved = json.loads(file.read_text())
    return Comparison(
        planned=[Planned(**entry) for entry in saved["planned"]],
        runs=[Run(**entry) for entry in saved["runs"]],
        failures=saved["failures"],
    )


def publish(comparison: Comparison, out: Path) -> int:
    """Writes raw numbers, table and picture, prints the table; 1 if a check fails, else 0."""
    write_comparison(comparison, out / NUMBERS)
    rows = make_rows(comparison)
    text = table(rows, comparison)
    (out / TABLE).write_text(text)
    print(f"\n{text}")
    if comparison.runs:
        draw(rows, out / PICTURE)
        print(f"written: {out / TABLE}, {out / PICTURE}, {out / NUMBERS}")
    return int(any(row.problems for row in rows))


# -- the table ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An algorithm: its finished runs, and for each seed that is not finished the reason."""

    name: str
    family: str
    runs: list[Run]
    missing: dict[int, str]

    @property
    def before(self) -> list[float]:
        return [run.accuracy[0] for run in self.runs]

    @property
    def after(self) -> list[float]:
        return [run.accuracy[-1] for run in self.runs]

    @property
    def gain(self) -> float:
        return statistics.fmean(self.after) - statistics.fmean(self.before)

    @property
    def problems(self) -> list[str]:
        """The checks that do not hold, in words; they are of the means over seeds."""
        found = [f"seed {seed} is missing" for seed in self.missing]
        if not self.runs:
            return found
        if round(self.gain, 9) < MIN_GAIN:
            found.append(f"gain {self.gain:.4f} < {MIN_GAIN:.2f}")
        after = statistics.fmean(self.after)
        if self.name in MUST_REACH and round(after, 9) < MIN_ACCURACY:
            found.append(f"after {after:.4f} < {MIN_ACCURACY:.2f}")
        return found


def make_rows(comparison: Comparison) -> list[Row]:
    """A row for each algorithm that was planned, in the order of table and picture."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for planned in comparison.planned:
        seeds.setdefault((planned.family, planned.name), []).append(planned.seed)
    finished = {(run.name, run.seed): run for run in comparison.runs}
    rows = []
    for family, name in sorted(seeds, key=lambda algorithm: order(*algorithm)):
        missing = {
            seed: comparison.failures.get(f"{name}/seed_{seed}", "is not finished")
            for seed in seeds[family, name]
            if (name, seed) not in finished
        }
        rows.append(
            Row(
                name=name,
                family=family,
                runs=[finished[name, seed] for seed in seeds[family, name] if seed not in missing],
                missing=missing,
            )
        )
    return rows


COLUMNS = (
    "recipe",
    "held-out accuracy before",
    "after",
    "gain",
    "seconds of steps",
    "peak memory",
    "KL to the base (nats a token)",
    "completions sampled",
    "checks",
)


def table(rows: Sequence[Row], comparison: Comparison) -> str:
    """Markdown: a line an algorithm, then what the columns are, the checks, and where it was measured."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    seeds = sorted({planned.seed for planned in comparison.planned})
    several = len(seeds) > 1
    lines += [
        "",
        f"Seed{'s' * several} {', '.join(map(str, seeds))}"
        + ("; mean ± standard deviation over seeds, seconds the median, memory the largest. " if several else ". ")
        + "Seconds are the sum of `time/step`: sampling, scoring and training, evaluations aside. KL(policy || base) "
        "is of the held-out completions at the end. Completions that dynamic sampling threw away count as sampled.",
        "",
        checks_line(rows),
        *(f"\n{row.name} seed {seed}: {why}" for row in rows for seed, why in row.missing.items()),
        "",
        machine_line(comparison.runs),
    ]
    return "\n".join(lines) + "\n"


def cells(row: Row) -> list[str]:
    """The row's texts, in the order of COLUMNS."""
    recipe = f"`{row.name}{SUFFIX}`"
    checks = "; ".join(row.problems) or "hold"
    if not row.runs:
        return [recipe, *["-"] * (len(COLUMNS) - 2), checks]
    kl = [run.kl_base[-1] for run in row.runs]
    measured = [value for value in kl if value is not None]
    return [
        recipe,
        spread(row.before, 3),
        spread(row.after, 3),
        f"{row.gain:+.3f}",
        f"{statistics.median(sum(run.seconds) for run in row.runs):.0f}",
        f"{max(run.peak_bytes for run in row.runs) / 1e9:.2f} GB",
        spread(measured, 3) if len(measured) == len(kl) else "-",
        f"{statistics.fmean(run.completions[-1] for run in row.runs):,.0f}",
        checks,
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± sample standard deviation (n - 1); a single value stands alone.

    >>> spread([0.25, 0.75], 3)
    '0.500 ± 0.354'
    """
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def checks_line(rows: Sequence[Row]) -> str:
    """The checks and whether they hold, in a sentence."""
    asked = [row.name for row in rows if row.name in MUST_REACH]
    failed = [row.name for row in rows if row.problems]
    reach = f", and {MIN_ACCURACY:.2f} after training for {', '.join(asked)}" if asked else ""
    verdict = f"not so: {', '.join(failed)}" if failed else "all hold"
    return f"Checks (means over the seeds): a gain of at least {MIN_GAIN:.2f}{reach}; {verdict}."


def machine_line(runs: Sequence[Run]) -> str:
    """Machine, torch, commit and date of the runs; several of a kind where they differ."""

    def of(key: str) -> str:
        return ", ".join(sorted({str(getattr(run, key)) for run in runs}))

    return (
        f"{of('machine')}, torch {of('torch')}, commit {of('commit')}, {of('date')}."
        if runs
        else "Nothing is finished."
    )


# -- the picture -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Accuracy at each evaluation, over the seeds. completions: their mean; with dynamic sampling seeds differ."""

    completions: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve(runs: Sequence[Run]) -> Curve:
    points = list(zip(*(run.accuracy for run in runs), strict=True))
    return Curve(
        completions=[statistics.fmean(at) for at in zip(*(run.evaluated_at for run in runs), strict=True)],
        mean=[statistics.fmean(values) for values in points],
        low=[min(values) for values in points],
        high=[max(values) for values in points],
    )


def draw(rows: Sequence[Row], file: Path) -> None:
    """Writes the figure as a PNG."""
    from PIL import Image

    make_figure(rows).savefig(file, metadata={"Software": None})
    with Image.open(file) as image:  # a palette makes it a third of the size, and is not seen
        palette = image.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    palette.save(file, optimize=True)


def make_figure(rows: Sequence[Row]) -> Figure:
    """A panel an algorithm: mean and range of the seeds in its family's colour, all others faint behind it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = [row for row in rows if row.runs]
    curves = {row.name: curve(row.runs) for row in drawn}
    colours = family_colours(drawn)
    columns = min(4, len(drawn))
    height = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(max(5.0, 2.6 * columns), max(3.6, 2.05 * height + 1.15)), dpi=150, layout="constrained")
    panels = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
    low = min(min(own.low) for own in curves.values())
    panels[0, 0].set_ylim(low - 0.18 * (1.0 - low), 1.02)  # room for the numbers below a curve that stays flat
    panels[0, 0].xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    panels[0, 0].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for index, row in enumerate(drawn):
        draw_panel(panels.flat[index], row, curves, colours[row.family])
    for index, panel in enumerate(panels.flat):
        if index >= len(drawn):
            panel.set_axis_off()
        elif index + columns >= len(drawn):  # the lowest of its column, below which the last row may end early
            panel.tick_params(labelbottom=True)
    figure.supxlabel("completions sampled", fontsize=10)
    figure.supylabel("held-out accuracy", fontsize=10)
    draw_legend(figure, drawn, colours, columns)
    return figure


def draw_panel(panel: Axes, row: Row, curves: Mapping[str, Curve], colour: str) -> None:
    own = curves[row.name]
    for name, other in curves.items():
        if name != row.name:
            panel.plot(other.completions, other.mean, zorder=1, **OTHERS)
    if row.name in MUST_REACH:
        panel.axhline(MIN_ACCURACY, zorder=2, **ASKED)
    panel.fill_between(own.completions, own.low, own.high, color=colour, alpha=0.35, linewidth=0, zorder=3)
    panel.plot(own.completions, own.mean, color=colour, zorder=4, **OWN)
    panel.set_title(LABELS.get(row.name, row.name), fontsize=10, loc="left", pad=4)
    told = f"{own.mean[0]:.3f} → {own.mean[-1]:.3f}"
    panel.text(0.97, 0.05, told, transform=panel.transAxes, ha="right", va="bottom", fontsize=9, zorder=5)
    panel.grid(color="#EEEEEE", linewidth=0.6, zorder=0)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8, length=2.5)


def draw_legend(figure: Figure, drawn: Sequence[Row], colours: Mapping[str, str], columns: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    families: list[tuple[Any, str]] = [
        (Line2D([], [], color=colours[family], **OWN), FAMILIES.get(family, (family,))[0])
        for family in dict.fromkeys(row.family for row in drawn)
    ]
    others: list[tuple[Any, str]] = []
    num_seeds = max(len(row.runs) for row in drawn)
    if num_seeds > 1:
        band = Patch(color="#888888", alpha=0.4, linewidth=0)
        others.append(((band, Line2D([], [], color="#555555", linewidth=1.5)), f"mean and range of {num_seeds} seeds"))
    if len(drawn) > 1:
        others.append((Line2D([], [], **OTHERS), "the other algorithms"))
    if any(row.name in MUST_REACH for row in drawn):
        others.append((Line2D([], [], **ASKED), f"asked at the end: {MIN_ACCURACY:.2f}"))
    # A legend is filled column by column: families above, the rest below.
    entries = [entry for pair in zip_longest(families, others) for entry in pair if entry is not None]
    ncols = min(columns, -(-len(entries) // 2))
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols, fontsize=9, frameon=False)


def family_colours(drawn: Sequence[Row]) -> dict[str, str]:
    unknown = sorted({row.family for row in drawn} - FAMILIES.keys())
    colours = {family: colour for family, (_, colour) in FAMILIES.items()}
    return colours | {family: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, family in enumerate(unknown)}


if __name__ == "__main__":
    main()
