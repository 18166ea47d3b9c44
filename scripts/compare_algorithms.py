"""Trains every `<name>_arithmetic` recipe with several seeds and compares them: a table, a picture, all raw numbers.

    python scripts/compare_algorithms.py                          # every algorithm's recipe as it is, seeds 0 1 2
    python scripts/compare_algorithms.py --only grpo ppo --seeds 0 1 --override steps=20
    python scripts/compare_algorithms.py --task chains --seeds 0 1 2 3 4 --jobs 2
    python scripts/compare_algorithms.py --redraw                 # table and picture again, from the raw numbers

With --task chains every recipe gets the keys that recipes/grpo_chains.yaml gives GRPO. Each run is an ordinary
`rlft train` in a process of its own (so that its peak memory is its own), --jobs of them at a time, in
<out>/<name>/seed_<k>. Stopped by Ctrl-C or killed, the same command goes on: finished runs are not repeated, begun ones
are resumed. In <out> it leaves comparison.md (for docs/benchmarks/methods.md), comparison.png and comparison.json.

Exit codes: 0 done, 1 a run failed, 2 a mistake the user can fix, 130 stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from bench_work import machine, num_cores, table as markdown
from significance import all_differences, half_interval, report

from rlft.config import catalog, compose as config
from rlft.config.keys import flatten
from rlft.config.resolved import build
from rlft.logger.forecast import seconds_without_pauses
from rlft.runs import run_folder
from rlft.runs.lines import EVALUATIONS, METRICS, read_lines
from rlft.system.terminal import pip_install
from rlft.tokens.text import AUTO_DATE
from rlft.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIX = "_arithmetic"
TABLE, PICTURE, NUMBERS = "comparison.md", "comparison.png", "comparison.json"
RECORD = "comparison.json"  # in a run's folder: where and how long it ran, written when it is finished

TASKS = ("arithmetic", "chains")
"""The first is the recipes' own; each of the others is what the recipe `grpo_<task>` changes of `grpo_arithmetic`."""

# Keys by which a recipe differs from its own on another task, {(task, name): {key: value}}.
# Dynamic sampling throws fewer groups away on chains than on the recipe's own task, so that with the recipe's own steps
# DAPO would not sample as many completions as the others: with these it does (10,056 to 10,528).
OVERRIDES = {("chains", "dapo"): {"steps": "28"}}

REFERENCE = "grpo"
"""The algorithm that every other is compared with."""

LEFT_OUT = "opd"
"""What is compared only if it is named: it learns from a teacher, and its recipe trains another model."""

HALF = 0.5
"""The accuracy whose price in completions is told."""

# What may differ between a run that is there and the one that is asked for: it changes no number.
FREE = ("resume", "logger", "checkpoint")


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code and prints its errors."""
    options = parse(arguments)
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError("matplotlib", "is not installed, and draws the picture", remedy=pip_install("rlft[dev]"))
        if options.redraw:
            return publish(read_comparison(options.out / NUMBERS), options.out)
        jobs = make_jobs(options)
        failures = train_all(jobs, options)
        runs = [read_run(job) for job in jobs if is_finished(job)]
        return publish(Comparison(task=options.task, runs=runs, failures=failures), options.out)
    except UserError as error:
        print(f"compare_algorithms: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare_algorithms.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help="what is learned (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="K", help="default: 0 1 2")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of all that is made (runs/compare or runs/compare_<task>)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"these recipes, with or without {SUFFIX}")
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="as for rlft train, of all runs")
    parser.add_argument("--config-dir", type=Path, help="folder with more recipes, as for rlft train")
    parser.add_argument("--redraw", action="store_true", help=f"train nothing: table and picture from {NUMBERS}")
    options = parser.parse_args(arguments)
    options.out = options.out or Path("runs") / ("compare" if options.task == TASKS[0] else f"compare_{options.task}")
    return options


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


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """A job for each recipe and seed.

    Raises:
        UserError: no such recipe, a config that is refused, or one that is never evaluated.
    """
    for key, given in (("--seeds", options.seeds), ("--only", options.only or ())):
        if len({*given}) < len(given):
            raise UserError(key, "one is given twice", got=list(given), remedy="give each once")
    if options.jobs < 1:
        raise UserError("--jobs", "must be 1 or more", got=options.jobs, remedy="use --jobs 1 for one after the other")
    of_task, given = task_overrides(options.task), {word.partition("=")[0] for word in options.override}
    jobs = []
    for name in chosen_names(options.only, known_names(options.config_dir)):
        keys = of_task | OVERRIDES.get((options.task, name), {})
        overrides = [f"+recipe={name}{SUFFIX}", "rollouts.every=0", "checkpoint.keep=1", "eval.kl_base=true"]
        overrides += [f"{key}={value}" for key, value in keys.items() if key not in given] + options.override
        for seed in options.seeds:
            folder = options.out / name / f"seed_{seed}"
            words = (*overrides, f"seed={seed}", f"hydra.run.dir={folder}")
            plain = config.compose(words, options.config_dir)
            build(plain)
            if not plain["eval"]["every"]:
                raise UserError("eval.every", f"{name} is never evaluated", got=0, remedy="--override eval.every=10")
            jobs.append(Job(name=name, seed=seed, folder=folder, overrides=words, config=plain))
    return jobs


def task_overrides(task: str) -> dict[str, str]:
    """{group or key: its value on a command line} of what the recipe `grpo_<task>` changes of `grpo_arithmetic`."""
    if task == TASKS[0]:
        return {}
    recipe = yaml.safe_load(catalog.files("recipe")[f"grpo_{task}"].read_text())
    defaults, _ = recipe.pop("defaults"), recipe.pop("name")
    choices = {key: value for entry in defaults if isinstance(entry, dict) for key, value in entry.items()}
    groups = {key.removeprefix("override /"): value for key, value in choices.items()}
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in flatten({**groups, **recipe}).items()
    }


def known_names(config_dir: Path | None) -> list[str]:
    """Names of the recipes on the embedded task, without the suffix."""
    recipes = set(catalog.choices("recipe"))
    if config_dir is not None:
        recipes |= {file.stem for file in (config_dir / "recipe").glob("*.yaml")}
    return sorted(recipe.removesuffix(SUFFIX) for recipe in recipes if recipe.endswith(SUFFIX))


def chosen_names(only: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Of the known names those that are asked for; by default those of an algorithm, or a user's own.

    Raises:
        UserError: one that is not known.
    """
    if only is None:
        return [name for name in known if is_algorithm(name)]
    names = [name.removesuffix(SUFFIX) for name in only]
    for name in names:
        if name not in known:
            raise UserError("--only", "there is no such recipe", got=name, remedy=f"choose of {', '.join(known)}")
    return names


def is_algorithm(name: str) -> bool:
    """Whether the recipe shows an algorithm, or is a user's own; others are other commands' or pipelines' stages."""
    of_rlft = name + SUFFIX in catalog.choices("recipe")
    return name != LEFT_OUT and (not of_rlft or name.removeprefix("iterative_") in catalog.choices("algorithm"))


# -- training ----------------------------------------------------------------------------------------------------------
def train_all(jobs: Sequence[Job], options: argparse.Namespace) -> dict[str, str]:
    """Trains what is not finished, `options.jobs` at a time; {a run that failed, while the others went on: why}.

    Raises:
        UserError: a run that is there differs from the one asked for.
        KeyboardInterrupt: asked to stop; the runs in progress have saved their state.
    """
    refuse_changed(jobs)
    waiting = [job for job in jobs if not is_finished(job)]
    print(f"runs: {len(jobs)}, {len(jobs) - len(waiting)} finished already, in {options.out}", flush=True)
    running, stopped = set[int](), threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        print("\nstopping: each run finishes its step and saves", file=sys.stderr, flush=True)
        for pid in [*running]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def train(job: Job) -> str | None:
        if stopped.is_set():
            return None
        print(f"{job.key}: {job.config['steps']} steps", flush=True)
        why = train_one(job, options, running, stopped)
        print(f"{job.key} {'is done' if why is None else f'failed: {why}'}", flush=True)
        return why

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            reasons = dict(zip((job.key for job in waiting), pool.map(train, waiting), strict=True))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped.is_set():
        raise KeyboardInterrupt
    return {key: why for key, why in reasons.items() if why is not None}


def train_one(job: Job, options: argparse.Namespace, running: set[int], stopped: threading.Event) -> str | None:
    """Runs a job to its end and notes where and how long it ran; why it failed, None if it did not."""
    is_fresh, start = not (job.folder / METRICS).exists(), time.monotonic()
    log = job.folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb" if is_fresh else "ab") as stream:
        # In a session of its own it hears of a Ctrl-C from here, and only once.
        process = subprocess.Popen(
            command(job, options.config_dir), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            env=environment(options.jobs), start_new_session=True,
        )  # fmt: skip
    running.add(process.pid)
    if stopped.is_set():  # while it started
        os.kill(process.pid, signal.SIGINT)
    _, status, usage = os.wait4(process.pid, 0)
    running.discard(process.pid)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not is_finished(job):
        return f"exit code {process.returncode}: {last_words(log)} ({log})"
    crowd = f", {options.jobs} runs at a time" if options.jobs > 1 else ""
    record = {
        "machine": machine(job.config["model"]["device"]) + crowd,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        # Of a resumed run both would be of its last part only.
        "wall_seconds": time.monotonic() - start if is_fresh else None,
        "processor_seconds": usage.ru_utime + usage.ru_stime if is_fresh else None,
    }
    (job.folder / RECORD).write_text(json.dumps(record) + "\n")
    return None


def refuse_changed(jobs: Sequence[Job]) -> None:
    """Refuses runs of another config than is asked for now: they would be old numbers under a new name."""
    for job in jobs:
        if not run_folder.config_file(job.folder).exists():
            continue
        saved, now = run_folder.read(job.folder), flatten(job.config)
        saved.pop(run_folder.ORIGIN, None)
        before = flatten(saved)
        if now.get("model.date") == AUTO_DATE:  # a run goes on with its own
            before["model.date"] = AUTO_DATE
        keys = [
            f"{key}: {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
            for key in sorted(before.keys() | now.keys())
            if key.partition(".")[0] not in FREE and before.get(key, "absent") != now.get(key, "absent")
        ]
        if keys:
            problem = f"a run there is of another config ({'; '.join(keys)})"
            raise UserError("--out", problem, got=job.folder, remedy="delete it, or choose another folder")


def is_finished(job: Job) -> bool:
    """Whether the run has measured all: its last step, and the evaluation after it."""
    files = [read_lines(job.folder / name) for name in (METRICS, EVALUATIONS)]
    return all(lines and lines[-1]["step"] == job.config["steps"] for lines in files)


def command(job: Job, config_dir: Path | None) -> list[str]:
    """The command line that starts the run, or that goes on with one that was begun."""
    begun = run_folder.config_file(job.folder).exists()
    words = ["resume", str(job.folder)] if begun else ["train", *job.overrides]
    return [sys.executable, "-m", "rlft.cli", *words, *(["--config-dir", str(config_dir)] if config_dir else [])]


def environment(at_a_time: int) -> dict[str, str]:
    """A run's environment variables: of several at a time each has its share of the cores, unless the user says."""
    if at_a_time == 1 or "OMP_NUM_THREADS" in os.environ:
        return dict(os.environ)
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, num_cores() // at_a_time))}


def last_words(log: Path) -> str:
    """What a run that failed said: its last line in rlft's own voice, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("rlft: ")]
    return (ours or lines or ["said nothing"])[-1]


# -- what was measured -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a finished run measured.

    completions, seconds: an entry a step; the completions are those sampled up to and with the step, also
    those that dynamic sampling threw away. evaluated_at (completions sampled by then), accuracy, in_format (share of
    the completions), kl_base (nats per token): an entry per evaluation, None where it was not measured.
    processor_seconds: of the whole process, evaluations and start included; None where the run was resumed.
    """

    name: str
    seed: int
    completions: list[int]
    seconds: list[float]
    evaluated_at: list[int]
    accuracy: list[float]
    in_format: list[float | None]
    kl_base: list[float | None]
    processor_seconds: float | None
    peak_bytes: int
    machine: str
    torch: str
    commit: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that table and picture are made of. failures: `<name>/seed_<k>` to the reason."""

    task: str
    runs: list[Run]
    failures: dict[str, str]


def read_run(job: Job) -> Run:
    """The numbers of a finished run.

    Raises:
        UserError: it did not evaluate exact_match.
    """
    metrics, evaluations = read_lines(job.folder / METRICS), read_lines(job.folder / EVALUATIONS)
    a_step = job.config["prompts_per_step"] * job.config["group_size"]
    completions, sampled = [], 0
    for line in metrics:
        sampled += round(line.get("sampled/completions") or a_step)
        completions.append(sampled)
    origin, record = run_folder.read(job.folder).get(run_folder.ORIGIN, {}), job.folder / RECORD
    noted = json.loads(record.read_text()) if record.exists() else {}
    return Run(
        name=job.name,
        seed=job.seed,
        completions=completions,
        seconds=list(map(seconds_without_pauses, metrics)),
        evaluated_at=[completions[line["step"] - 1] if line["step"] else 0 for line in evaluations],
        accuracy=[accuracy_of(line, job) for line in evaluations],
        in_format=[line.get("eval/reward/format") for line in evaluations],
        kl_base=[line.get("eval/kl_base") for line in evaluations],
        processor_seconds=noted.get("processor_seconds"),
        peak_bytes=max(line.get("memory/peak_bytes") or 0 for line in metrics),
        machine=noted.get("machine", "unknown machine"),
        torch=origin.get("torch", "unknown"),
        commit=origin.get("commit", "unknown"),
        date=noted.get("date", "unknown date"),
    )


def accuracy_of(line: Mapping[str, Any], job: Job) -> float:
    """Share of right answers: exact_match, which is 0 or 1, also where it is not the reward that decides."""
    for key in ("eval/exact_match", "eval/reward/exact_match"):
        if line.get(key) is not None:
            return line[key]
    problem = f"{job.key} was evaluated without exact_match"
    raise UserError("reward", problem, got=job.folder, remedy="put exact_match among the recipe's rewards")


def write_comparison(comparison: Comparison, file: Path) -> None:
    """JSON with a line a run, so that two of them can be compared by eye."""
    runs = ",\n".join(json.dumps(asdict(run)) for run in comparison.runs)
    task, failures = json.dumps(comparison.task), json.dumps(comparison.failures)
    file.write_text(f'{{\n"task": {task},\n"runs": [\n{runs}\n],\n"failures": {failures}\n}}\n')


def read_comparison(file: Path) -> Comparison:
    """What `write_comparison` wrote, now or earlier, when it wrote more.

    Raises:
        UserError: there is no such file.
    """
    if not file.exists():
        raise UserError("--redraw", "there are no raw numbers", got=file, remedy="train first: leave --redraw out")
    saved = json.loads(file.read_text())
    runs = [Run(**{field.name: entry[field.name] for field in fields(Run)}) for entry in saved["runs"]]
    return Comparison(task=saved["task"], runs=runs, failures=saved["failures"])


def publish(comparison: Comparison, out: Path) -> int:
    """Writes raw numbers, table and picture, prints the table; 1 if a run failed, else 0."""
    out.mkdir(parents=True, exist_ok=True)
    write_comparison(comparison, out / NUMBERS)
    rows = make_rows(comparison.runs)
    text = table(rows, comparison)
    (out / TABLE).write_text(text)
    print(f"\n{text}")
    if rows:
        make_figure(rows).savefig(out / PICTURE, metadata={"Software": None})
    return int(bool(comparison.failures))


# -- the table ---------------------------------------------------------------------------------------------------------
Rows = Mapping[str, Sequence[Run]]
"""The finished runs of each algorithm by its name."""


def make_rows(runs: Sequence[Run]) -> Rows:
    found: dict[str, list[Run]] = {}
    for one in sorted(runs, key=lambda run: run.name):
        found.setdefault(one.name, []).append(one)
    return found


def completions_to(accuracy: float, evaluated_at: Sequence[int], measured: Sequence[float]) -> float | None:
    """The completions sampled until the first evaluation at or above this accuracy; None if there is no such one.

    On the line between that evaluation and the one before it.

    >>> completions_to(0.5, [0, 100, 200], [0.1, 0.4, 0.6])
    150.0
    """
    reached = next((index for index, value in enumerate(measured) if value >= accuracy), None)
    if not reached:
        return None if reached is None else float(evaluated_at[0])
    (x0, x1), (y0, y1) = evaluated_at[reached - 1 : reached + 1], measured[reached - 1 : reached + 1]
    return x0 + (accuracy - y0) / (y1 - y0) * (x1 - x0)


COLUMNS = (
    "recipe",
    "held-out accuracy before",
    "after",
    f"completions to {HALF}",
    "in format after",
    "KL to the base (nats per token)",
    "completions sampled",
    "seconds of steps",
    "processor seconds",
    "peak memory",
)


def table(rows: Rows, comparison: Comparison) -> str:
    """Markdown: a line an algorithm, then what the columns are, what failed, and where it was measured."""
    differences = all_differences({name: {run.seed: run.accuracy[-1] for run in runs} for name, runs in rows.items()})
    parts = [
        markdown(list(COLUMNS), [cells(name, runs) for name, runs in rows.items()]),
        legend(comparison),
        *(f"{key}: {why}" for key, why in comparison.failures.items()),
        *([report(differences, REFERENCE)] if differences else []),
        machine_line(comparison.runs),
    ]
    return "\n\n".join(parts) + "\n"


def legend(comparison: Comparison) -> str:
    """What the columns are, in sentences."""
    keys = "".join(f" {key}={value}" for key, value in task_overrides(comparison.task).items())
    names, seeds = ({getattr(run, key) for run in comparison.runs} for key in ("name", "seed"))
    own = [
        f"; `{name}` with {' '.join(f'{key}={value}' for key, value in changed.items())}"
        for (task, name), changed in OVERRIDES.items()
        if task == comparison.task and name in names
    ]
    return (
        f"Each row is `rlft train +recipe=<name>{SUFFIX}{keys}`{''.join(own)}. "
        f"Seeds {', '.join(map(str, sorted(seeds)))}; mean ± half of its 95 % interval (Student's t over the seeds), "
        f"seconds the median, memory the largest. Completions to {HALF}: until the first evaluation at or above it, on "
        "the line between it and the one before; those that dynamic sampling threw away count. Seconds of steps: "
        "sampling, scoring and training; processor seconds: of the whole process. KL(policy || base): of the held-out "
        "completions at the end."
    )


def cells(name: str, runs: Sequence[Run]) -> list[str]:
    """A row's texts, in the order of COLUMNS."""
    processor = [run.processor_seconds for run in runs if run.processor_seconds is not None]
    return [
        f"`{name}`",
        with_interval([run.accuracy[0] for run in runs], 3),
        with_interval([run.accuracy[-1] for run in runs], 3),
        price(runs),
        with_interval([run.in_format[-1] for run in runs], 3),
        with_interval([run.kl_base[-1] for run in runs], 3),
        f"{statistics.fmean(run.completions[-1] for run in runs):,.0f}",
        f"{statistics.median(sum(run.seconds) for run in runs):.0f}",
        f"{statistics.median(processor):.0f}" if processor else "-",
        f"{max(run.peak_bytes for run in runs) / 1e9:.2f} GB",
    ]


def with_interval(values: Sequence[float | None], digits: int) -> str:
    """Mean ± half of its 95 % interval; a single value stands alone. - where a run has none.

    >>> with_interval([0.25, 0.75], 3), with_interval([0.25, None], 3)
    ('0.500 ± 3.177', '-')
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    mean, half = f"{statistics.fmean(known):,.{digits}f}", half_interval(known)
    return mean if half is None else f"{mean} ± {half:,.{digits}f}"


def price(runs: Sequence[Run]) -> str:
    """The completions that the seeds took to HALF; their median and number if some of them did not get there."""
    prices = [completions_to(HALF, run.evaluated_at, run.accuracy) for run in runs]
    reached = [completions for completions in prices if completions is not None]
    if len(reached) == len(runs):
        return with_interval(reached, 0)
    return f"{statistics.median(reached):,.0f} ({len(reached)} of {len(runs)})" if reached else "not reached"


def machine_line(runs: Sequence[Run]) -> str:
    """Machine, torch, commit and date of the runs; several of a kind where they differ."""

    def of(key: str) -> str:
        return ", ".join(sorted({str(getattr(run, key)) for run in runs}))

    if not runs:
        return "Nothing is finished."
    return f"{of('machine')}, torch {of('torch')}, commit {of('commit')}, {of('date')}."


# -- the picture -------------------------------------------------------------------------------------------------------
COLOUR = "#0072B2"
Curve = tuple[list[float], list[float]]


def curve(runs: Sequence[Run]) -> Curve:
    """(completions, accuracy) at each evaluation, means of the seeds; with dynamic sampling completions differ."""
    at = [statistics.fmean(values) for values in zip(*(run.evaluated_at for run in runs), strict=True)]
    return at, [statistics.fmean(values) for values in zip(*(run.accuracy for run in runs), strict=True)]


def make_figure(rows: Rows) -> Figure:
    """A panel an algorithm: mean and range of the seeds, all others faint behind it."""
    from matplotlib.figure import Figure

    curves = {name: curve(runs) for name, runs in rows.items()}
    columns = min(4, len(rows))
    height = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(max(5.0, 2.6 * columns), max(3.6, 2.05 * height + 1.15)), dpi=150, layout="constrained")
    panels = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(rows) :]:
        panel.set_axis_off()
    for panel, (name, runs) in zip(panels.flat, rows.items(), strict=False):
        draw_panel(panel, name, runs, curves)
    figure.supxlabel("completions sampled", fontsize=10)
    figure.supylabel("held-out accuracy: mean and range of the seeds", fontsize=10)
    return figure


def draw_panel(panel: Axes, name: str, runs: Sequence[Run], curves: Mapping[str, Curve]) -> None:
    for another, other in curves.items():
        if another != name:
            panel.plot(*other, zorder=1, linewidth=0.8, color="#D4D4D4")
    at, mean = curves[name]
    seeds = [*zip(*(run.accuracy for run in runs), strict=True)]
    panel.fill_between(at, [*map(min, seeds)], [*map(max, seeds)], color=COLOUR, alpha=0.35, linewidth=0, zorder=3)
    panel.plot(at, mean, color=COLOUR, zorder=4, linewidth=1.5, marker="o", markersize=3)
    panel.set_title(f"{name}: {mean[0]:.3f} → {mean[-1]:.3f}", fontsize=9, loc="left", pad=4)
    panel.grid(color="#EEEEEE", linewidth=0.6, zorder=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8, length=2.5)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
