"""Trains every `<name>_arithmetic` recipe with several seeds and compares them: a table, a picture, all raw numbers.

    python scripts/compare_algorithms.py                          # every algorithm's recipe as it is, seeds 0 1 2
    python scripts/compare_algorithms.py --only grpo ppo --seeds 0 1 --completions 10240
    python scripts/compare_algorithms.py --task chains --seeds 0 1 2 3 4 --jobs 2
    python scripts/compare_algorithms.py --only grpo --trl        # and TRL's GRPO with the same words, seeds 0 1 2
    python scripts/compare_algorithms.py --redraw                 # table and picture again, from the raw numbers

With --task chains every recipe gets the keys that recipes/grpo_chains.yaml gives GRPO. --trl adds TRL's trainer on what
GRPO is told (compare_trl.py), evaluated like all others. Each run is an ordinary `rlft train` in a process of its own
(so that its peak memory is its own), --jobs of them at a time, in <out>/<name>/seed_<k>. Stopped by Ctrl-C or killed,
the same command goes on: finished runs are not repeated, begun ones are resumed, those of TRL begin again. In <out> it
leaves comparison.md (for recipes/README.md), comparison.png and comparison.json.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import compare_trl
import yaml
from significance import Difference, all_differences, half_interval, letters, report

from rlft.config import catalog
from rlft.config import compose as config
from rlft.config import overrides as command_line
from rlft.config.keys import flatten
from rlft.config.resolved import build
from rlft.logger.jsonl import EVALUATIONS, METRICS, read_lines
from rlft.runs import run_folder
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
# A2C's advantages are those of the last five tokens and of the critic's small differences. On chains its entropy bonus
# outweighs them, and drives the policy to noise (KL to the base: 8 nats per token).
OVERRIDES = {
    ("chains", "dapo"): {"steps": "28"},
    ("chains", "a2c"): {"algorithm.entropy_coef": "0"},
}

# What is asked of the recipes on their own task; it is for comparing that there are others.
MIN_GAIN = 0.15
MIN_ACCURACY = 0.90
MUST_REACH = ("grpo", "gspo", "ppo", "rloo")

REFERENCE = "grpo"
"""The algorithm that every other is compared with."""
PEER = "trl_grpo"
"""The runs of TRL's trainer on the recipe of the reference."""

# What is compared only if it is named. On-policy distillation learns from a teacher that solves the task already, and
# its recipe trains another model than the others': compare_teachers.py compares it with its rivals. TRL may be missing.
LEFT_OUT = ("opd", PEER)

HALF = 0.5
"""The accuracy whose price in completions is told."""

# What may differ between a run that is there and the one that is asked for: it changes no number.
FREE = ("resume", "logger", "checkpoint")
POLL_SECONDS = 0.2

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
    PEER: "TRL's GRPO",
}
# Class of the algorithm, in the order of table and picture: its words in the legend, its colour. Okabe and Ito's
# colours, which people with any colour vision tell apart; classes that are not listed take those that are left.
FAMILIES = {
    "GRPO": ("group-relative (GRPO)", "#0072B2"),
    "Reinforce": ("REINFORCE, no critic", "#009E73"),
    "PPO": ("actor and critic (PPO)", "#D55E00"),
    "Kimi": ("mirror descent (Kimi)", "#CC79A7"),
    "TRL": ("TRL's trainer", "#E69F00"),
}
OTHER_COLOURS = ("#56B4E9", "#000000")
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
            raise UserError("matplotlib", "is not installed, and draws the picture", remedy=pip_install("rlft[dev]"))
        if options.redraw:
            comparison = read_comparison(options.out / NUMBERS)
        else:
            jobs = make_jobs(options)
            comparison = train_all(jobs, options)
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
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help="what is learned (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="K", help="default: 0 1 2")
    parser.add_argument("--jobs", type=at_least_one, default=1, metavar="N", help="runs at a time (%(default)s)")
    parser.add_argument(
        "--out", type=Path, help="folder of all that is made (runs/compare, of another task runs/compare_<task>)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"these recipes, with or without {SUFFIX}, or {PEER}")
    parser.add_argument("--trl", action="store_true", help=f"also TRL's GRPO ({PEER}); TRL must be installed")
    parser.add_argument("--completions", type=int, metavar="N", help="of each run, by its steps; else as recipes say")
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="KEY=VALUE", help="for every run, as for rlft train"
    )
    parser.add_argument("--config-dir", type=Path, help="folder with more recipes, as for rlft train")
    parser.add_argument("--again", action="store_true", help="delete and repeat runs whose recipe has changed since")
    parser.add_argument("--redraw", action="store_true", help=f"train nothing: table and picture from {NUMBERS}")
    options = parser.parse_args(arguments)
    options.out = options.out or Path("runs") / ("compare" if options.task == TASKS[0] else f"compare_{options.task}")
    return options


def at_least_one(text: str) -> int:
    """A number of runs at a time.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}; use --jobs 1 for one after the other")
    return int(text)


# -- what is to be trained ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: a recipe with a seed; PEER is TRL's, with the recipe of the reference.

    config: plain and composed, what the run's config.yaml will hold.
    """

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
        """The class of the algorithm; of TRL's runs, its own."""
        if self.name == PEER:
            return "TRL"
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
    names = chosen_names(options.only, [*known_names(options.config_dir), PEER])
    if options.trl and PEER not in names:
        names.append(PEER)
    if PEER in names:
        compare_trl.check_installed()
    of_task, given = task_overrides(options.task), {word.partition("=")[0] for word in options.override}
    jobs = []
    for name in names:
        recipe = REFERENCE if name == PEER else name
        overrides = [f"+recipe={recipe}{SUFFIX}", "rollouts.every=0", "checkpoint.keep=1", "eval.kl_base=true"]
        keys = of_task | OVERRIDES.get((options.task, name), {})
        if options.completions is not None:
            keys.pop("steps", None)
        overrides += [f"{key}={value}" for key, value in keys.items() if key not in given]
        overrides += options.override
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
            build(plain)
            if name == PEER:
                compare_trl.check(plain)
            jobs.append(Job(name=name, seed=seed, folder=folder, overrides=words, config=plain))
    return sorted(jobs, key=lambda job: order(job.family, job.name))  # stable: seeds stay as given


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
    """Whether the recipe shows an algorithm, or is a user's own; others are other commands' or pipelines' stages."""
    if name in LEFT_OUT:
        return False
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
class Process(Protocol):
    """A run's process. processor_seconds: of it and all that it has waited for, once it has ended; None before."""

    processor_seconds: float | None

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...


class MeasuredProcess(subprocess.Popen[bytes]):
    """A process that says, when it has ended, how much processor time it has used."""

    processor_seconds: float | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self.processor_seconds = usage.ru_utime + usage.ru_stime
        return self.returncode


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A run in progress. place: "[2/6] grpo seed 1"; is_fresh: whether it was begun here, and not resumed."""

    job: Job
    place: str
    process: Process
    log: Path
    is_fresh: bool
    start: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start


def train_all(jobs: Sequence[Job], options: argparse.Namespace) -> Comparison:
    """Trains what is not finished, `options.jobs` at a time; a run that fails is told and the others go on.

    Raises:
        UserError: a run that is there differs from the one asked for, and `options.again` is not set.
        KeyboardInterrupt: asked to stop; the runs in progress have saved their state.
    """
    clear_changed(jobs, again=options.again)
    waiting, running = [job for job in jobs if not is_finished(job)], list[Running]()
    num_finished = len(jobs) - len(waiting)
    budget = {job.config["steps"] * job.completions_per_step for job in jobs}
    each = " or ".join(f"{number:,}" for number in sorted(budget))
    print(f"runs: {len(jobs)} of {each} completions, {num_finished} finished already, in {options.out}", flush=True)
    failures: dict[str, str] = {}

    def save() -> None:
        write_comparison(collect(jobs, failures, options.task), options.out / NUMBERS)

    save()
    with requests_to_stop() as requests:
        heard = 0
        try:
            while waiting or running:
                if len(requests) > heard:  # a second one, while the runs finish their steps, stops them at once
                    heard = len(requests)
                    stop(running, waiting)
                while waiting and len(running) < options.jobs:
                    job, number = waiting.pop(0), len(jobs) - len(waiting)
                    place = f"[{number}/{len(jobs)}] {job.name} seed {job.seed}"
                    running.append(begin(job, place, options))
                    steps, done = job.config["steps"], steps_done(job)
                    how = f"from step {done} of {steps}" if done else f"{steps} steps"
                    print(f"{place}: {how} of {job.completions_per_step} completions", flush=True)
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    code = run.process.poll()
                    if code == 130:  # where nobody has asked here, somebody else has stopped the run
                        requests += [] if requests else [signal.SIGINT]
                        continue
                    if (why := finish(run, code, options.jobs)) is not None:
                        failures[run.job.key] = why
                        print(f"{run.place} failed: {why}", flush=True)
                    else:
                        accuracy = read_run(run.job).accuracy
                        print(f"{run.place}: {accuracy[0]:.3f} -> {accuracy[-1]:.3f}", flush=True)
                    save()
                time.sleep(POLL_SECONDS)
        finally:
            stop(running, waiting)
    if requests:
        raise KeyboardInterrupt
    return collect(jobs, failures, options.task)


def stop(running: Sequence[Running], waiting: list[Job]) -> None:
    """Asks the runs in progress to finish their steps and to save, and begins no other."""
    waiting.clear()
    for run in running:
        run.process.send_signal(signal.SIGINT)
    if running:
        print("\nstopping: each run finishes its step and saves", file=sys.stderr, flush=True)


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
    before, now = flatten(saved), flatten(job.config)
    absent = object()
    return [
        f"{key}: {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, absent) != now.get(key, absent)
        and key.partition(".")[0] not in FREE
        and (key, now.get(key)) != ("model.date", AUTO_DATE)  # a run goes on with its own
    ]


def is_finished(job: Job) -> bool:
    """Whether the run has measured all: its last step, and the evaluation after it."""
    files = [read_lines(job.folder / name) for name in (METRICS, EVALUATIONS)]
    return all(lines and lines[-1]["step"] == job.config["steps"] for lines in files)


def command(job: Job, config_dir: Path | None) -> list[str]:
    """The command line that starts the run, or that goes on with one that was begun; TRL's begin again."""
    more = ["--config-dir", str(config_dir)] if config_dir else []
    if job.name == PEER:
        return [sys.executable, compare_trl.__file__, *job.overrides, *more]
    begun = run_folder.config_file(job.folder).exists()
    words = ["resume", str(job.folder)] if begun else ["train", *job.overrides]
    return [sys.executable, "-m", "rlft.cli", *words, *more]


def begin(job: Job, place: str, options: argparse.Namespace) -> Running:
    """Starts the run, or goes on with it; its output is in <folder>.log."""
    if job.name == PEER and job.folder.exists():
        shutil.rmtree(job.folder)
    words, is_fresh = command(job, options.config_dir), not (job.folder / METRICS).exists()
    log = job.folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb" if is_fresh else "ab") as stream:
        process = launch(words, stream, environment(options.jobs))
    return Running(job=job, place=place, process=process, log=log, is_fresh=is_fresh, start=time.monotonic())


def finish(run: Running, code: int | None, at_a_time: int) -> str | None:
    """Notes where and how long a run that ended ran; returns why it failed, None if it did not."""
    if code or not is_finished(run.job):
        return f"exit code {code}: {last_words(run.log)} ({run.log})"
    crowd = f", {at_a_time} runs at a time" if at_a_time > 1 else ""
    record = {
        "machine": machine(run.job.config["model"]["device"]) + crowd,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        # Of a resumed run both would be of its last part only.
        "wall_seconds": run.seconds if run.is_fresh else None,
        "processor_seconds": run.process.processor_seconds if run.is_fresh else None,
    }
    (run.job.folder / RECORD).write_text(json.dumps(record) + "\n")
    return None


def launch(words: Sequence[str], log: IO[bytes], variables: Mapping[str, str]) -> Process:
    """A command in a session of its own: it hears of a Ctrl-C from here, and only once."""
    return MeasuredProcess(
        words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
    )


def environment(at_a_time: int) -> dict[str, str]:
    """A run's environment variables: of several at a time each has its share of the cores, unless the user says."""
    if at_a_time == 1 or "OMP_NUM_THREADS" in os.environ:
        return dict(os.environ)
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, num_cores() // at_a_time))}


@contextlib.contextmanager
def requests_to_stop() -> Iterator[list[int]]:
    """The signals that have asked this process to end, inside; they do nothing else there."""
    heard: list[int] = []
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in caught}
    try:
        yield heard
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
    text = f"{num_cores()} CPU cores ({processor()})"
    if device.startswith("cpu") or shutil.which("nvidia-smi") is None:
        return text
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    return f"{found}, {text}" if found else text


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's model, as the system names it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


# -- what was measured -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a finished run measured.

    completions, reward, seconds: an entry a step; the completions are those sampled up to and with the step, also
    those that dynamic sampling threw away. evaluated_at (completions sampled by then), accuracy, in_format (share of
    the completions), kl_base (nats per token): an entry per evaluation, None where it was not measured.
    processor_seconds: of the whole process, evaluations and start included; None where the run was resumed.
    trl: its version, of the runs of TRL's trainer.
    """

    name: str
    family: str
    seed: int
    completions: list[int]
    reward: list[float | None]
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
    trl: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    name: str
    family: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that table and picture are made of. failures: `<name>/seed_<k>` to the reason."""

    task: str
    planned: list[Planned]
    runs: list[Run]
    failures: dict[str, str]


def collect(jobs: Sequence[Job], failures: Mapping[str, str], task: str = TASKS[0]) -> Comparison:
    """The numbers of all finished runs, from their folders."""
    return Comparison(
        task=task,
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
        in_format=[line.get("eval/reward/format") for line in evaluations],
        kl_base=[line.get("eval/kl_base") for line in evaluations],
        processor_seconds=record.get("processor_seconds"),
        peak_bytes=max(line.get("memory/peak_bytes") or 0 for line in metrics),
        machine=record.get("machine", "unknown machine"),
        torch=origin.get("torch", "unknown"),
        commit=origin.get("commit", "unknown"),
        date=record.get("date", "unknown date"),
        trl=origin.get("trl"),
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
        task=saved.get("task", TASKS[0]),  # numbers from before there were others have none
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
    """An algorithm: its finished runs, and for each seed that is not finished the reason.

    is_checked: whether anything is asked of its accuracy.
    """

    name: str
    family: str
    runs: list[Run]
    missing: dict[int, str]
    is_checked: bool

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
    def to_half(self) -> list[float]:
        """The completions that each seed took to HALF, of those that got there."""
        prices = [completions_to(HALF, run.evaluated_at, run.accuracy) for run in self.runs]
        return [price for price in prices if price is not None]

    @property
    def must_reach(self) -> bool:
        return self.is_checked and self.name in MUST_REACH

    @property
    def problems(self) -> list[str]:
        """The checks that do not hold, in words; they are of the means over seeds."""
        found = [f"seed {seed} is missing" for seed in self.missing]
        if not self.runs or not self.is_checked:
            return found
        if round(self.gain, 9) < MIN_GAIN:
            found.append(f"gain {self.gain:.4f} < {MIN_GAIN:.2f}")
        after = statistics.fmean(self.after)
        if self.must_reach and round(after, 9) < MIN_ACCURACY:
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
                is_checked=comparison.task == TASKS[0] and name != PEER,
            )
        )
    return rows


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
    "group",
    f"completions to {HALF}",
    "in format after",
    "KL to the base (nats per token)",
    "completions sampled",
    "seconds of steps",
    "processor seconds",
    "peak memory",
    "checks",
)


def table(rows: Sequence[Row], comparison: Comparison) -> str:
    """Markdown: a line an algorithm, then what the columns are, the checks, and where it was measured."""
    is_checked = any(row.is_checked for row in rows)
    columns = COLUMNS if is_checked else COLUMNS[:-1]
    differences = differences_of(rows)
    groups = letters(differences)
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cells(row, groups.get(row.name, ''))[: len(columns)])} |" for row in rows]
    lines += [
        "",
        legend(comparison),
        *(["", checks_line(rows)] if is_checked else []),
        *(f"\n{row.name} seed {seed}: {why}" for row in rows for seed, why in row.missing.items()),
        *(["", report(differences, REFERENCE)] if differences else []),
        "",
        machine_line(comparison.runs),
    ]
    return "\n".join(lines) + "\n"


def differences_of(rows: Sequence[Row]) -> list[Difference]:
    """Of the accuracies after training, between all pairs of algorithms with several seeds."""
    return all_differences({row.name: {run.seed: run.accuracy[-1] for run in row.runs} for row in rows})


def legend(comparison: Comparison) -> str:
    """What the columns are, in sentences."""
    seeds = sorted({planned.seed for planned in comparison.planned})
    if len(seeds) > 1:
        means = (
            f"Seeds {', '.join(map(str, seeds))}; mean ± half of its 95 % interval (Student's t over the seeds), "
            "seconds the median, memory the largest. "
        )
    else:
        means = f"Seed {seeds[0]}. "
    keys = " ".join(f"{key}={value}" for key, value in task_overrides(comparison.task).items())
    names = sorted({planned.name for planned in comparison.planned})
    own = {name: OVERRIDES[comparison.task, name] for name in names if (comparison.task, name) in OVERRIDES}
    also = [f"`{name}` with {' '.join(f'{k}={v}' for k, v in changed.items())}" for name, changed in own.items()]
    task = f"Each row is `rlft train +recipe=<name>{SUFFIX} {keys}`{'; '.join(['', *also])}. " if keys else ""
    return (
        f"{task}{means}Completions to {HALF} are those sampled until the first evaluation at or above it, on the line "
        "between it and the one before. Seconds of steps are the sum of `time/step`: sampling, scoring and training; "
        "processor seconds are of the whole process, its start and evaluations included. KL(policy || base) is of the "
        "held-out completions at the end. Completions that dynamic sampling threw away count as sampled."
        + (f" {LABELS[PEER]} is evaluated by rlft." if any(run.trl for run in comparison.runs) else "")
    )


def cells(row: Row, group: str = "") -> list[str]:
    """The row's texts, in the order of COLUMNS. group: its letters, see `significance.letters`."""
    recipe = LABELS[PEER] if row.name == PEER else f"`{row.name}{SUFFIX if row.is_checked else ''}`"
    checks = "; ".join(row.problems) or ("hold" if row.is_checked else "none")
    if not row.runs:
        return [recipe, *["-"] * (len(COLUMNS) - 2), checks]
    processor = [run.processor_seconds for run in row.runs if run.processor_seconds is not None]
    return [
        recipe,
        with_interval(row.before, 3),
        with_interval(row.after, 3),
        group or "-",
        price(row.to_half, len(row.runs)),
        if_all([run.in_format[-1] for run in row.runs]),
        if_all([run.kl_base[-1] for run in row.runs]),
        f"{statistics.fmean(run.completions[-1] for run in row.runs):,.0f}",
        f"{statistics.median(sum(run.seconds) for run in row.runs):.0f}",
        f"{statistics.median(processor):.0f}" if processor else "-",
        f"{max(run.peak_bytes for run in row.runs) / 1e9:.2f} GB",
        checks,
    ]


def if_all(values: Sequence[float | None]) -> str:
    """Mean ± half of its 95 % interval if every run has a value, else -."""
    measured = [value for value in values if value is not None]
    return with_interval(measured, 3) if len(measured) == len(values) else "-"


def with_interval(values: Sequence[float], digits: int) -> str:
    """Mean ± half of its 95 % interval; a single value stands alone.

    >>> with_interval([0.25, 0.75], 3)
    '0.500 ± 3.177'
    """
    mean, half = f"{statistics.fmean(values):,.{digits}f}", half_interval(values)
    return mean if half is None else f"{mean} ± {half:,.{digits}f}"


def price(completions: Sequence[float], num_seeds: int) -> str:
    """The completions that the seeds took; their median and number if some of the seeds did not get there.

    >>> price([2000.0, 2010.0], 2), price([2000.0, 1000.0], 3), price([], 2)
    ('2,005 ± 64', '1,500 (2 of 3)', 'not reached')
    """
    if not completions:
        return "not reached"
    if len(completions) == num_seeds:
        return with_interval(completions, 0)
    return f"{statistics.median(completions):,.0f} ({len(completions)} of {num_seeds})"


def checks_line(rows: Sequence[Row]) -> str:
    """The checks and whether they hold, in a sentence."""
    asked = [row.name for row in rows if row.must_reach]
    failed = [row.name for row in rows if row.problems]
    reach = f", and {MIN_ACCURACY:.2f} after training for {', '.join(asked)}" if asked else ""
    verdict = f"not so: {', '.join(failed)}" if failed else "all hold"
    return f"Checks (means over the seeds): a gain of at least {MIN_GAIN:.2f}{reach}; {verdict}."


def machine_line(runs: Sequence[Run]) -> str:
    """Machine, torch, commit and date of the runs; several of a kind where they differ."""

    def of(key: str) -> str:
        return ", ".join(sorted({str(getattr(run, key)) for run in runs}))

    peer = ", ".join(sorted({f"TRL {run.trl}, " for run in runs if run.trl}))
    return (
        f"{of('machine')}, torch {of('torch')}, {peer}commit {of('commit')}, {of('date')}."
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
    top = 1.0 if any(row.is_checked for row in drawn) else max(max(own.high) for own in curves.values())
    room = max(top - low, 0.05)
    panels[0, 0].set_ylim(low - 0.18 * room, top + 0.03 * room)  # the numbers stand below a curve that stays flat
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
    if row.must_reach:
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
    if any(row.must_reach for row in drawn):
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
