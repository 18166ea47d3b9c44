"""Step time and efficiency of 1 to 1,024 engines and 1 to 256 ranks, from costs that are measured here.

    python scripts/simulate_cluster.py measure     # what the parts of a step take in one process: costs.json
    python scripts/simulate_cluster.py check       # predictions beside real runs of 1, 2 and 4 engines and ranks
    python scripts/simulate_cluster.py predict     # a table and a picture for large clusters

The first two take some minutes each on a quiet machine, on the CPU; every process has one thread. The model is
cluster_model.py. Leaves check.md, cluster.md and cluster.png in <out>. Needs `pip install 'rlft[bench]'` (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
from bench_work import table, where_and_when
from cluster_model import Group, Layout, StageCosts, StepTime, apart, lane_costs, parts, simulate

from rlft.logger.forecast import BETWEEN
from rlft.logger.jsonl import METRICS, read_lines, rollout_files

LENGTHS = Path(__file__).resolve().parents[1] / "tests" / "trainer" / "row_lengths.json"
LANES = 4
WORDS = {
    "model.device": "cpu", "generation": "transformers", "prompts_per_step": "64", "group_size": "8",
    "data.size": "4096", "generation.max_tokens": "36", "generation.temperature": "1.4", "prompts.max_tokens": "64",
    "generation.transformers.batch_size": "32", "lora.rank": "16", "lora.alpha": "16", "trainer.lr": "1e-9",
    "eval.every": "0", "checkpoint.every": "0", "token_values.every": "0", "rollouts.every": "1",
    "scoring.workers": "1", "logger": "[jsonl]", "name": "cluster", "cluster.engines": "1", "cluster.lanes": str(LANES),
}  # fmt: skip
MEASURED = (
    {"generation.max_tokens": "48", "generation.transformers.batch_size": "64"},
    {"generation.max_tokens": "48", "generation.transformers.batch_size": "16"},
    {"generation.max_tokens": "16"},
    {"prompts_per_step": "24"},
)
"""Workloads whose steps give the costs of sampling and training; the runs of `check` have another one."""
CHECKED = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 4))
"""Engines and ranks of the real runs."""
WARM_UP, STARTING = 2, 3
"""Steps at the beginning of a run that are left out, and further ones of runs side by side."""
BANDWIDTH = 1.25e9
"""Bytes a second between machines: 10 Gbit/s."""
PROMPTS = 4096
DISTRIBUTIONS = {"short completions": "grpo_arithmetic, step 1", "a long tail": "a long tail"}
"""Names to distributions of lengths in LENGTHS."""
LARGE = ((1, 1), (4, 1), (16, 4), (64, 16), (256, 64), (1024, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "check", "predict"])
    parser.add_argument("--steps", type=int, default=6, help=f"of each run, after {WARM_UP} that are left out")
    parser.add_argument("--rounds", type=int, default=2, help="real runs of each kind, in turn")
    parser.add_argument("--layouts", nargs="+", default=[f"{e}x{r}" for e, r in CHECKED], help="engines x ranks")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step on a large cluster, 8 completions each")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    {"measure": measure, "check": check, "predict": predict}[options.what](options)


# -- measured in one process -----------------------------------------------------------------------------------------
def measure(options: argparse.Namespace) -> None:
    steps = [step for words in MEASURED for step in steps_of(run(options, words))]
    alone = run(options, {"cluster.engines": "0"})
    own = steps_of(alone)
    speeds = speeds_of(options)
    costs = fitted(steps, own, speeds, adapter_of(alone))
    (options.out / "costs.json").write_text(json.dumps(asdict(costs), indent=1) + "\n")
    print(json.dumps(asdict(costs), indent=1))


def fitted(steps: Sequence[Step], own: Sequence[Step], speeds: Sequence[float], adapter: Path) -> StageCosts:
    """steps: of runs with one engine and one rank. own: of a run that samples itself, and scores afterwards."""
    sampling = [
        (
            len(units := parts(step.groups, step.at_once)),
            sum(max(max(n) for _, n in unit) for unit in units),
            sum(sum(n) for _, n in step.groups),
        )
        for step in steps
    ]
    unit, position, token = positive_fit(sampling, [step.seconds["sample"] for step in steps])
    training = [(1, sum(lane_costs(step.trained, LANES))) for step in steps]
    update, update_token = positive_fit(training, [step.seconds["update"] for step in steps])
    publish, size = sending(adapter)
    gradient = 4 * count_of(adapter)
    bytes_each, send = handing_over(steps[0].groups)
    exchange, exchange_byte = exchanging(gradient)
    return StageCosts(
        unit=unit,
        position=position,
        token=token,
        score=statistics.median(step.seconds["score"] / step.completions for step in own),
        credit=statistics.median(step.seconds["credit"] / step.completions for step in steps),
        update=update,
        update_token=update_token,
        send=send,
        exchange=exchange,
        exchange_byte=exchange_byte,
        publish=publish,
        load=max(0.0, statistics.median(step.seconds["publish"] for step in steps) - publish),
        rest=max(0.0, statistics.median(step.rest for step in steps)),
        adapter_bytes=size,
        gradient_bytes=gradient,
        completion_bytes=bytes_each,
        speeds=tuple(speeds),
    )


def positive_fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of relative errors with factors of at least 0: one that would be negative is left out."""
    names = list(range(len(rows[0])))
    while True:
        matrix = numpy.array([[row[i] / s for i in names] for row, s in zip(rows, seconds, strict=True)])
        factors = numpy.linalg.lstsq(matrix, numpy.ones(len(rows)), rcond=None)[0]
        if (factors >= 0).all():
            found = dict(zip(names, factors, strict=True))
            return [float(found.get(i, 0.0)) for i in range(len(rows[0]))]
        names.pop(int(factors.argmin()))


def speeds_of(options: argparse.Namespace) -> list[float]:
    """How fast each of 1, 2, .. processes is that sample and train side by side, beside a single one; one on a core."""
    seconds = []
    for number in range(1, len(os.sched_getaffinity(0)) + 1):
        folders = [options.out / f"beside-{i}" for i in range(number)]
        processes = [started(folder, {"cluster.engines": "0"}, options.steps + STARTING + 2) for folder in folders]
        for process in processes:
            ended(process)
        # While the first ones run, others may still start; the last ones may run alone.
        steps = [step for folder in folders for step in steps_of(folder)[STARTING:-2]]
        seconds.append(statistics.median(step.seconds["sample"] + step.seconds["update"] for step in steps))
        print(f"{number} side by side: {seconds[-1]:.3f} s a step", flush=True)
    return [min(1.0, seconds[0] / each) for each in seconds]


def adapter_of(folder: Path) -> Path:
    return next(iter(sorted(folder.rglob("adapter_model.safetensors"))))


def sending(adapter: Path) -> tuple[float, int]:
    """(seconds of the driver to make an adapter the bytes that engines are sent, how many they are)."""
    from safetensors.torch import load_file, save

    tensors = load_file(adapter)

    def once() -> int:
        data = save({name: tensor.clone() for name, tensor in tensors.items()})
        sha256(data).hexdigest()
        return len(data)

    return timed(once), once()


def count_of(adapter: Path) -> int:
    """The weights of an adapter."""
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(adapter).values())


def handing_over(groups: Sequence[Group]) -> tuple[float, float]:
    """(bytes, seconds to send and to receive) of a completion with its token ids, log-probs, masks and rewards."""
    import torch

    lengths = [(prompt, n) for prompt, own in groups for n in own]
    longest = max(prompt + n for prompt, n in lengths)
    shape = (len(lengths), longest)
    batch = {
        "token_ids": torch.zeros(shape, dtype=torch.int64),
        "masks": torch.zeros((3, *shape), dtype=torch.bool),
        "numbers": torch.zeros((3, *shape)),
    }
    size = len(pickle.dumps(batch, protocol=5))
    seconds = timed(lambda: pickle.loads(pickle.dumps(batch, protocol=5)))
    return size / len(lengths), seconds / len(lengths)


def timed(work: Any, times: int = 20) -> float:
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def exchanging(gradient_bytes: int) -> tuple[float, float]:
    """(seconds of a broadcast between two ranks of this machine, further seconds for each byte)."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=second_rank, args=(there, gradient_bytes), daemon=True)
    from rlft.trainer.ranks import LOOPBACK, Rendezvous, open_store

    store = open_store(LOOPBACK)
    meeting = Rendezvous(host=LOOPBACK, port=store.port, name="exchange", ranks=2, timeout=60.0)
    other.start()
    here.send(meeting)
    small, large = broadcasts(meeting, 0, gradient_bytes)
    other.join(60)
    return small, max(0.0, large - small) / gradient_bytes


def second_rank(pipe: Any, gradient_bytes: int) -> None:
    broadcasts(pipe.recv(), 1, gradient_bytes)


def broadcasts(meeting: Any, rank: int, gradient_bytes: int) -> tuple[float, float]:
    """Seconds of a small and of a large one; the ranks send in turn, as lanes do."""
    import torch

    from rlft.trainer.ranks import Exchange

    torch.set_num_threads(1)
    exchange = Exchange(meeting, rank, torch.device("cpu"))
    seconds = []
    for size in (1, gradient_bytes // 4):
        buffer = torch.zeros(size)
        seconds.append(timed(lambda buffer=buffer: [exchange.broadcast(buffer, root) for root in (0, 1)]) / 2)
    exchange.close()
    return seconds[0], seconds[1]


# -- real runs ---------------------------------------------------------------------------------------------------------
def check(options: argparse.Namespace) -> None:
    costs = read_costs(options.out)
    layouts = [tuple(map(int, layout.split("x"))) for layout in options.layouts]
    real: dict[Any, list[Step]] = {layout: [] for layout in layouts}
    model: dict[Any, list[StepTime]] = {layout: [] for layout in layouts}
    for number in range(options.rounds):
        for engines, ranks in layouts:
            folder = run(options, {"cluster.engines": str(engines), "cluster.ranks": str(ranks)})
            for step in steps_of(folder):
                layout = Layout(engines=engines, ranks=ranks, lanes=LANES, at_once=step.at_once)
                real[engines, ranks].append(step)
                model[engines, ranks].append(simulate(step.groups, costs, layout, step.trained))
            print(f"round {number + 1}, {engines} engines, {ranks} ranks", flush=True)
    text = compared(layouts, real, model) + f"\n\n{where_and_when()}."
    (options.out / "check.md").write_text(text + "\n")
    print(text)


def compared(layouts: Sequence[Any], real: dict[Any, Any], model: dict[Any, Any]) -> str:
    """Medians of the real steps, and what the model says of the same steps."""
    rows = []
    for layout in layouts:
        row = [str(layout[0]), str(layout[1])]
        for name in ("sample", "update", "publish"):
            modelled = statistics.median(getattr(step, name) for step in model[layout])
            row.append(f"{statistics.median(step.seconds[name] for step in real[layout]):.3f} / {modelled:.3f}")
        steps = [step.seconds["step"] for step in real[layout]]
        modelled = statistics.median(step.total for step in model[layout])
        error = modelled / statistics.median(steps) - 1
        row += [
            f"{statistics.median(steps):.3f} ({min(steps):.3f} to {max(steps):.3f})",
            f"{modelled:.3f}",
            f"{error:+.1%}",
        ]
        rows.append(row)
    head = ["engines", "ranks", "sample, s: real / model", "update, s", "publish, s", "step, s: real", "model", "error"]
    return table(head, rows)


def run(options: argparse.Namespace, more: dict[str, str]) -> Path:
    """The folder of a run that has ended."""
    folder = options.out / "run"
    ended(started(folder, more, options.steps))
    return folder


def started(folder: Path, more: dict[str, str], steps: int) -> subprocess.Popen[bytes]:
    shutil.rmtree(folder, ignore_errors=True)
    words = [f"{key}={value}" for key, value in (WORDS | more).items()]
    command = [sys.executable, "-m", "rlft.cli", "train", *words, f"steps={WARM_UP + steps}", f"hydra.run.dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def ended(process: subprocess.Popen[bytes]) -> None:
    if process.wait(timeout=1800):
        sys.exit(f"{' '.join(map(str, process.args))} ended with {process.returncode}")  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step of a run did, and how long it took.

    Args:
        trained: groups that taught something, which alone are in the update.
        at_once: completions that an engine computes together.
        seconds: by stage, and of the whole `step`.
    """

    groups: list[Group]
    trained: list[Group]
    at_once: int
    seconds: dict[str, float]

    @property
    def completions(self) -> int:
        return sum(len(lengths) for _, lengths in self.groups)

    @property
    def rest(self) -> float:
        """Seconds that no stage counts."""
        return 2 * self.seconds["step"] - sum(self.seconds.values())


def steps_of(folder: Path) -> list[Step]:
    """The steps of a run after the first ones."""
    metrics = {line["step"]: line for line in read_lines(folder / METRICS)}
    at_once = batch_size_of(folder)
    steps = []
    for path, step in rollout_files(folder):
        if step <= WARM_UP:
            continue
        lengths: dict[str, list[int]] = {}
        teaching: set[str] = set()
        for line in read_lines(path):
            lengths.setdefault(line["prompt_id"], []).append(len(line["token_ids"]))
            if line["advantage"]:
                teaching.add(line["prompt_id"])
        prompt = round(metrics[step]["tokens/prompt"] / len(lengths))
        groups: dict[str, Group] = {name: (prompt, own) for name, own in lengths.items()}
        times = {name: value for name, value in metrics[step].items() if name not in BETWEEN}
        seconds = {name[5:]: value for name, value in times.items() if name.startswith("time/")}
        trained = [group for name, group in groups.items() if name in teaching]
        steps.append(Step(groups=list(groups.values()), trained=trained, at_once=at_once, seconds=seconds))
    return steps


def batch_size_of(folder: Path) -> int:
    """Of the transformers engine of a run, from its config."""
    import yaml

    config = yaml.safe_load((folder / "config.yaml").read_text())
    return config["generation"]["transformers"]["batch_size"]


def read_costs(out: Path) -> StageCosts:
    file = out / "costs.json"
    if not file.is_file():
        sys.exit(f"{file} is missing; make it by: python scripts/simulate_cluster.py measure --out {out}")
    return StageCosts(**json.loads(file.read_text()))


# -- large clusters ----------------------------------------------------------------------------------------------------
def predict(options: argparse.Namespace) -> None:
    costs = apart(read_costs(options.out), BANDWIDTH)
    recorded = json.loads(LENGTHS.read_text())
    rows, curves = [], {}
    for name, record in DISTRIBUTIONS.items():
        groups = drawn([(prompt, tuple(lengths)) for prompt, lengths in recorded[record]], options.prompts)
        curves[name] = []
        for engines, ranks in LARGE:
            layout = Layout(engines=engines, ranks=ranks, lanes=max(ranks, LANES), workers=engines, at_once=64)
            step = simulate(groups, costs, layout)
            alone = curves[name][0][2] if curves[name] else step
            best = step_at_best(alone, engines, ranks)
            curves[name].append((engines, ranks, step, best))
            driver = max(step.driver, key=lambda part: step.driver[part])
            rows.append(
                [
                    name, f"{engines:,}", f"{ranks:,}", f"{step.sample:.2f}", f"{step.busy:.0%}", f"{step.update:.2f}",
                    f"{step.balance:.0%}", f"{step.publish:.2f}", f"{step.total:.2f}",
                    f"{alone.total / step.total:.0f}", f"{best / step.total:.0%}", f"{step.overlapped:.2f}",
                    f"{sum(step.driver.values()):.2f} ({driver})",
                ]
            )  # fmt: skip
    head = [
        "lengths", "engines", "ranks", "sample, s", "engines busy", "update, s", "balance", "publish, s", "step, s",
        "times as fast", "efficiency", "with a lag, s", "driver alone, s (most of it)",
    ]  # fmt: skip
    text = table(head, rows) + f"\n\n{options.prompts:,} prompts x 8 a step. {where_and_when()}."
    (options.out / "cluster.md").write_text(text + "\n")
    print(text)
    draw(curves, options.out / "cluster.png")


def step_at_best(alone: StepTime, engines: int, ranks: int) -> float:
    """The step if sampling and updates were divided without loss, and nothing else were to do."""
    return (alone.sample + alone.score) / engines + (alone.credit + alone.update) / ranks


def drawn(groups: Sequence[Group], number: int) -> list[Group]:
    """As many groups, drawn from the recorded ones."""
    return random.Random(0).choices(groups, k=number)


def draw(curves: dict[str, list[tuple[int, int, StepTime, float]]], file: Path) -> None:
    """Seconds of the stages above, efficiency below; a column for each distribution of lengths."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, cells = pyplot.subplots(2, len(curves), figsize=(5 * len(curves), 7), squeeze=False, layout="constrained")
    for column, (name, points) in enumerate(curves.items()):
        places = [f"{engines:,}\n{ranks:,}" for engines, ranks, *_ in points]
        upper, lower = cells[0][column], cells[1][column]
        for stage in ("sample", "update", "publish", "total", "overlapped"):
            label = {"total": "step", "overlapped": "step with overlap.lag=1"}.get(stage, stage)
            upper.plot(places, [getattr(step, stage) for *_, step, _ in points], marker="o", label=label)
        upper.plot(places, [sum(step.driver.values()) for *_, step, _ in points], ":", label="the driver's own work")
        upper.set_yscale("log")
        upper.set_title(name)
        lower.plot(places, [best / step.total for *_, step, best in points], marker="o", label="step")
        lower.plot(places, [step.busy for *_, step, _ in points], marker="o", label="engines busy while sampling")
        lower.plot(places, [step.balance for *_, step, _ in points], marker="o", label="balance of lanes")
        lower.set_ylim(0, 1.05)
        lower.set_xlabel("engines (above) and ranks (below)")
        for cell in (upper, lower):
            cell.grid(alpha=0.3)
    cells[0][0].set_ylabel("seconds")
    cells[1][0].set_ylabel("efficiency")
    figure.legend(*cells[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    cells[1][0].legend(loc="lower left")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
